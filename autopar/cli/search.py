"""`autopar search`: the best layouts of a training run on a cluster."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from autopar.cli import options as cli_options
from autopar.cli.options import (
    INTERRUPTED,
    AsJson,
    Batch,
    Computed,
    Devices,
    How,
    Imbalance,
    Model,
    Sequence,
    SomeLayers,
    StateOf,
    built,
    writable,
)
from autopar.cli.screen import Screen
from autopar.text.sizes import parse_bytes
from autopar.text.times import format_time

if TYPE_CHECKING:
    from autopar.search import Progress, Ranked

TOLD_EVERY_S = 2.0
WIDTH = 200  # of the table, where stdout is no terminal


def search(
    model: Model,
    cluster: Devices,
    batch: Batch,
    seq: Sequence,
    top: Annotated[int, typer.Option(min=1, help="so many layouts")] = 5,
    runtime: How = "autopar",
    memory: Annotated[str | None, typer.Option(help="of a device: 70GB, 64GiB, or bytes; without it what the device has")] = None,
    precision: Computed = "bf16",
    optimizer: StateOf = "adamw",
    imbalance: Imbalance = 1.0,
    layers: SomeLayers = None,
    cache: Annotated[Path | None, typer.Option(metavar="FILE", help="keeps what was solved: an interrupted search goes on with it")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="write what was found here, as JSON")] = None,
    time_limit: Annotated[float | None, typer.Option(min=0.1, help="seconds, after which the best that was tried is the answer")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest layouts: mesh, pipeline, virtual stages, micro-batch, ZeRO, recomputation and offload."""
    for path, where in ((cache, "--cache"), (out, "--out")):
        if path is not None:
            writable(path, "What was found", where)
    budget = None if memory is None else parse_bytes(memory, "--memory")
    from autopar.hardware.cluster import Cluster
    from autopar.planner.imbalance import checked

    checked(imbalance, Cluster.of(cluster).size)  # an error is said before a model is built
    screen = Screen("searching")
    seen = _Seen(screen)
    with _interruptible(seen):
        try:
            with screen:
                module, shapes = built(model, layers, batch, seq)
                from autopar.capture.in_subprocess import is_worthwhile
                from autopar.search import search as run

                found = run(
                    module, shapes, cluster, global_batch=batch, top_k=top, runtime=runtime, memory=budget, precision=precision, optimizer=optimizer,
                    progress=seen.on_progress, cache=cache, imbalance=imbalance, in_subprocess=cli_options.alone and is_worthwhile(),
                    seconds=time_limit,
                )  # fmt: skip
        except KeyboardInterrupt:
            if seen.best:
                _print(list(seen.best), as_json, False)
                typer.echo("interrupted: the best so far", err=True)
            else:
                typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
    _print(found, as_json, time_limit is None)
    if out is not None:
        out.write_text(json.dumps([ranked(r) for r in found], indent=1) + "\n", encoding="utf-8")


def ranked(r: Ranked) -> dict[str, Any]:
    """A layout that was found, and what is predicted of it, as JSON has it."""
    p = r.prediction
    layout = {k: v for k, v in asdict(r.layout).items() if k not in ("data", "shard", "tensor", "context", "name", "reshard_after_forward")}
    return {
        "layout": layout, "cluster": r.cluster.name, "idle_devices": r.idle, "step_time_s": p.step_time_s, "tokens_per_s": p.tokens_per_s,
        "mfu": r.mfu(), "mfu_square": r.mfu("square"), "peak_bytes": p.peak_bytes, "parts_s": dict(p.parts_s), "layers": list(p.layers),
        "runtime": p.runtime, "global_batch": p.global_batch, "differs": r.differs,
    }  # fmt: skip


# ---- parts -------------------------------------------------------------------------------------------------------


class _Seen:
    """Tells the stages, and every few seconds how far it is. best: what was found so far; stopped: Ctrl-C came."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.best: tuple[Ranked, ...] = ()
        self.stopped = False
        self.told = time.monotonic()

    def on_progress(self, p: Progress) -> None:
        self.best = p.best
        if self.stopped:  # what it raised was swallowed, in the middle of an import or by a callback
            raise KeyboardInterrupt
        now = time.monotonic()
        if p.stage == "pricing" and now - self.told < TOLD_EVERY_S:
            return
        self.told = now
        best = f"; best so far {format_time(p.best[0].prediction.step_time_s)}, {p.best[0].layout}" if p.best else ""
        counts = f": {p.priced} priced, {p.pruned} pruned, {p.left} left" if p.priced + p.pruned + p.left else ""
        self.screen.timed(f"{p.stage}{counts}{best}")


def _print(found: list[Ranked], as_json: bool, complete: bool) -> None:
    if as_json:
        from autopar.cli.documents import search_document

        typer.echo(search_document([ranked(r) for r in found], complete))
    else:
        from autopar.search import table

        Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDTH).print(table(found))


@contextlib.contextmanager
def _interruptible(seen: _Seen) -> Iterator[None]:
    """Ctrl-C raises here, instead of ending the process at once: there is something to say first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        seen.stopped = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    wakeup = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, before)
