"""What each freedom of a pipeline's plan brings, one after the other, by the same prices.

    python -m benchmarks.ablation --out benchmarks/results/ablation.json
    python -m benchmarks.ablation --case llama3-70b,h100:4x8,pp=4/dp=2/tp=4,256,4096

A case is model,cluster,mesh,batch,sequence, the computation in bfloat16. Of each

    by hand         the best hand layout with as many stages, by `autopar.search`: any tensor parallelism, micro-batch, recomputation and virtual stages
    even, 1f1b      `autopar.plan` on the mesh, free choice of every operator, as many layers on each stage, 1f1b, the same policies on all stages
    cut by time     stages cut where they take as long: fewer layers beside the head
    by stage        stages keep what their ranks have room for, and have layers accordingly
    schedule        the schedule that is chosen

Every plan has its own number of micro-batches, the fastest; each fits on all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import autopar
from autopar.errors import AutoparError
from autopar.models.configs import build, config
from autopar.planner.cuts import Cut
from benchmarks.record import write

CASES = (
    "llama3-8b,h100:2x8,pp=2/dp=8,64,8192",
    "llama3-70b,h100:4x8,pp=4/dp=2/tp=4,256,4096",
    "gemma3-1b,h100:1x8,pp=4/dp=2,64,4096",
)
FREEDOMS = ("by hand", "even, 1f1b", "cut by time", "by stage", "schedule")


def even(layers: Sequence[str], work: Sequence[float], stages: int) -> Cut:
    """As many layers on each stage, or one more on the first of them."""
    n, more = divmod(len(layers), stages)
    ends = [s * n + min(s, more) for s in range(stages + 1)]
    return Cut(tuple(tuple(layers[a:b]) for a, b in pairwise(ends)))


def measured(case: str, seconds: float) -> dict[str, Any]:
    name, cluster, mesh_text, batch, seq = case.split(",")
    mesh = {n: int(s) for n, s in (axis.split("=") for axis in mesh_text.split("/"))}
    model = build(config(name))
    inputs = dict.fromkeys(("input_ids", "labels"), (int(batch), int(seq)))
    how: dict[str, Any] = {"micro_batches": "auto", "precision": "bf16", "options": {"seconds": seconds}}
    row: dict[str, Any] = {"case": case, "step_s": {}, "took_s": {}, "what": {}}

    def note(freedom: str, began: float, step_s: float, what: str) -> None:
        row["step_s"][freedom], row["took_s"][freedom], row["what"][freedom] = step_s, round(time.perf_counter() - began, 1), what
        print(f"{case}: {freedom:<12} {step_s:.4g} s, {what}", flush=True)

    began = time.perf_counter()
    try:
        options = {"pp": [mesh["pp"]], "idle": False, "offload": False}
        best = autopar.search(model, inputs, cluster, global_batch=int(batch), top_k=1, precision="bf16", options=options)[0]
        note("by hand", began, best.prediction.step_time_s, str(best.layout))
    except AutoparError as e:
        row["what"]["by hand"] = e.what
    alike = mock.patch("autopar.planner.stage_policies.StagePolicies.find", lambda *args: None)
    for freedom, schedule, without in (
        ("even, 1f1b", "1f1b", (alike, mock.patch("autopar.planner.pipelined.cut_work", even))),
        ("cut by time", "1f1b", (alike,)),
        ("by stage", "1f1b", ()),
        ("schedule", None, ()),
    ):
        began = time.perf_counter()
        with contextlib.ExitStack() as stack:
            for patch in without:
                stack.enter_context(patch)
            plan = autopar.plan(model, inputs, cluster, mesh, schedule=schedule, **how)
        assert plan.pipeline is not None
        cut = ", ".join(str(len(x)) for x in plan.pipeline.layers)
        note(
            freedom,
            began,
            plan.predicted["step_time_s"],
            f"{plan.micro_batches} micro-batches, {plan.pipeline.schedule}, layers by stage {cut}",
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--seconds", type=float, default=300.0, help="that a plan may take")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    rows = [measured(case, a.seconds) for case in a.case or CASES]
    write(a.out, "python -m benchmarks.ablation", {"rows": rows})


if __name__ == "__main__":
    main()
