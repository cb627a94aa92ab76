"""Lowering: a partitioned graph -> a callable over a flat list of tensors.

    aot_eager   the graph's own generated code
    inductor    repeated layers outlined, late decomposition (retracing with Inductor's table under the same fake mode), then Inductor

Only here do aten's composite ops fall apart: everything before works on the high-level graph. Backward is lowered on the strides that
the compiled forward really gives to what it saves. Inductor keeps the order in which collectives are issued and waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar.compile_cache import CompileOnce
from autopar.passes.outline import outline

FlatFn = Callable[[list[Any]], list[Any]]
Strides = tuple["tuple[int, ...] | None", ...]


@dataclass(frozen=True)
class Lowered:
    """fn: takes a list of flat tensors, which it may clear to free memory. strides: of every output, where Inductor chose them.

    stats: seconds, distinct layer bodies lowered, layers they stand for, Inductor cache hits and misses.
    """

    fn: FlatFn
    strides: Strides | None = None
    stats: dict[str, Any] = field(default_factory=dict)


def lower(
    gm: fx.GraphModule,
    *,
    backend: str,
    fake_mode: Any,
    is_backward: bool = False,
    saved_strides: Sequence[tuple[int, ...] | None] | None = None,
    once: CompileOnce | None = None,
) -> Lowered:
    """saved_strides: for a backward graph, the strides of its first placeholders (what forward saved)."""
    if backend == "aot_eager":
        return Lowered(_eager(gm))
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for n, strides in zip(places, saved_strides or (), strict=False):
        if strides is not None:
            n.meta["val"] = _torch.with_strides(n.meta["val"], strides, fake_mode)
    start = time.perf_counter()
    outlined = outline(gm, fake_mode)
    before = _torch.inductor_cache_counts()

    def work() -> tuple[Any, Strides | None]:
        return _torch.compile_inner(outlined.gm, fake_mode, is_backward)

    fn, strides = once.run(work) if once is not None else work()
    after = _torch.inductor_cache_counts()
    stats = {
        "seconds": time.perf_counter() - start,
        "nodes": len(gm.graph.nodes),
        "distinct_layers": outlined.distinct,
        "layers": outlined.layers,
        **{k: after[k] - before[k] for k in after},
    }
    return Lowered(lambda flat: list(fn(flat)), strides, stats)


def _eager(gm: fx.GraphModule) -> FlatFn:
    def run(flat: list[Any]) -> list[Any]:
        args = list(flat)
        flat.clear()
        with torch.no_grad():
            return list(gm(*args))

    return run
