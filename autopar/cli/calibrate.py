"""`autopar calibrate`: measures this machine and writes the cluster file that --cluster takes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from autopar.cli.options import writable


def calibrate(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="write the description here, as JSON")] = Path("cluster.json"),
    processes: Annotated[int | None, typer.Option(min=1, help="of training on this machine; by default one a GPU, else one a core")] = None,
    seconds: Annotated[float, typer.Option(min=1.0, max=3600.0, help="that measuring may take; less is less exact")] = 120.0,
) -> None:
    """Measure this machine: products, attention, memory, collectives, copies, files. Under torchrun, the whole mesh."""
    writable(out, "The description", "--out")
    console = Console(stderr=True, highlight=False)
    began = time.monotonic()
    from autopar.hardware.calibrate import calibrate as run

    found = run(processes, seconds, lambda line: console.print(f"{time.monotonic() - began:5.1f} s  {line}", markup=False))
    if found is not None:
        found.save(out)
        typer.echo(found.text())
        typer.echo(f"\nwritten to {out}: use it as --cluster {out}, or autopar.compile(..., cluster={str(out)!r})")
