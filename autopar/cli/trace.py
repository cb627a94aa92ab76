"""`autopar trace`: a plan's step as a trace that Perfetto opens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.options import AsJson, writable


def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a plan, as `autopar plan -o FILE` wrote it")],
    out: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="write the trace here, as JSON")] = Path("trace.json"),
    as_json: AsJson = False,
) -> None:
    """Write a plan's step as a trace: open it at https://ui.perfetto.dev or in chrome://tracing."""
    writable(out, "The trace", "--output")
    from autopar.plan.plan import Plan

    plan = Plan.load(file)
    plan.to_perfetto(out)
    if as_json:
        from autopar.cli.documents import written_document

        typer.echo(written_document([file], out))
        return
    typer.echo(f"written to {out}: open it at https://ui.perfetto.dev")
