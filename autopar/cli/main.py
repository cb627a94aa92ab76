"""The command line: plans for models and clusters that are not there, and looks at plans.

    autopar plan llama3-70b --cluster h100:32x8 --batch 256 --seq 8192 -o plan.json
    autopar show plan.json
    autopar diff plan.json other.json
    autopar report plan.json other.json -o plan.html
    autopar trace plan.json -o trace.json
    autopar explain llama3-70b mlp.gate_proj tp:out --cluster h100:32x8 --batch 256 --seq 8192
    autopar frontier llama3-70b --cluster h100:32x8 --batch 256 --seq 8192 --plot frontier.html
    autopar compile llama3-70b --plan plan.json --batch 256 --seq 8192 -o compiled
    autopar calibrate --out mine.json
    autopar search llama3-70b --cluster h100:32x8 --batch 256 --seq 8192 --top 5
    autopar predict llama3-70b --cluster h100:32x8 --batch 256 --seq 8192 --tp 8 --pp 4 --zero 1
    autopar elastic plan llama3-70b --cluster h100:32x8 --batch 256 --seq 8192 --survive 4
    autopar elastic simulate llama3-70b --cluster h100:32x8 --batch 256 --seq 8192 --mtbf-device 50000h --days 30

Exits with 0; 1 when `diff` finds differences; 2 when something was called wrongly or is damaged; 3 when no plan fits the memory; 130 on Ctrl-C.
Results go to standard output, with --json as one document (`documents.py`); progress and errors to standard error.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from autopar.cli.calibrate import calibrate
from autopar.cli.compile import compile as compile_ahead
from autopar.cli.diff import diff
from autopar.cli.elastic import app as elastic
from autopar.cli.explain import explain
from autopar.cli.frontier import frontier
from autopar.cli.options import INTERRUPTED
from autopar.cli.plan import plan
from autopar.cli.predict import predict
from autopar.cli.process import of_its_own
from autopar.cli.report import report
from autopar.cli.search import search
from autopar.cli.show import show
from autopar.cli.trace import trace
from autopar.cli.voice import voiced
from autopar.errors import AutoparError
from autopar.planner.infeasible import InfeasibleError

ERROR, INFEASIBLE = 2, 3


class _Group(TyperGroup):
    """Errors that the user can mend are told, not traced back; any other is a defect and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AutoparError as e:
            typer.echo(_told(e), err=True)
            raise typer.Exit(INFEASIBLE if isinstance(e, InfeasibleError) else ERROR) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=_Group,
    help="Plans how a PyTorch model is trained on many devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

for _command in (plan, explain, frontier, show, diff, calibrate, search, predict, trace, report, compile_ahead):
    app.command()(voiced(_command))
app.add_typer(elastic, name="elastic")


def main() -> None:
    """Entry point of `autopar` and of `python -m autopar`."""
    with of_its_own():
        app(prog_name="autopar")


def _told(e: AutoparError) -> str:
    lines = [f"error: {e.what}"]
    if e.where:
        lines.append(f"  where: {e.where}")
    if e.fix:
        lines.append(f"  fix: {e.fix}")
    return "\n".join(lines)
