"""`autopar diff`: what differs between two plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.options import AsJson


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="a plan")],
    b: Annotated[Path, typer.Argument(metavar="B", help="another plan")],
    as_json: AsJson = False,
) -> None:
    """Print what differs between two plans; exit with 1 if anything does."""
    from autopar.plan.plan import Plan

    first, second = Plan.load(a), Plan.load(b)
    text = first.diff(second)
    if as_json:
        from autopar.cli.documents import difference_document

        typer.echo(difference_document(first, second, text))
    elif text:
        typer.echo(text)
    if text:
        raise typer.Exit(1)
