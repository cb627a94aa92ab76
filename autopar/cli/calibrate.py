"""`autopar calibrate`: measures this machine and writes the cluster file that --cluster takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.options import AsJson, writable
from autopar.cli.screen import Screen


def calibrate(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="write the description here, as JSON")] = Path("cluster.json"),
    processes: Annotated[int | None, typer.Option(min=1, help="of training on this machine; by default one a GPU, else one a core")] = None,
    seconds: Annotated[float, typer.Option(min=1.0, max=3600.0, help="that measuring may take; less is less exact")] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Measure this machine: products, attention, memory, collectives, copies, files. Under torchrun, the whole mesh."""
    writable(out, "The description", "--out")
    with Screen("measuring") as screen:
        from autopar.hardware.calibrate import calibrate as run

        found = run(processes, seconds, screen.timed)
    if found is None:
        return
    found.save(out)
    if as_json:
        from autopar.cli.documents import calibration_document

        typer.echo(calibration_document(found, out))
    else:
        typer.echo(found.text())
        typer.echo(f"\nwritten to {out}: use it as --cluster {out}, or autopar.compile(..., cluster={str(out)!r})")
