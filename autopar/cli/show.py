"""`autopar show`: a plan's file, as text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.options import AsJson

PlanFile = Annotated[Path, typer.Argument(metavar="FILE", help="a plan, as `autopar plan -o FILE` wrote it")]


def show(file: PlanFile, as_json: AsJson = False) -> None:
    """Print a plan: where parameters are, what is communicated, what is predicted."""
    from autopar.plan.plan import Plan

    plan = Plan.load(file)
    if as_json:
        from autopar.cli.documents import plan_document

        typer.echo(plan_document(plan))
    else:
        typer.echo(plan.text())
