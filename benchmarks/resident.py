"""Does resident memory follow the budget where Inductor compiles? Peaks of whole processes, beside what plans predict.

    python -m benchmarks.resident --model gpt2 --width 256 --batch 16 --sequence 256 --shares 1.0,0.7,0.4 --out benchmarks/results/resident.json

Each budget is a process of its own: it plans, compiles, and runs steps on this machine's CPU. Compiling takes more memory than a small step does, so the
high-water mark of the process (VmHWM) is reset after the first step, which warms everything up, and is read after some more (Linux only; both through /proc).
Before it is reset, what the allocator has in stock is given back.

Resident memory has in it what the plan does not know: torch, the compiler, what the allocator does not give back. So only the order is compared: a plan that
predicts a lower peak should have a lower mark. Repeats are interleaved, and the median of each budget is told with all values.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.layouts import positions
from benchmarks.record import write


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2", help="a name in autopar.models.configs")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="hidden size, all else in proportion")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument(
        "--shares", default="1.0,0.7,0.4,0.0", help="budgets, between the least memory there is and what saving everything takes"
    )
    parser.add_argument("--backend", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument("--steps", type=int, default=3, help="whose peak is measured, behind the first")
    parser.add_argument("--repeats", type=int, default=1, help="processes for every budget")
    parser.add_argument("--out", type=Path, help="where to write the result (JSON)")
    parser.add_argument("--budget", type=float, help=argparse.SUPPRESS)  # of a child
    return parser.parse_args()


def program(a: argparse.Namespace) -> Any:
    from benchmarks.baselines.program import public

    shape = a.layers, a.batch, positions(a.model, a.sequence)
    return public(a.model, *shape, {"dp": 1}, "cpu:1", "ddp", None, "float32", a.backend == "inductor", a.width)


def planned(p: Any, budget_bytes: float, least: bool = False) -> Any:
    from autopar.planner.planning import plan_graph
    from autopar.solver.solve import Limits

    training = replace(p.training, budget_bytes=budget_bytes)
    return plan_graph(p.graph, p.mesh_axes, p.cluster, training, Limits(seconds=30), least=least).plan


def child(a: argparse.Namespace) -> dict[str, float]:
    """One budget: what is predicted (without the optimizer's state, which is not made), and the mark."""
    import torch

    from benchmarks.baselines.measure import lowered, tensors

    p = program(a)
    plan = planned(p, a.budget)
    step = lowered(p, plan, tensors(p), a.backend)
    state_bytes = p.optimizer_bytes(p.parts(plan))[0]
    with torch.no_grad():
        step()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the mark is what is resident now
        before = status("VmRSS")
        for _ in range(a.steps):
            step()
    again = sum(policy == "recompute" for policy in plan.activations.values())
    return {
        "budget_bytes": a.budget, "predicted_bytes": plan.predicted["peak_memory_bytes"] - state_bytes, "resident_peak_bytes": status("VmHWM"),
        "resident_before_bytes": before, "made_again": again,
    }  # fmt: skip


def status(key: str) -> int:
    """Bytes, of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def main() -> None:
    a = parse()
    if a.budget is not None:
        print(json.dumps(child(a)))
        return
    p = program(a)
    low, high = planned(p, math.inf, True).predicted["peak_memory_bytes"], planned(p, math.inf).predicted["peak_memory_bytes"]
    budgets = [low * (1 + 1e-6) + float(share) * (high - low) for share in a.shares.split(",")]
    found: dict[float, list[dict[str, float]]] = {b: [] for b in budgets}
    for _ in range(a.repeats):
        for b in budgets:
            command = [sys.executable, "-m", "benchmarks.resident", *sys.argv[1:], "--budget", str(b)]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[b].append(json.loads(out.splitlines()[-1]))
    rows: list[dict[str, Any]] = [
        {
            **runs[0],
            "resident_peak_bytes": statistics.median(r["resident_peak_bytes"] for r in runs),
            "all": [r["resident_peak_bytes"] for r in runs],
        }
        for runs in found.values()
    ]
    for r in rows:
        print(
            f"predicted {r['predicted_bytes'] / 1e6:.1f} MB, resident {r['resident_peak_bytes'] / 1e6:.1f} MB; {r['made_again']} made again",
            flush=True,
        )
    by = [sorted(range(len(rows)), key=lambda i: rows[i][key]) for key in ("predicted_bytes", "resident_peak_bytes")]
    print("the same order" if by[0] == by[1] else "another order")
    arguments = {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items()}
    write(a.out, "python -m benchmarks.resident", {"arguments": arguments, "rows": rows, "same_order": by[0] == by[1]})


if __name__ == "__main__":
    main()
