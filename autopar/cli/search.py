"""`autopar search` and `autopar predict`: the best layouts of a training run on a cluster, and what one layout takes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from autopar.cli import options as cli_options
from autopar.cli.options import INTERRUPTED, Batch, Computed, Devices, Model, Sequence, built, writable
from autopar.planner.layout import RECOMPUTE, Layout
from autopar.text.sizes import parse_bytes

if TYPE_CHECKING:
    from autopar.search import Progress, Ranked

TOLD_EVERY_S = 2.0

How = Annotated[str, typer.Option("--runtime", help="what software runs it: autopar, megatron, megatron-overlap, fsdp")]
Optimizer = Annotated[str, typer.Option(help="whose state memory is counted: adamw, adamw-fused, adamw8bit, sgd, ...")]
Layers = Annotated[int | None, typer.Option(min=1, help="only so many of the model's layers")]


def search(
    model: Model,
    cluster: Devices,
    batch: Batch,
    seq: Sequence,
    top: Annotated[int, typer.Option(min=1, help="so many layouts")] = 5,
    runtime: How = "autopar",
    memory: Annotated[str | None, typer.Option(help="of a device: 70GB, 64GiB, or bytes; without it what the device has")] = None,
    precision: Computed = "bf16",
    optimizer: Optimizer = "adamw",
    layers: Layers = None,
    cache: Annotated[Path | None, typer.Option(metavar="FILE", help="keeps what was solved: an interrupted search goes on with it")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="write what was found here, as JSON")] = None,
) -> None:
    """Find the fastest layouts: mesh, pipeline, virtual stages, micro-batch, ZeRO, recomputation and offload."""
    for path, where in ((cache, "--cache"), (out, "--out")):
        if path is not None:
            writable(path, "What was found", where)
    budget = None if memory is None else parse_bytes(memory, "--memory")
    screen = _Screen()
    with _interruptible(screen):
        try:
            module, shapes = built(model, layers, batch, seq)
            from autopar.capture.in_subprocess import is_worthwhile
            from autopar.search import search as run

            with screen.console.status("searching"):
                found = run(
                    module, shapes, cluster, global_batch=batch, top_k=top, runtime=runtime, memory=budget, precision=precision, optimizer=optimizer,
                    progress=screen.on_progress, cache=cache, in_subprocess=cli_options.alone and is_worthwhile(),
                )  # fmt: skip
        except KeyboardInterrupt:
            if screen.best:
                _print(list(screen.best), None)
                typer.echo("interrupted: the best so far", err=True)
            else:
                typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
    _print(found, out)


def predict(
    model: Model,
    cluster: Devices,
    batch: Batch,
    seq: Sequence,
    tp: Annotated[int, typer.Option(min=1, help="devices that split tensors")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="devices that split the sequence")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="devices that split the layers")] = 1,
    virtual: Annotated[int, typer.Option(min=1, help="stages of a pipeline rank")] = 1,
    micro_batch: Annotated[int, typer.Option(min=1, help="sequences of a replica at a time")] = 1,
    zero: Annotated[int, typer.Option(min=0, max=3, help="what replicas shard: 1 optimizer, 2 gradients too, 3 parameters too")] = 0,
    recompute: Annotated[str, typer.Option(help=f"what backward makes again: {', '.join(RECOMPUTE)}")] = "none",
    offload: Annotated[float, typer.Option(min=0.0, max=1.0, help="fraction of the activations kept in host memory")] = 0.0,
    sequence_parallel: Annotated[
        bool | None, typer.Option(help="between products, split along the sequence; without it as is fastest")
    ] = None,
    runtime: How = "autopar",
    precision: Computed = "bf16",
    optimizer: Optimizer = "adamw",
    layers: Layers = None,
) -> None:
    """Say what a step of a hand layout takes; data parallelism is what the sizes leave of the devices."""
    layout = Layout(
        tp=tp, cp=cp, pp=pp, virtual=virtual, micro_batch=micro_batch, zero=zero, recompute=recompute, offload=offload,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    module, shapes = built(model, layers, batch, seq)
    from autopar.predict import predict as run

    console = Console(stderr=True, highlight=False)
    with console.status("predicting"):
        done = run(
            module, shapes, cluster, layout, global_batch=batch, runtime=runtime, precision=precision, optimizer=optimizer,
            progress=lambda stage, seconds: console.print(f"{stage}: {seconds:.1f} s", markup=False),
        )  # fmt: skip
    typer.echo(done.text())


# ---- parts -------------------------------------------------------------------------------------------------------


class _Screen:
    """Tells the stages, and every few seconds how far it is. best: what was found so far; stopped: Ctrl-C came."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.best: tuple[Ranked, ...] = ()
        self.stopped = False
        self.began = self.told = time.monotonic()

    def on_progress(self, p: Progress) -> None:
        self.best = p.best
        if self.stopped:  # what it raised was swallowed, in the middle of an import or by a callback
            raise KeyboardInterrupt
        now = time.monotonic()
        if p.stage == "pricing" and now - self.told < TOLD_EVERY_S:
            return
        self.told = now
        best = f"; best so far {p.best[0].prediction.step_time_s:.3f} s, {p.best[0].layout}" if p.best else ""
        counts = f": {p.priced} priced, {p.pruned} pruned, {p.left} left" if p.priced + p.pruned + p.left else ""
        self.console.print(f"{now - self.began:5.1f} s  {p.stage}{counts}{best}", markup=False, soft_wrap=True)


def _print(found: list[Ranked], out: Path | None) -> None:
    from autopar.search import table

    Console(width=None if os.isatty(1) else 200).print(table(found))
    if out is not None:
        out.write_text(json.dumps([_row(r) for r in found], indent=1) + "\n", encoding="utf-8")


def _row(r: Ranked) -> dict[str, Any]:
    p = r.prediction
    layout = {k: v for k, v in asdict(r.layout).items() if k not in ("data", "shard", "tensor", "context", "name", "reshard_after_forward")}
    return {
        "layout": layout, "cluster": r.cluster.name, "idle_devices": r.idle, "step_time_s": p.step_time_s, "tokens_per_s": p.tokens_per_s,
        "mfu": r.mfu(), "mfu_square": r.mfu("square"), "peak_bytes": p.peak_bytes, "parts_s": dict(p.parts_s), "layers": list(p.layers),
        "runtime": p.runtime, "global_batch": p.global_batch, "differs": r.differs,
    }  # fmt: skip


@contextlib.contextmanager
def _interruptible(screen: _Screen) -> Iterator[None]:
    """Ctrl-C raises here, instead of ending the process at once: there is something to say first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        screen.stopped = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    wakeup = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, before)
