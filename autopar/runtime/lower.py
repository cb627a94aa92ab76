"""Lowering: a partitioned graph -> a callable over a flat list of tensors.

    aot_eager   the graph's own generated code, which frees every value, saved ones too, after its last use
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
from autopar.passes.demands import KERNELS, guard
from autopar.passes.outline import outline
from autopar.runtime.artifacts import Kept
from autopar.runtime.compile_cache import CompileOnce

FlatFn = Callable[[list[Any]], list[Any]]
Strides = tuple["tuple[int, ...] | None", ...]


@dataclass(frozen=True)
class Lowered:
    """fn: takes a list of flat tensors, which it may clear to free memory. strides: of every output, where Inductor chose them.

    stats: seconds, distinct layer bodies lowered, layers they stand for, Inductor cache hits and misses.
    """

    fn: FlatFn
    strides: Strides | None = None
    stats: dict[str, float] = field(default_factory=dict)


def lower(
    gm: fx.GraphModule,
    *,
    backend: str,
    fake_mode: Any,
    is_backward: bool = False,
    saved_strides: Sequence[tuple[int, ...] | None] | None = None,
    once: CompileOnce | None = None,
    kept: Kept | None = None,
) -> Lowered:
    """saved_strides: for a backward graph, the strides of its first placeholders (what forward saved). kept: what was compiled ahead."""
    if backend == "aot_eager":
        return Lowered(_without_grad(_torch.boxed(eager_module(gm))))
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    places = [n for n in places if isinstance(n.meta["val"], torch.Tensor)]
    for n, saved in zip(places, saved_strides or (), strict=False):
        if saved is not None:
            n.meta["val"] = _torch.with_strides(n.meta["val"], saved, fake_mode)
    _torch.keep_strides(KERNELS)
    start = time.perf_counter()
    outlined = outline(gm, fake_mode)
    before = _torch.inductor_cache_counts()

    def work() -> tuple[Any, Strides | None]:
        return _torch.compile_inner(outlined.gm, fake_mode, is_backward)

    fn, strides = once.run(work, kept) if once is not None else work()
    after = _torch.inductor_cache_counts()
    stats = {
        "seconds": time.perf_counter() - start,
        "nodes": len(gm.graph.nodes),
        "distinct_layers": outlined.distinct,
        "layers": outlined.layers,
        **{k: after[k] - before[k] for k in after},
    }
    return Lowered(_without_grad(fn), strides, stats)


def eager_module(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph as it runs call by call."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for n in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        n.target = torch.ops.aten.reshape.default  # a real operand may have other strides than the fake one
    guard(graph)
    return fx.GraphModule(gm, graph)


def _without_grad(fn: Callable[[list[Any]], Any]) -> FlatFn:
    def run(flat: list[Any]) -> list[Any]:
        with torch.no_grad():
            return list(fn(flat))

    return run
