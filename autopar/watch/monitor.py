"""Predicted and measured step time, MFU and peak memory, side by side.

    monitor = autopar.monitor(model, writer)
    for batch in loader:
        ...                     # forward, backward, optimizer.step()
        monitor.step()

A step is what lies between two calls of `step`. Its seconds are the median of a window, so one that captured, or evaluation between two, does not count. Plans price a call of the model with
its share of the optimizer's step; a step of several calls (accumulation) is as many times that.

    mfu     model FLOPs of the plan over what was measured, as a share of the devices' peak that the plan was priced with
    peak    the most that the allocator has given out on a GPU; on a CPU what is resident of the process, with everything else in it
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from autopar.errors import AutoparError
from autopar.runtime.module import ParallelModule
from autopar.text.sizes import format_bytes
from autopar.text.times import format_time
from autopar.watch.trace import traced


class Scalars(Protocol):
    """TensorBoard's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


class Logs(Protocol):
    """wandb, or a run of it."""

    def log(self, data: dict[str, float], *, step: int) -> object: ...


Writer = Scalars | Logs | Callable[[Mapping[str, float], int], object]


@dataclass(frozen=True)
class Report:
    """What a window of steps was like, and what the plan had said (None where it has no such figure). Seconds, bytes, shares of the peak.

    resident: peak_bytes is of the whole process, which a plan does not count.
    """

    step: int
    step_s: float
    peak_bytes: float
    resident: bool
    mfu: float | None = None
    predicted_step_s: float | None = None
    predicted_mfu: float | None = None
    predicted_peak_bytes: float | None = None

    def numbers(self) -> dict[str, float]:
        """By name, without what is not known."""
        names = ("step_s", "predicted_step_s", "mfu", "predicted_mfu", "peak_bytes", "predicted_peak_bytes")
        return {n: float(v) for n in names if (v := getattr(self, n)) is not None}

    def __str__(self) -> str:
        def beside(measured: str, predicted: str | None) -> str:
            return measured + (f" (predicted {predicted})" if predicted is not None else "")

        p, m, b = self.predicted_step_s, self.predicted_mfu, self.predicted_peak_bytes
        parts = [beside(format_time(self.step_s), None if p is None else format_time(p))]
        if self.mfu is not None:
            parts.append(f"MFU {beside(f'{self.mfu:.1%}', None if m is None else f'{m:.1%}')}")
        what = "resident" if self.resident else "peak"
        parts.append(f"{what} {beside(format_bytes(self.peak_bytes), None if b is None else format_bytes(b))}")
        return f"step {self.step}: {', '.join(parts)}"


class Monitor:
    """Made by `autopar.monitor`."""

    def __init__(self, model: ParallelModule, writer: Writer | None, every: int, prefix: str) -> None:
        self.model, self.writer, self.every, self.prefix = model, writer, every, prefix
        self.steps, self.last, self.calls, self.captured = 0, time.perf_counter(), 0, len(model.compiled_steps)
        self.window: list[tuple[float, int]] = []
        self.report: Report | None = None
        self._hook = model.register_forward_hook(self._called)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def _called(self, module: Any, args: Any, output: Any) -> None:
        self.calls += bool(module.training and torch.is_grad_enabled())

    def start(self) -> None:
        """What was done since the last step (evaluation, a checkpoint) is no part of the next."""
        self.last, self.calls, self.captured = time.perf_counter(), 0, len(self.model.compiled_steps)

    def step(self) -> Report | None:
        """Call it after every step. After every `every`-th, a report of them; the writer has it, too, on the first rank."""
        if self._device.type == "cuda" and len(self.window) + 1 == self.every:
            torch.cuda.synchronize(self._device)
        now, captured = time.perf_counter(), len(self.model.compiled_steps)
        if captured == self.captured and self.calls:
            self.window.append((now - self.last, self.calls))
        self.captured, self.last, self.calls = captured, now, 0
        self.steps += 1
        if len(self.window) < self.every:
            return None
        self.report = self._report()
        self.window.clear()
        if self.writer is not None and self._speaks():
            _write(self.writer, {self.prefix + n: v for n, v in self.report.numbers().items()}, self.steps)
        return self.report

    def _report(self) -> Report:
        seconds = statistics.median(s for s, _ in self.window)
        calls = statistics.median(c for _, c in self.window)
        p = self.model.plan.predicted
        step_s = p["step_time_s"] * calls if p.get("step_time_s") else None
        on_gpu = self._device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self._device) if on_gpu else _resident_bytes()
        mfu = p.get("mfu")
        return Report(
            self.steps, seconds, peak, not on_gpu, mfu * step_s / seconds if mfu is not None and step_s else None, step_s, mfu, p.get("peak_memory_bytes")
        )  # fmt: skip

    def _speaks(self) -> bool:
        return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0

    def trace(self, path: str | Path) -> AbstractContextManager[None]:
        """A context: what the model does in it is measured by torch.profiler, and written to `path` for Perfetto, the plan's own timeline beside it. Every rank enters it,
        and the first one writes. Raises AutoparError where the model has not run yet, or the path cannot be written."""
        return traced(self.model, path, self._speaks())

    def close(self) -> None:
        """Nothing is counted from here on."""
        self._hook.remove()


def monitor(model: ParallelModule, writer: Writer | None = None, *, every: int = 10, prefix: str = "autopar/") -> Monitor:
    """Watches the steps of a compiled model: call `.step()` after each.

    writer: TensorBoard's SummaryWriter, wandb or a run of it, or a function of ({name: number}, step); the first rank writes. every: steps of a report, whose
        seconds are their median. prefix: of names.

    Raises AutoparError for another model or writer.
    """
    if not isinstance(model, ParallelModule):
        raise AutoparError(
            f"autopar.monitor watches a compiled model, not {type(model).__name__}", fix="pass what autopar.compile returned"
        )
    if every < 1:
        raise AutoparError(f"every={every}: a report is of one step at least", fix="pass every=1 or more")
    if writer is not None and not (hasattr(writer, "add_scalar") or hasattr(writer, "log") or callable(writer)):
        raise AutoparError(
            f"{type(writer).__name__} has neither add_scalar nor log", fix="pass a SummaryWriter, wandb, or a function of (numbers, step)"
        )
    return Monitor(model, writer, every, prefix)


def _write(writer: Any, numbers: dict[str, float], step: int) -> None:
    if hasattr(writer, "add_scalar"):
        for name, v in numbers.items():
            writer.add_scalar(name, v, step)
    elif hasattr(writer, "log"):
        writer.log(numbers, step=step)
    else:
        writer(numbers, step)


def _resident_bytes() -> float:
    """The most of this process that was in memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)
