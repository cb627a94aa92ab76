"""A model on the stages of a pipeline trains as on one device: its loss, every gradient, steps of AdamW.

python -m tests.dist.test_pipelines --model gpt2 --schedule interleaved --processes 2 [--mesh pp=2,dp=2] [--micro-batches 4] [--layers 4] [--local] [--backend inductor]
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.pipeline.named import NAMES
from tests.dist.launch import run
from tests.dist.test_planned import _cluster
from tests.dist.trained import trained_beside
from tests.models import ZOO
from tests.wide import cases, wide

BATCH, SEQ, SEED = 8, 16, 3
LAYERS = 4


def built(name: str, layers: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(SEED)
    return ZOO[name].build(layers).train(), ZOO[name].inputs(BATCH, SEQ)


def trained(
    name: str,
    mesh: dict[str, int],
    schedule: str = "1f1b",
    number: int = 4,
    layers: int = LAYERS,
    *,
    layout: str | None = "fsdp",
    local: bool = False,
    steps: int = 3,
    scale: float = 1.0,
    backend: str = "aot_eager",
    virtual: int | None = None,
) -> dict[str, Any]:
    """Trains on the mesh and on one device. The largest difference of losses, gradients and parameters; the parameters that this rank has."""
    reference, batch = built(name, layers)
    model = copy.deepcopy(reference)
    torch.manual_seed(SEED)
    planned: dict[str, Any] = {"cluster": _cluster()} if layout is None else {"layout": layout}
    compiled = autopar.compile(
        model,
        mesh,
        micro_batches=number,
        schedule=schedule,
        virtual_stages=virtual,
        backend=backend,
        inputs="local" if local else "global",
        **planned,
    )
    worst = trained_beside(reference, compiled, batch, SEED, steps, local, scale)
    every = [n for n, _ in reference.named_parameters()]
    return {**worst, "has": [n for n, _ in compiled.named_parameters()], "all": every}


Case = tuple[str, dict[str, int], str, int, int, str | None, bool]  # model, mesh, schedule, micro-batches, layers, layout, local inputs
TWO: list[Case] = [
    ("llama", {"pp": 2}, "1f1b", 4, 2, "fsdp", False),
    ("gpt2", {"pp": 2}, "interleaved", 4, 4, "fsdp", False),
    ("lora", {"pp": 2}, "zb-h1", 2, 2, None, False),
]
NOW: list[Case] = [("toy-dropout", {"pp": 2}, "interleaved", 4, 4, "fsdp", False)]
FOUR: list[Case] = [
    ("gpt2", {"pp": 2, "dp": 2}, "1f1b", 4, 2, "fsdp", True),
    ("llama", {"pp": 2, "tp": 2}, "zbv", 4, 4, "tp", False),
]
_MORE_ON_FOUR: dict[str, list[Case]] = {
    **{f"four, {schedule}": [("gpt2", {"pp": 4}, schedule, 8, 8, "fsdp", False)] for schedule in NAMES},
    "four stages": [("llama", {"pp": 4}, "1f1b", 4, 4, None, False), ("t5", {"pp": 4}, "1f1b", 4, 2, "fsdp", False)],
    **{
        f"four, with {layout or 'a plan'}": [(name, {"pp": 2, "dp": 2}, "interleaved", 2, 4, layout, layout == "fsdp") for name in ("llama", "gpt2", "bert")]
        for layout in ("fsdp", None, "ddp")
    },
    "four, with tp": [(name, {"pp": 2, "tp": 2}, "1f1b", 4, 4, "tp", False) for name in ("llama", "gpt2", "bert", "mixtral")],
    "four, with experts split": [("mixtral", {"pp": 2, "dp": 2}, "1f1b", 4, 4, "fsdp+ep", False)],
    "four, stages within": [("llama", {"dp": 2, "pp": 2}, "1f1b", 4, 4, "fsdp", True)],
}  # fmt: skip


def _more(name: str) -> list[Case]:
    if name == "t5":  # two layers are four, encoder and decoder
        return [("t5", {"pp": 2}, "1f1b", 4, 2, "fsdp", False), ("t5", {"pp": 2}, "zbv", 4, 2, None, False)]
    return [
        *((name, {"pp": 2}, schedule, 4, 4, "fsdp", False) for schedule in NAMES),
        (name, {"pp": 2}, "1f1b", 8, 2, None, False),
        (name, {"pp": 2}, "1f1b", 1, 2, "fsdp", False),
    ]


# By name: processes, and what they run one after the other.
CASES: dict[str, tuple[int, list[Case]]] = {
    "now": (2, NOW),
    "two": (2, TWO),
    "four": (4, FOUR),
    **{name: (4, some) for name, some in _MORE_ON_FOUR.items()},
    **{name: (2, _more(name)) for name in ("llama", "gpt2", "gemma3", "bert", "mixtral", "vit", "lora", "qwen3", "t5")},
}


def _all(which: list[Case]) -> list[dict[str, Any]]:
    return [
        trained(name, mesh, schedule, number, layers, layout=layout, local=local)
        for name, mesh, schedule, number, layers, layout, local in which
    ]


@pytest.mark.parametrize("which", cases(CASES, ["now"]))
def test_equals_one_device(which: str) -> None:
    processes, run_cases = CASES[which]
    found = run(_all, processes, run_cases, timeout=1800)
    for case, *ranks in zip(run_cases, *found, strict=True):
        assert max(r[k] for r in ranks for k in ("loss", "gradients", "parameters")) < 2e-4, (case, ranks)
        assert max(r["loss"] for r in ranks) < 5e-6, case
        # Every parameter is somewhere, and no rank has all.
        assert {n for r in ranks for n in r["has"]} == set(ranks[0]["all"]), case
        assert all(len(r["has"]) < len(r["all"]) for r in ranks), case


def _gathered_once(name: str, schedule: str) -> dict[str, Any]:
    """With every parameter gathered by a stage's first micro-batch, for all of them."""
    reference, batch = built(name, LAYERS)
    mesh = {"pp": 2, "dp": 2}
    how: dict[str, Any] = {"micro_batches": 4, "schedule": schedule, "backend": "aot_eager"}
    first = autopar.compile(copy.deepcopy(reference), mesh, layout="fsdp", **how)
    first(**batch).loss.backward()
    params = {n: dataclasses.replace(c, once_a_call=c.storage != c.compute) for n, c in first.plan.params.items()}
    torch.manual_seed(SEED)
    again = autopar.compile(copy.deepcopy(reference), mesh, plan=dataclasses.replace(first.plan, params=params), **how)
    worst = trained_beside(reference, again, batch, SEED, 3)
    steps = again.compiled_steps
    return {**worst, "later": [step._later is not None for step in steps if step.is_gathered_once], "steps": len(steps)}


@wide
@pytest.mark.parametrize(("name", "schedule"), [("gpt2", "interleaved"), ("llama", "zbv")])
def test_gathered_once_a_call(name: str, schedule: str) -> None:
    for found in run(_gathered_once, 4, name, schedule):
        assert max(found[k] for k in ("loss", "gradients", "parameters")) < 2e-4, found
        assert found["later"] and all(found["later"]), found


def _by_a_plan(path: str, layers: int) -> dict[str, Any]:
    reference, batch = built("llama", layers)
    torch.manual_seed(SEED)
    compiled = autopar.compile(copy.deepcopy(reference), plan=path, backend="aot_eager")
    worst = trained_beside(reference, compiled, batch, SEED, 2)
    plan = compiled.plan
    return {**worst, "pipeline": plan.pipeline, "mesh": plan.mesh_axes, "micro_batches": plan.micro_batches, "predicted": plan.predicted}


@pytest.mark.parametrize("schedule", cases(["1f1b", "interleaved", None], [None]))
def test_a_plan_that_was_made_without_the_cluster(schedule: str | None, tmp_path: Path) -> None:
    """Of eight layers, folded from captures of two and three, with its cuts, its schedule, which it chose where none is said, and its number of micro-batches, which nobody says again."""
    reference, batch = built("llama", 8)
    cluster = _cluster().part(1, 4)
    plan = autopar.plan(
        reference, batch, cluster, {"pp": 2, "dp": 2}, micro_batches=4, schedule=schedule, precision="fp32", options={"seconds": 30}
    )
    assert plan.pipeline is not None and "captures of 2 and 3 layers" in plan.text()
    plan.save(tmp_path / "plan.json")
    for r in run(_by_a_plan, 4, str(tmp_path / "plan.json"), 8, timeout=900):
        assert max(r[k] for k in ("loss", "gradients", "parameters")) < 2e-4, r
        assert r["pipeline"] == plan.pipeline and r["predicted"] == plan.predicted
        assert (r["mesh"], r["micro_batches"]) == ({"dp": 2}, 4)


def test_stages_that_keep_what_there_is_room_for(tmp_path: Path) -> None:
    """In memory that is too little for what 1f1b's first rank would keep: its layers make more again than the others', as the plan's file says, and all is as one device has it."""
    reference, batch = built("llama", 8)
    cluster, how = _cluster().part(1, 4), {"micro_batches": 4, "schedule": "1f1b", "precision": "fp32", "options": {"seconds": 60}}
    roomy = autopar.plan(reference, batch, cluster, {"pp": 4}, **how)
    plan = autopar.plan(reference, batch, cluster, {"pp": 4}, memory=0.85 * roomy.predicted["peak_memory_bytes"], **how)
    p = plan.pipeline
    assert p is not None and max(p.peak_bytes) <= plan.predicted["budget_bytes"] < max(roomy.predicted["peak_memory_bytes"], 0)
    (cut,) = plan.segments.values()
    assert len(cut) > 1
    plan.save(tmp_path / "plan.json")
    for r in run(_by_a_plan, 4, str(tmp_path / "plan.json"), 8, timeout=900):
        assert max(r[k] for k in ("loss", "gradients", "parameters")) < 2e-4, r
        assert r["pipeline"] == p and r["micro_batches"] == 4


def _mesh(text: str, processes: int) -> dict[str, int]:
    return {n: int(s) for n, s in (a.split("=") for a in text.split(","))} if text else {"pp": processes}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--mesh", default="")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--layout", default="fsdp")
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--local", action="store_true")
    args = parser.parse_args()
    mesh = _mesh(args.mesh, args.processes)
    for name in args.model.split(","):
        for schedule in args.schedule.split(","):
            found = run(_main, math.prod(mesh.values()), name, mesh, schedule, args)
            said = {k: max(f[k] for f in found) for k in ("loss", "gradients", "parameters")}
            has = [len(f["has"]) for f in found]
            assert {n for f in found for n in f["has"]} == set(found[0]["all"])
            print(
                f"{name:<8} {schedule:<12} {mesh}: "
                + ", ".join(f"{k} {v:.1e}" for k, v in said.items())
                + f"; parameters {has} of {len(found[0]['all'])}",
                flush=True,
            )


def _main(name: str, mesh: dict[str, int], schedule: str, args: argparse.Namespace) -> dict[str, Any]:
    layout = None if args.layout == "planned" else args.layout
    return trained(name, mesh, schedule, args.micro_batches, args.layers, layout=layout, local=args.local, backend=args.backend)


if __name__ == "__main__":
    main()
