"""Looks for programs that do not do what eager does.

    python -m tests.fuzz --seconds 600 --seed 1 [--programs N] [--backend mixed] [--mesh a=2,tp=2] [--without formats,rough] [--loops]

Every failure is printed, small, with its seed and setting; with --keep a folder, it is written there too, one for every kind of failure.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.fuzz import keeping
from tests.fuzz.check import Outcome
from tests.fuzz.generate import FEATURES, generate
from tests.fuzz.judge import Failure
from tests.fuzz.loops import search
from tests.fuzz.report import Report
from tests.fuzz.settings import Setting, Wanted
from tests.fuzz.workers import Worker

TOLD = 200  # programs, after which a line says how many there were
EAGER = 20  # times that a program which crashed runs in eager PyTorch, which may write where it should not and live
ANSWER: dict[str, Any] = {"unfit": "", "equal": 0, "refused": {}, "source": "", "seconds": 0.0}


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--seconds", type=float, default=600)
    a.add_argument("--seed", type=int, default=0, help="of the first program; the next one has the next")
    a.add_argument("--programs", type=int, default=10**9)
    a.add_argument("--backend", default="aot_eager", choices=("aot_eager", "inductor", "mixed"))
    a.add_argument("--mesh", default="", help="such as a=2,tp=2; default: one of a few for each program")
    a.add_argument("--planned", type=float, default=0.08, help="share of the runs on ranks that the solver plans")
    a.add_argument("--without", default="", help=f"of {', '.join(FEATURES)}")
    a.add_argument("--shrink", type=float, default=60, help="seconds for making a failing program small")
    a.add_argument("--keep", default="", help="folder for what fails")
    a.add_argument("--loops", action="store_true", help="training loops instead of single steps")
    a.add_argument("--processes", type=int, default=1, help="of a loop: 1, or gloo processes")
    o = a.parse_args()
    if o.loops:
        search(o.seed, o.programs, o.seconds, o.processes)
        return
    mesh = {k: int(v) for k, v in (x.split("=") for x in o.mesh.split(",") if x)} or None
    wanted = Wanted(mesh, o.planned, {"aot_eager": 0.0, "mixed": 0.2, "inductor": 1.0}[o.backend])
    task = {"wanted": asdict(wanted), "without": [f for f in o.without.split(",") if f], "shrink_s": o.shrink}
    run(o.seed, o.programs, o.seconds, task, Path(o.keep) if o.keep else None)


def run(seed: int, programs: int, seconds: float, task: dict[str, Any], folder: Path | None) -> Report:
    report, worker, start = Report(), Worker(), time.monotonic()
    seen: set[str] = set()
    try:
        for number in range(seed, seed + programs):
            if time.monotonic() - start > seconds:
                break
            if number > seed and (number - seed) % TOLD == 0:
                print(f"{number - seed} programs in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            # One of each kind is made small: the others are the same defect, mostly.
            got = worker.ask({**task, "seed": number, "seen": sorted(seen)}, 240 + task["shrink_s"])
            alone = {**task, "seed": number, "seen": [], "eager": True}
            if "died" in got and any("died" in worker.ask(alone, 60) for _ in range(EAGER)):
                got = {**ANSWER, "unfit": "eager PyTorch crashes"}
            outcome = _outcome(number, got, frozenset(task["without"]))
            report.add(outcome)
            report.statements += Counter(got.get("statements", {}))
            if outcome.failure is not None:
                assert outcome.setting is not None
                print(
                    f"\n=== seed {number}: {outcome.failure.kind}\n--- {outcome.setting}\n{outcome.source}\n{outcome.failure.text}",
                    flush=True,
                )
                if folder is not None and outcome.failure.kind not in seen:
                    keeping.write(folder, f"{outcome.failure.kind} {number}", outcome.source, [outcome.setting], outcome.failure.kind)
                seen.add(outcome.failure.kind)
    finally:
        worker.close()
    print(report.text(time.monotonic() - start))
    return report


def _outcome(number: int, got: dict[str, Any], without: frozenset[str]) -> Outcome:
    if "died" in got:
        return Outcome(generate(number, without)[0].source, failure=Failure("crash", got["died"]), setting=Setting())
    failure = Failure(**got["failure"]) if "failure" in got else None
    setting = Setting.of(got["setting"]) if failure else None
    return Outcome(got.get("small", got["source"]), got["unfit"], got["equal"], Counter(got["refused"]), failure, setting, got["seconds"])


if __name__ == "__main__":
    main()
