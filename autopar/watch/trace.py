"""A measured step as a trace, in the view of the predicted one (`plan.to_perfetto`): the same names, tracks and kinds, from torch.profiler.

While it is open, a step that runs call by call says of every call which it is; of a compiled one the kernels are told as they are, and its collectives by their order. A collective is on the
track of its axes from where it is issued to where it has been waited for; what waits for it is on the track of compute, of the kind "exposed". Kernels on a GPU have tracks by stream.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.profiler import ProfilerActivity, profile, record_function

from autopar.errors import AutoparError
from autopar.runtime.lower import FlatFn, Lowered, eager_module
from autopar.runtime.module import ParallelModule
from autopar.runtime.step import Step
from autopar.timeline.perfetto import trace as predicted_trace

MARK = "autopar:"  # before the number of what runs, in names that torch.profiler keeps
COLLECTIVE, WAIT = "_c10d_functional.", "wait_tensor"
DISPATCHED = "_c10d_functional::"  # what torch.profiler calls them
MEASURED = 2  # the process of the trace; the prediction is 1


@dataclass(frozen=True)
class Said:
    """What a call is. of: the collective that a wait is for; inside: of a compiled half, its collectives and waits, in order."""

    name: str
    kind: str
    module: str
    axes: str = ""
    of: str = ""
    inside: tuple[tuple[Key, Said], ...] = ()


Key = tuple[str, tuple[int, ...]]  # a collective as graph and profiler both know it: its operator, and the shape of what it reads


@contextlib.contextmanager
def traced(model: ParallelModule, path: str | Path, writes: bool) -> Iterator[None]:
    """See `Monitor.trace`."""
    steps = model.compiled_steps
    if not steps:
        raise AutoparError("a model that has not run has no step to trace", fix="run a step, or two, before")
    table: list[Said] = []
    before = [(s, s.lowered, dict(s.backwards)) for s in steps]
    for s in steps:
        s.lowered = _annotated(s, s.base.forward, s.lowered, "forward", table)
        for key, (parts, lowered) in list(s.backwards.items()):
            s.backwards[key] = (parts, _annotated(s, parts.backward, lowered, "backward", table))
    on_gpu = any(p.is_cuda for p in model.parameters())
    try:
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])], record_shapes=True) as found:
            yield
            if on_gpu:
                torch.cuda.synchronize()
    finally:
        for s, lowered, backwards in before:
            s.lowered = lowered
            s.backwards.update(backwards)
    if writes:
        _save(model, found, table, Path(path))


# ---- while it runs -----------------------------------------------------------------------------------------------


def _annotated(step: Step, gm: fx.GraphModule | None, lowered: Lowered, stage: str, table: list[Said]) -> Lowered:
    if gm is None:
        return lowered
    modules = {op.name: op.module for op in step.graph.ops}
    prefix = step.groups.prefix
    compiled = step.settings.backend != "aot_eager"
    called = gm if compiled else eager_module(gm)
    said: dict[fx.Node, Said] = {}
    for n in called.graph.nodes:
        if n.op == "call_function":
            said[n] = _said(n, stage, modules.get(str(n.meta.get("op", "")), ""), prefix, said)
    if compiled:
        inside = tuple((_key(n), x) for n, x in said.items() if str(n.target).startswith(COLLECTIVE))
        return replace(lowered, fn=_whole(lowered.fn, _add(table, Said(f"{stage}, compiled", stage, "", inside=inside))))
    return replace(lowered, fn=_by_call(called, {n.name: _add(table, x) for n, x in said.items()}))


def _add(table: list[Said], said: Said) -> int:
    table.append(said)
    return len(table) - 1


def _said(n: fx.Node, stage: str, module: str, prefix: str, others: dict[fx.Node, Said]) -> Said:
    target = str(n.target).removesuffix(".default")
    if not target.startswith(COLLECTIVE):
        return Said(target, stage, module)
    short = target.removeprefix(COLLECTIVE).removesuffix("_into_tensor").removesuffix("_tensor")
    if WAIT in target:
        issued = n.args[0]
        of = others.get(issued) if isinstance(issued, fx.Node) else None
        name = of.name if of is not None else "a collective"
        return Said(f"waits for {name}", "exposed", of.module if of is not None else module, of.axes if of is not None else "", name)
    axes = next((a[len(prefix) + 1 :].replace("+", " x ") for a in n.args if isinstance(a, str) and a.startswith(prefix + ".")), "")
    return Said(short, stage, module, axes)


def _key(n: fx.Node) -> Key:
    read = n.args[0]
    assert isinstance(read, fx.Node)
    return str(n.target).removeprefix(COLLECTIVE).removesuffix(".default"), tuple(int(x) for x in read.meta["val"].shape)


def _whole(fn: FlatFn, number: int) -> FlatFn:
    def run(flat: list[Any]) -> list[Any]:
        with record_function(f"{MARK}{number}"):
            return fn(flat)

    return run


def _by_call(gm: fx.GraphModule, numbers: dict[str, int]) -> FlatFn:
    class Calls(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            if n.name not in numbers:
                return super().run_node(n)
            with record_function(f"{MARK}{numbers[n.name]}"):
                return super().run_node(n)

    def run(flat: list[Any]) -> list[Any]:
        values = list(flat)
        flat.clear()
        with torch.no_grad():
            return list(Calls(gm).run(*values, enable_io_processing=False))

    return run


# ---- afterwards --------------------------------------------------------------------------------------------------


def _save(model: ParallelModule, found: profile, table: list[Said], path: Path) -> None:
    events, zero = _measured(found, table)
    document: dict[str, Any] = {"traceEvents": [], "displayTimeUnit": "ms"}
    plan = model.plan
    if plan.profile is not None:
        document = predicted_trace(plan.timeline(), "predicted")
    document["traceEvents"] += events
    document["otherData"] = {**document.get("otherData", {}), "measured_s": zero}
    try:
        path.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as e:
        raise AutoparError(
            f"the trace cannot be written: {e.strerror or e}", where=str(path), fix="name a file in a folder that can be written"
        ) from e


def _measured(found: profile, table: list[Said]) -> tuple[list[dict[str, Any]], float]:
    """Events of the trace, and the seconds from the first to the end of the last."""
    raw: list[Any] = [e for e in found.events() or [] if e.time_range.end >= e.time_range.start]
    ours = sorted((e for e in raw if e.name.startswith(MARK) and "CPU" in str(e.device_type)), key=lambda e: e.time_range.start)
    others = [e for e in raw if "CPU" not in str(e.device_type) or e.name.startswith("Optimizer.step")]
    if not ours:
        return [], 0.0
    start = min(e.time_range.start for e in ours)
    tracks: dict[str, int] = {"compute": 1}
    out: list[dict[str, Any]] = []

    def add(track: str, name: str, kind: str, begin: float, end: float, args: dict[str, Any]) -> None:
        tid = tracks.setdefault(track, len(tracks) + 1)
        out.append(
            {"name": name, "cat": kind, "ph": "X", "ts": begin - start, "dur": end - begin, "pid": MEASURED, "tid": tid, "args": args}
        )

    issued: dict[str, list[tuple[Said, float]]] = {}

    def tell(said: Said, begin: float, end: float) -> None:
        if said.kind != "exposed":
            add("compute", said.name, said.kind, begin, end, {"module": said.module})
            if said.axes:
                issued.setdefault(f"{said.of or said.name} {said.module} {said.axes}", []).append((said, begin))
            return
        add("compute", said.name, said.kind, begin, end, {"of": said.module, "axes": said.axes})
        waiting = issued.get(f"{said.of} {said.module} {said.axes}")
        if waiting:
            of, since = waiting.pop(0)
            add(f"{of.axes} (links)", of.name, of.kind, since, end, {"module": of.module, "axes": of.axes, "waited_us": end - begin})

    dispatched = sorted((e for e in raw if e.name.startswith(DISPATCHED)), key=lambda e: e.time_range.start)
    for e in ours:
        said = table[int(e.name.removeprefix(MARK))]
        begin, end = e.time_range.start, e.time_range.end
        tell(said, begin, end)
        within = [d for d in dispatched if begin <= d.time_range.start and d.time_range.end <= end] if said.inside else []
        keys = [(d.name.removeprefix(DISPATCHED).rstrip("_"), tuple((d.input_shapes or [()])[0])) for d in within]
        # A compiler may drop a collective that nothing needs.
        for block in difflib.SequenceMatcher(None, keys, [k for k, _ in said.inside], autojunk=False).get_matching_blocks():
            for i in range(block.size):
                d = within[block.a + i]
                tell(said.inside[block.b + i][1], d.time_range.start, d.time_range.end)
    for e in others:
        track = "compute" if "CPU" in str(e.device_type) else f"device, stream {getattr(e, 'device_resource_id', 0)}"
        if e.time_range.start >= start:
            add(track, e.name, "optimizer" if track == "compute" else "kernel", e.time_range.start, e.time_range.end, {})
    out.sort(key=lambda x: (x["ts"], -x["dur"]))
    names = [{"name": "process_name", "ph": "M", "pid": MEASURED, "tid": 0, "args": {"name": "autopar: measured"}}]
    for name, tid in tracks.items():
        names.append({"name": "thread_name", "ph": "M", "pid": MEASURED, "tid": tid, "args": {"name": name}})
    return names + out, max(x["ts"] + x["dur"] for x in out) / 1e6
