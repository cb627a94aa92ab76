"""`autopar explain`: why the plan does not have an operator or a parameter otherwise."""

from __future__ import annotations

from typing import Annotated

import typer

from autopar.cli.options import AsJson, Batch, Computed, Devices, Imbalance, Model, Sequence
from autopar.cli.planned import Accumulation, Axes, Gap, Hand, Head, Layers, Memory, Micro, Offloaded, Optimizer, Step, TimeLimit


def explain(
    model: Model,
    operator: Annotated[str, typer.Argument(help="a module's path, a parameter or an operator, or how it ends: mlp.gate_proj")],
    placement: Annotated[str, typer.Argument(help='what mesh axes split: "tp:out", "Shard(1) over tp", "Replicate over dp"')],
    cluster: Devices, batch: Batch, seq: Sequence, mesh: Axes = None, layers: Layers = None, precision: Computed = "bf16",
    optimizer: Optimizer = "adamw", grad_accumulation: Accumulation = 1, micro_batches: Micro = None, memory: Memory = None, offload: Offloaded = None, layout: Hand = None,
    loss_head: Head = "auto", time_limit: TimeLimit = None, gap: Gap = None, imbalance: Imbalance = 1.0, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Say why the plan does not have an operator or a parameter placed so, or what that would cost."""
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
        micro_batches=micro_batches,
        loss_head=loss_head,
        imbalance=imbalance,
    )
    found = asked.ask("explain", op=operator, placement=placement)
    if as_json:
        from autopar.cli.documents import explanation_document

        typer.echo(explanation_document(operator, placement, found))
    else:
        typer.echo(found.text)
