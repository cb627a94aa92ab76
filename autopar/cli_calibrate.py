"""`autopar calibrate`: measures this machine and writes the cluster file that --cluster takes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from autopar.errors import AutoparError
from autopar.strict_json import short


def calibrate(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="write the description here, as JSON")] = Path("cluster.json"),
    processes: Annotated[int | None, typer.Option(min=1, help="of training on this machine; by default one a GPU, else one a core")] = None,
    seconds: Annotated[float, typer.Option(min=1.0, max=3600.0, help="that measuring may take; less is less exact")] = 120.0,
) -> None:
    """Measure this machine: products, attention, memory, collectives, copies, files. Under torchrun, the whole mesh."""
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        fix = "name a file in a folder that exists and can be written"
        raise AutoparError(f"The description cannot be written to {short(str(out), 200)}", where="--out", fix=fix)
    console = Console(stderr=True, highlight=False)
    began = time.monotonic()
    from autopar.calibrate import calibrate as run

    found = run(processes, seconds, lambda line: console.print(f"{time.monotonic() - began:5.1f} s  {line}", markup=False))
    if found is not None:
        found.save(out)
        typer.echo(found.text())
        typer.echo(f"\nwritten to {out}: use it as --cluster {out}, or autopar.compile(..., cluster={str(out)!r})")
