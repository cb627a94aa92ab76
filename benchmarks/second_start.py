"""How long a program takes to its first step: the first time, the second, and where an earlier run has left what it compiled.

    python -m benchmarks.second_start --processes 2

The program is the demo's (`examples/demo.py`). Its processes start over and over with the same folders for kept plans and for Inductor's kernels, both
empty at first; then once more with kernels alone, as it was when plans were not kept. "Elsewhere" all of these folders are empty again, and so is that for what
compilers leave in passing (TMPDIR): as on another machine of the same kind, with nothing, and with the folder that a run with `artifacts=` wrote. Seconds are rank 0's, from the start of the interpreter to
the end of the first optimizer step, and those of every stage that it tells.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import write

ROOT = Path(__file__).resolve().parents[1]
# name, whose folders, whether plans are kept in them, whether with artifacts=
STARTS = (
    ("first", "a", True, False),
    ("second", "a", True, False),
    ("second, plans not kept", "a", False, False),
    ("first, which writes artifacts", "b", True, True),
    ("elsewhere, with artifacts", "c", True, True),
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    parser.add_argument("--artifacts", help=argparse.SUPPRESS)
    parser.add_argument("--child", metavar="RENDEZVOUS", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


class Stages(logging.Handler):
    """Seconds of the stages that are told."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.fullmatch(r"(.+) in ([\d.]+) s", record.getMessage()):
            self.seconds[found[1]] = float(found[2])


def first_step(a: argparse.Namespace) -> dict[str, Any]:
    """One process of the program."""
    import torch
    import torch.distributed as dist

    import autopar
    from examples.demo import LEARNING_RATE, Curve, batches, build, train

    stages = Stages()
    logging.getLogger("autopar").addHandler(stages)
    logging.getLogger("autopar").setLevel("INFO")
    imported_s = time.time() - a.began
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{a.child}", rank=a.rank, world_size=a.processes)
    sizes = argparse.Namespace(hidden=320, layers=6, seq=128, batch=8, steps=1)
    model = autopar.compile(build(sizes, seed=0), {"dp": a.processes}, artifacts=a.artifacts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    train(model, optimizer, batches(sizes), Curve())
    total_s = time.time() - a.began
    dist.destroy_process_group()
    halves = [h for s in model._programs.steps() for h in (s.stats["forward"], *s.stats["backward"].values())]
    compiled = int(sum(h["miss"] for h in halves))
    return {"total_s": total_s, "imports_s": imported_s, "stages_s": stages.seconds, "compiled": compiled}


def start(processes: int, env: dict[str, str], artifacts: str = "") -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.second_start", "--processes", str(processes), "--child", f"{folder}/rendezvous"]
        command += ["--began", str(time.time()), *(["--artifacts", artifacts] if artifacts else [])]
        ranks = [
            subprocess.Popen([*command, "--rank", str(r)], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for r in range(processes)
        ]
        said = [p.communicate() for p in ranks]
    for p, (_, err) in zip(ranks, said, strict=True):
        if p.returncode:
            raise SystemExit(f"a process exited with {p.returncode}\n{err[-4000:]}")
    result: dict[str, Any] = json.loads(said[0][0].splitlines()[-1])
    return result


def main() -> None:
    a = parse()
    if a.child is not None:
        print(json.dumps(first_step(a)))
        return
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        for name, machine, plans, kept in STARTS:
            here = Path(folder, machine)
            (here / "tmp").mkdir(parents=True, exist_ok=True)
            dirs = {
                "TORCHINDUCTOR_CACHE_DIR": f"{here}/kernels",
                "TMPDIR": f"{here}/tmp",
                "AUTOPAR_CACHE": f"{here}/plans" if plans else "0",
            }
            runs[name] = start(a.processes, {**env, **dirs}, f"{folder}/compiled" if kept else "")
            print(f"{name:34} {runs[name]['total_s']:6.1f} s  {runs[name]['stages_s']}", flush=True)
    write(a.out, "python -m benchmarks.second_start", {"processes": a.processes, "runs": runs})


if __name__ == "__main__":
    main()
