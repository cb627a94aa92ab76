"""The command line: plans for models and clusters that are not there, and looks at plans.

    autopar plan llama3-70b --cluster h100:32x8 --batch 256 --seq 8192 -o plan.json
    autopar show plan.json
    autopar diff plan.json other.json
    autopar explain llama3-70b mlp.gate_proj tp:out --cluster h100:32x8 --batch 256 --seq 8192
    autopar frontier llama3-70b --cluster h100:32x8 --batch 256 --seq 8192 --plot frontier.html
    autopar calibrate --out mine.json
    autopar search llama3-70b --cluster h100:32x8 --batch 256 --seq 8192 --top 5
    autopar predict llama3-70b --cluster h100:32x8 --batch 256 --seq 8192 --tp 8 --pp 4 --zero 1

Exits with 0; 1 when `diff` finds differences; 2 when something was called wrongly or is damaged; 3 when no plan fits the memory; 130 on Ctrl-C.
Results go to standard output, progress and errors to standard error.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from autopar.cli import options as cli_options
from autopar.cli.calibrate import calibrate
from autopar.cli.options import INTERRUPTED, Batch, Computed, Devices, Model, Sequence, built, writable
from autopar.cli.search import predict, search
from autopar.errors import AutoparError, MeshError
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.memory import NAMES
from autopar.text.sizes import parse_bytes
from autopar.text.strict_json import short

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

app.command()(calibrate)
app.command()(search)
app.command()(predict)

PlanFile = Annotated[Path, typer.Argument(metavar="FILE", help="a plan, as `autopar plan -o FILE` wrote it")]
Axes = Annotated[str | None, typer.Option("--mesh", help="32x8, or with names: dp=32,tp=8; without it the cluster's nodes x devices")]
Layers = Annotated[int | None, typer.Option(min=1, help="plan for only so many of the model's layers")]
Optimizer = Annotated[str, typer.Option(help="whose state memory is planned for: adamw, adamw-fused, adamw8bit, sgd, ...")]
Accumulation = Annotated[int, typer.Option("--grad-accumulation", min=1, help="micro-batches of a step; --batch is of each")]
Memory = Annotated[
    str | None,
    typer.Option(
        help="budget of a device: 70GB, 64GiB, or bytes; without it, or as fastest, what the device has; least: the smallest peak"
    ),
]
Offloaded = Annotated[
    str | None, typer.Option("--offload", help="where activations may be kept besides the device: host, nvme or host,nvme")
]
Hand = Annotated[str | None, typer.Option("--layout", help="keep to a hand layout: ddp, fsdp, tp or fsdp+tp")]
TimeLimit = Annotated[float | None, typer.Option(min=0.1, help="seconds the solver may take")]
Gap = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="stop this close to the bound: 0.01 is one per cent")]


@app.command()
def plan(
    model: Model, cluster: Devices, batch: Batch, seq: Sequence, mesh: Axes = None, layers: Layers = None, precision: Computed = "bf16",
    optimizer: Optimizer = "adamw", grad_accumulation: Accumulation = 1, memory: Memory = None, offload: Offloaded = None, layout: Hand = None,
    time_limit: TimeLimit = None, gap: Gap = None,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="write the plan here; - is standard output")] = None,
) -> None:  # fmt: skip
    """Plan a training step; needs no device, no weights and no network."""
    if output not in (None, "-"):
        writable(Path(str(output)), "The plan", "--output")
    made = _plan(
        "plan", model, cluster, batch, seq, mesh, layers, precision, optimizer, grad_accumulation, memory, offload, layout, time_limit, gap
    )
    from autopar.plan import schema as plan_schema

    if output == "-":
        typer.echo(plan_schema.dumps(made))
        return
    if output is not None:
        plan_schema.save(made, output)
    typer.echo(made.text())


@app.command()
def explain(
    model: Model,
    operator: Annotated[str, typer.Argument(help="a module's path, a parameter or an operator, or how it ends: mlp.gate_proj")],
    placement: Annotated[str, typer.Argument(help='what mesh axes split: "tp:out", "Shard(1) over tp", "Replicate over dp"')],
    cluster: Devices, batch: Batch, seq: Sequence, mesh: Axes = None, layers: Layers = None, precision: Computed = "bf16",
    optimizer: Optimizer = "adamw", grad_accumulation: Accumulation = 1, memory: Memory = None, offload: Offloaded = None, layout: Hand = None,
    time_limit: TimeLimit = None, gap: Gap = None,
) -> None:  # fmt: skip
    """Say why the plan does not have an operator or a parameter placed so, or what that would cost."""
    asked = {"op": operator, "placement": placement}
    typer.echo(
        _plan(
            "explain",
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
            **asked,
        )
    )


@app.command()
def frontier(
    model: Model, cluster: Devices, batch: Batch, seq: Sequence, mesh: Axes = None, layers: Layers = None, precision: Computed = "bf16",
    optimizer: Optimizer = "adamw", grad_accumulation: Accumulation = 1,
    memory: Annotated[str | None, typer.Option(help="no plan that needs more of a device: 70GB, 64GiB, or bytes; without it any")] = None,
    offload: Offloaded = None,
    layout: Hand = None,
    time_limit: Annotated[float | None, typer.Option(min=0.1, help="seconds that all points together may take")] = None,
    gap: Gap = None,
    points: Annotated[int, typer.Option(min=2, help="at most so many plans")] = 20,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="draw them, as HTML")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="write the points here, as JSON")] = None,
) -> None:  # fmt: skip
    """Plan from the fastest step to the one of least memory, and say what changes between."""
    for path, where in ((plot, "--plot"), (out, "--out")):
        if path is not None:
            writable(path, "The frontier", where)
    if plot is not None and importlib.util.find_spec("plotly") is None:
        raise AutoparError("a plot needs plotly, which is not installed", where="--plot", fix='pip install "autopar[report]"')
    found = _plan(
        "frontier",
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
        points=points,
    )
    typer.echo(found.text())
    if out is not None:
        out.write_text(found.to_json() + "\n", encoding="utf-8")
    if plot is not None:
        found.plot(plot)


@app.command()
def show(file: PlanFile) -> None:
    """Print a plan: where parameters are, what is communicated, what is predicted."""
    from autopar.plan.plan import Plan

    typer.echo(Plan.load(file).text())


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="a plan")],
    b: Annotated[Path, typer.Argument(metavar="B", help="another plan")],
) -> None:
    """Print what differs between two plans; exit with 1 if anything does."""
    from autopar.plan.plan import Plan

    text = Plan.load(a).diff(Plan.load(b))
    if text:
        typer.echo(text)
        raise typer.Exit(1)


def main() -> None:
    """Entry point of `autopar` and of `python -m autopar`."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no reason to fail
    _heed_interrupts()
    cli_options.alone = True
    if sys.argv[1:2] != ["calibrate"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # no other command needs a device, and CUDA would not survive a fork
    with _little_collecting():
        app(prog_name="autopar")


# ---- parts -------------------------------------------------------------------------------------------------------


def _plan(
    verb: str, model: str, cluster: str, batch: int, seq: int, mesh: str | None, layers: int | None, precision: str, optimizer: str,
    grad_accumulation: int, memory: str | None, offload: str | None, layout: str | None, time_limit: float | None, gap: float | None, **asked: str | int,
) -> Any:  # fmt: skip
    """`plan`, `explain` or `frontier` of `autopar.planner.offline`, by its name, with progress."""
    budget = memory if memory is None or memory in NAMES else parse_bytes(memory, "--memory")
    shape = None if mesh is None else _mesh(mesh)
    console = Console(stderr=True, highlight=False)

    def on_progress(stage: str, seconds: float) -> None:
        console.print(f"{stage}: {seconds:.1f} s", markup=False)

    from autopar.capture.in_subprocess import is_worthwhile

    start = time.perf_counter()
    with console.status("planning"):
        module, shapes = built(model, layers, batch, seq)
        # Imported when it is needed: it brings the solver with it.
        does: Callable[..., Any] = getattr(importlib.import_module("autopar.planner.offline"), verb)
        if cli_options.alone:
            gc.freeze()  # modules stay: nobody looks through them for garbage, not even in the end
        on_progress("imports and configuration", time.perf_counter() - start)
        options = {k: v for k, v in (("seconds", time_limit), ("gap", gap)) if v is not None}
        return does(
            module, shapes, cluster, shape,
            precision=precision, optimizer=optimizer, grad_accumulation=grad_accumulation, layout=layout, memory=budget, offload=offload, options=options or None, progress=on_progress,
            in_subprocess=cli_options.alone and is_worthwhile(), **asked,
        )  # fmt: skip


def _heed_interrupts() -> None:
    """Ends the process at Ctrl-C from a thread of its own: the solver and torch's compiler run long outside of Python, where the main thread learns of a
    signal only when they return, and in the middle of an import it may lose it. Nothing else is lost: files appear whole or not at all."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    ending = threading.Lock()

    def end(*_: Any) -> None:
        ending.acquire(timeout=1)  # never released: the main thread, if it too learns of it, waits here for the end
        show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # the progress display hides it
        os.write(2, f"{show_cursor}interrupted\n".encode())
        os._exit(INTERRUPTED)

    def watch() -> None:
        while signals := os.read(read, 1):
            if signals[0] == signal.SIGINT:
                end()

    threading.Thread(target=watch, daemon=True).start()
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, end)


@contextlib.contextmanager
def _little_collecting() -> Iterator[None]:
    """Python's collector would look through torch's modules again and again, while they come, while they are used and once more at the end: for two of
    the eleven seconds that a plan used to take. What it frees of them is nothing."""
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.freeze()


def _told(e: AutoparError) -> str:
    lines = [f"error: {e.what}"]
    if e.where:
        lines.append(f"  where: {e.where}")
    if e.fix:
        lines.append(f"  fix: {e.fix}")
    return "\n".join(lines)


def _mesh(text: str) -> str | dict[str, int]:
    """ "32x8" as it is, "dp=32,tp=8" by name."""
    plain = text.strip().lower()
    if re.fullmatch(r"[1-9][0-9]{0,6}(x[1-9][0-9]{0,6}){0,7}", plain):
        return plain
    axes = re.findall(r"([A-Za-z_][A-Za-z0-9_]{0,30})=([1-9][0-9]{0,6})(?:,|$)", text.strip())
    sizes = {n: int(s) for n, s in axes}
    if not axes or len(sizes) < len(axes) or ",".join(f"{n}={s}" for n, s in axes) != text.strip():
        raise MeshError(f"{short(text)!r} is not a mesh", where="--mesh", fix="write sizes such as 32x8, or named axes such as dp=32,tp=8")
    return sizes
