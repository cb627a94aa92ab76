"""`autopar report`: a plan as a page to look at, two plans side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from autopar.cli.options import AsJson, Computed, built, writable
from autopar.errors import AutoparError


def report(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a plan, as `autopar plan -o FILE` wrote it")],
    other: Annotated[Path | None, typer.Argument(metavar="[OTHER]", help="another plan, to look at beside it")] = None,
    out: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="write the page here, as HTML")] = Path("plan.html"),
    why: Annotated[
        str | None, typer.Option(metavar="MODEL", help="plan this model again as FILE has it, and say why not otherwise")
    ] = None,
    precision: Computed = "bf16",
    optimizer: Annotated[str, typer.Option(help="with --why: that of the plan")] = "adamw",
    as_json: AsJson = False,
) -> None:
    """Write a plan as one page of HTML that needs no network: times, memory, timeline, parameters, layers."""
    writable(out, "The page", "--output")
    from autopar.plan.plan import Plan
    from autopar.report.page import save

    plans = [(str(path), Plan.load(path)) for path in (file, other) if path is not None]
    answers = [] if why is None else [_asked(file.name, plans[0][1], why, precision, optimizer)]
    save(_named(plans), out, answers)
    if as_json:
        from autopar.cli.documents import written_document

        typer.echo(written_document([p for p in (file, other) if p is not None], out))
        return
    typer.echo(f"written to {out}")


def _named(plans: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """By their files' names, if these tell them apart."""
    short = [(Path(name).name, plan) for name, plan in plans]
    return short if len({name for name, _ in short}) == len(short) else plans


def _asked(name: str, plan: Any, model: str, precision: str, optimizer: str) -> list[Any]:
    """`plan.explain`'s answers: of the same step, planned again."""
    from autopar.report.facts import subject
    from autopar.report.why import answers

    subject(name, plan)  # refused before minutes are spent
    shape = next((p.shape for p in plan.inputs if len(p.shape) > 1), None)
    if shape is None or not plan.cluster:
        raise AutoparError(
            "the plan does not say for which batch and cluster it was made",
            where="--why",
            fix="use `autopar explain`, which takes them as options",
        )
    console = Console(stderr=True, highlight=False)
    with console.status("planning again"):
        module, shapes = built(model, None, shape[0] * plan.micro_batches, shape[1])
        from autopar.planner import offline

        layout = None if plan.layout == "planned" else plan.layout
        calls, budget = plan.profile.micro_batches // plan.micro_batches, plan.predicted.get("budget_bytes")
        again = offline.plan(
            module, shapes, plan.cluster, plan.mesh_axes, precision=precision, optimizer=optimizer, grad_accumulation=calls, layout=layout, memory=budget,
            micro_batches=plan.micro_batches, imbalance=plan.imbalance, offload=",".join(sorted(set(plan.offload.values()))) or None,
        )  # fmt: skip
        if again.fingerprint != plan.fingerprint:
            raise AutoparError(
                f"the plan is not of {model} with {shape[0]} sequences of {shape[1]} tokens in {precision}",
                where="--why",
                fix="name the model that it was made for",
            )
        return answers(subject(name, again), again.explain, on_progress=lambda said: console.print(said, markup=False))
