"""`autopar compile`: the step of a plan, compiled ahead for all ranks by one process, into the folder that `autopar.compile(..., artifacts=folder)` loads.

Graphs are the same text on every rank, so one process serves: as the first rank of a mesh whose others do not exist. It compiles for the device that it has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.options import AsJson, Batch, Computed, Model, Sequence, SomeLayers, StateOf, built
from autopar.cli.screen import Screen
from autopar.errors import AutoparError, MeshError

if TYPE_CHECKING:
    from autopar.plan.plan import Plan
    from autopar.runtime.module import ParallelModule

Accumulation = Annotated[int, typer.Option("--grad-accumulation", min=1, help="as it will be passed to autopar.compile")]


def compile(
    model: Model,
    plan: Annotated[Path, typer.Option("--plan", metavar="FILE", help="the plan, as `autopar plan -o` or plan.save() wrote it")],
    batch: Batch,
    seq: Sequence,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="what artifacts= of autopar.compile will name")],
    layers: SomeLayers = None,
    precision: Computed = "bf16",
    optimizer: StateOf = "adamw",
    grad_accumulation: Accumulation = 1,
    as_json: AsJson = False,
) -> None:
    """Compile a plan's training step for the device that is here, for every rank of the mesh to load."""
    from autopar.plan.plan import Plan

    given = Plan.load(plan)
    if given.pipeline is not None:
        raise MeshError(
            "stages of a pipeline are compiled by their own ranks",
            where="--plan",
            fix="pass artifacts= to autopar.compile: the first run writes them",
        )
    with Screen("compiling") as screen:
        compile_for(
            given,
            model,
            layers,
            batch,
            seq,
            output,
            screen.timed,
            precision=precision,
            optimizer=optimizer,
            grad_accumulation=grad_accumulation,
        )
    if as_json:
        from autopar.cli.documents import written_document

        typer.echo(written_document([plan], output))
    else:
        typer.echo(f'written to {output}: autopar.compile(..., plan="{plan}", artifacts="{output}") loads it')


def compile_for(plan: Plan, name: str, layers: int | None, batch: int, seq: int, folder: Path, timed: Any, **how: Any) -> None:
    """how: further arguments of `autopar.compile`."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from autopar import _torch
    from autopar.api import compile as compiled
    from autopar.distributed.groups import be_alone

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if dist.is_initialized():
        raise AutoparError("this process is in a process group", fix="call `autopar compile` as a process of its own, not under torchrun")
    os.environ["LOCAL_WORLD_SIZE"] = str(_per_node(plan, kind))  # as torchrun will say: links, and so what is joined, depend on it
    axes = dict(plan.mesh_axes)
    size = 1
    for n in axes.values():
        size *= n
    _torch.imagined_world(0, size)
    be_alone(True)
    try:
        module, shapes = built(name, layers, batch, seq)
        timed("model built")
        mesh = init_device_mesh(kind, tuple(axes.values()), mesh_dim_names=tuple(axes))
        parallel = compiled(module, mesh, plan=plan, artifacts=folder, **how)
        timed("parameters of one rank made")
        parallel.prepare(**{n: torch.zeros(shape, dtype=torch.int64, device=kind) for n, shape in shapes.items()})
        timed("forward compiled")
        _backwards(parallel, int(how["grad_accumulation"]))
        timed("backward compiled")
    finally:
        be_alone(False)
        dist.destroy_process_group()


def _backwards(parallel: ParallelModule, grad_accumulation: int) -> None:
    """Every form of them that training calls, and the forward of later micro-batches."""
    for step in parallel._programs.steps():
        if step.has_backward:
            for sync, accumulated in _forms(parallel._builder.micro_batches, grad_accumulation):
                step.backward_of(sync, accumulated)
        if step.is_gathered_once:
            assert step.later is not None


def _forms(micro_batches: int, grad_accumulation: int) -> Iterator[tuple[bool, bool]]:
    if micro_batches > 1 or grad_accumulation > 1:
        yield False, False
        yield True, True
    else:
        yield True, False
    if max(micro_batches, grad_accumulation) > 2:
        yield False, True


def _per_node(plan: Plan, kind: str) -> int:
    from autopar.hardware.cluster import Cluster, names

    base = plan.cluster.partition(":")[0]
    if base in names() and (base == "cpu") != (kind == "cpu"):
        raise AutoparError(
            f"the plan is for {plan.cluster}, and the device here is a {'GPU' if kind == 'cuda' else 'CPU'}: code is compiled for the device that is here",
            where="--plan",
            fix="call this where the devices are, or pass artifacts= to autopar.compile: the first run writes them",
        )
    return Cluster.of(plan.cluster).devices_per_node
