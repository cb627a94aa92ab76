"""`autopar plan`: the plan of a training step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.options import AsJson, Batch, Computed, Devices, Imbalance, Model, Sequence, writable
from autopar.cli.planned import (
    Accumulation,
    Axes,
    Chunks,
    Gap,
    Hand,
    Head,
    Layers,
    Memory,
    Micro,
    Offloaded,
    Optimizer,
    Order,
    PlanningMemory,
    Step,
    TimeLimit,
)
from autopar.errors import AutoparError


def plan(
    model: Model, cluster: Devices, batch: Batch, seq: Sequence, mesh: Axes = None, layers: Layers = None, precision: Computed = "bf16",
    optimizer: Optimizer = "adamw", grad_accumulation: Accumulation = 1, micro_batches: Micro = None, memory: Memory = None, offload: Offloaded = None, layout: Hand = None,
    loss_head: Head = "auto", schedule: Order = None, virtual_stages: Chunks = None, time_limit: TimeLimit = None, gap: Gap = None, planning_memory: PlanningMemory = None,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="write the plan here; - is standard output")] = None,
    imbalance: Imbalance = 1.0,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Plan a training step; needs no device, no weights and no network."""
    if output == "-" and as_json:
        raise AutoparError("-o - and --json both write to standard output", where="-o", fix="leave one out: --json has the plan in it")
    if output not in (None, "-"):
        writable(Path(str(output)), "The plan", "--output")
    asked = Step(
        model,
        cluster,
        batch,
        seq,
        mesh,
        layers,
        precision,
        optimizer,
        grad_accumulation,
        memory,
        offload,
        layout,
        time_limit,
        gap,
        planning_memory,
        micro_batches,
        loss_head,
        schedule,
        virtual_stages,
        imbalance,
    )
    made = asked.ask("plan")
    from autopar.plan import schema as plan_schema

    if output == "-":
        typer.echo(plan_schema.dumps(made))
        return
    if output is not None:
        plan_schema.save(made, output)
    if as_json:
        from autopar.cli.documents import plan_document

        typer.echo(plan_document(made))
    else:
        typer.echo(made.text())
