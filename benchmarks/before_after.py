"""Plans and planning times of another revision against this working tree's, in one run: a change of structure changes neither.

    python -m benchmarks.before_after --before f46dca0 --out benchmarks/results/before_after.json
    python -m benchmarks.before_after --before HEAD~20 --case llama3-8b,h100:8x8,64,64 --rounds 3

Cases are those of `benchmarks.planning`. The other revision is checked out into a temporary folder; commands of both run in turn, each in a process of
its own. A case is "same" if all that the former plan file says but the solver's seconds is the same: fingerprint, strategies, what is kept, and the price. Where
a solver's clock ended the search, plans may differ between two runs of one revision; such a case is said to have been stopped by time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.planning import CASES, command_of
from benchmarks.record import write

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("solver", "passes", "kernels")  # they lie beside the package and are imported from within it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="a revision")
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=60.0, help="the solver's time limit")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        then = Path(folder) / "then"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--quiet", "--detach", str(then), a.before], check=True)
        try:
            trees = {"before": tree(then, Path(folder) / "before"), "after": tree(ROOT, Path(folder) / "after")}
            rows = [compared(case, trees, a.seq, a.seconds, a.rounds) for case in a.case or [c for c in CASES if "points=" not in c]]
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(then)], check=True)
    write(a.out, "python -m benchmarks.before_after", {"before": a.before, "seq": a.seq, "rows": rows})
    return 0 if all(r["same"] or "time" in r["stopped_by"] for r in rows) else 1


def tree(checkout: Path, to: Path) -> Path:
    """The import package as one folder, as it is installed."""
    package = to / "autopar"
    package.mkdir(parents=True)
    for path in [*(checkout / "autopar").iterdir(), *(checkout / room for room in ROOMS)]:
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    return to


def compared(case: str, trees: dict[str, Path], seq: int, seconds: float, rounds: int) -> dict[str, Any]:
    plans: dict[str, dict[str, Any]] = {}
    took: dict[str, list[float]] = {which: [] for which in trees}
    for i in range(rounds):
        for which in sorted(trees, reverse=bool(i % 2)):
            took_s, plans[which] = planned(case, trees[which], seq, seconds)
            took[which].append(took_s)
    before, after = plans["before"], plans["after"]
    added = sorted(after.keys() - before.keys())  # what files of before do not say cannot differ
    after = {k: v for k, v in after.items() if k not in added}
    after["predicted"] = {k: v for k, v in after["predicted"].items() if k in before["predicted"]}
    stopped = [p["solver"].pop("stopped_by") for p in (before, after)]
    for p in (before, after):
        p["solver"].pop("seconds", None)
    row = {
        "case": case, "same": before == after, "added": added, "differs": sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k)),
        "step_time_s": [p["predicted"]["step_time_s"] for p in (before, after)], "stopped_by": stopped,
        "before_s": [round(s, 2) for s in took["before"]], "after_s": [round(s, 2) for s in took["after"]],
        "ratio": round(min(took["after"]) / min(took["before"]), 3),
    }  # fmt: skip
    said = "same plan" if row["same"] else f"differs in {', '.join(row['differs'])}"
    print(f"{case}: {said}; {min(took['before']):.1f} s before, {min(took['after']):.1f} s after ({row['ratio']:.2f})", flush=True)
    return row


def planned(case: str, path: Path, seq: int, seconds: float) -> tuple[float, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        start = time.perf_counter()
        done = subprocess.run(
            command_of(case, seq, seconds, out),
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(path)},
            capture_output=True,
            text=True,
            check=False,
        )
        took_s = time.perf_counter() - start
        if done.returncode:
            sys.exit(f"{case} fails with {path.name}:\n{done.stdout}\n{done.stderr}")
        found: dict[str, Any] = json.loads(out.read_text())["plan"]
        return took_s, found


if __name__ == "__main__":
    raise SystemExit(main())
