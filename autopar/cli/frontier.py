"""`autopar frontier`: plans from the fastest to the one of least memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.options import AsJson, Batch, Computed, Devices, Imbalance, Model, Sequence, writable
from autopar.cli.planned import Accumulation, Axes, Gap, Hand, Head, Layers, Micro, Offloaded, Optimizer, Step
from autopar.errors import AutoparError


def frontier(
    model: Model, cluster: Devices, batch: Batch, seq: Sequence, mesh: Axes = None, layers: Layers = None, precision: Computed = "bf16",
    optimizer: Optimizer = "adamw", grad_accumulation: Accumulation = 1, micro_batches: Micro = None,
    memory: Annotated[str | None, typer.Option(help="no plan that needs more of a device: 70GB, 64GiB, or bytes; without it any")] = None,
    offload: Offloaded = None,
    layout: Hand = None,
    loss_head: Head = "plain",
    time_limit: Annotated[float | None, typer.Option(min=0.1, help="seconds that all points together may take")] = None,
    gap: Gap = None,
    points: Annotated[int, typer.Option(min=2, help="at most so many plans")] = 20,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="draw them, as HTML")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="write the points here, as JSON")] = None,
    imbalance: Imbalance = 1.0,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Plan from the fastest step to the one of least memory, and say what changes between."""
    for path, where in ((plot, "--plot"), (out, "--out")):
        if path is not None:
            writable(path, "The frontier", where)
    if plot is not None and importlib.util.find_spec("plotly") is None:
        raise AutoparError("a plot needs plotly, which is not installed", where="--plot", fix='pip install "autopar[report]"')
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
    found = asked.ask("frontier", points=points)
    if as_json:
        from autopar.cli.documents import frontier_document

        typer.echo(frontier_document(found))
    else:
        typer.echo(found.text())
    if out is not None:
        out.write_text(found.to_json() + "\n", encoding="utf-8")
    if plot is not None:
        found.plot(plot)
