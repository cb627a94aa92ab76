"""Copies where a kernel would not find its operands as it demands (`demands.py`), and before views that the operand's strides do not allow.

What captures as no copy at all, because values lay as they had to, can need one on a rank: a collective or a permuted shard left them otherwise. The copies are
counted (`layout_copies` in the step's stats), and lie in the graph, so that they are priced, shared and kept like any other call.

Requires: local. Provides: laid out. Bitwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar.passes.demands import ORDERS, unmet
from autopar.tensors.memory_format import Order, inverse

COPIED = "layout_copy"  # meta of a copy that this pass made
_VIEWS = ("aten.view.default", "aten._unsafe_view.default")


def lay_out(gm: fx.GraphModule) -> fx.GraphModule:
    mode = _torch.fake_mode_of(gm)
    made: dict[tuple[fx.Node, Order, str], fx.Node] = {}
    stale: set[fx.Node] = set()
    for n in list(gm.graph.nodes):
        if n.op != "call_function":
            continue
        values = fx.map_arg(n.args, lambda a: a.meta["val"])
        wrong = unmet(n.target, values, n.meta.get(ORDERS))
        if str(n.target) in _VIEWS and n.args[0] in stale and not _is_view(values[0], n.meta["val"].shape, mode):
            wrong = [(0, tuple(range(values[0].dim())))]
        for i, order in wrong:
            source = n.args[i]
            key = (source, order, n.meta["direction"])
            if key not in made:
                made[key] = _copy(gm.graph, source, order, n, mode)
            n.update_arg(i, made[key])
        if wrong or any(a in stale for a in n.all_input_nodes):
            args, kwargs = fx.map_arg((n.args, n.kwargs), lambda a: a.meta["val"])
            before = n.meta["val"]
            with mode:
                n.meta["val"] = n.target(*args, **kwargs)
            if _strides(before) != _strides(n.meta["val"]):
                stale.add(n)
    if made:
        gm.recompile()
    return gm


def copies(gm: fx.GraphModule) -> int:
    """How many of this pass's copies a graph has."""
    return sum(bool(n.meta.get(COPIED)) for n in gm.graph.nodes)


def copying(order: Order) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The calls, one on the other's result, that give a tensor as it lies in `order`: operator, further arguments."""
    aten = torch.ops.aten
    clone = (aten.clone.default, (), {"memory_format": torch.contiguous_format})
    if order == tuple(range(len(order))):
        return [clone]
    return [(aten.permute.default, (list(order),), {}), clone, (aten.permute.default, (list(inverse(order)),), {})]


def _copy(graph: fx.Graph, x: fx.Node, order: Order, reader: fx.Node, mode: Any) -> fx.Node:
    for target, args, kwargs in copying(order):
        with graph.inserting_before(reader):
            new = graph.call_function(target, (x, *args), kwargs)
        with mode:
            new.meta = {"val": target(x.meta["val"], *args, **kwargs), "direction": reader.meta["direction"], "op": reader.meta["op"]}
        new.meta[COPIED] = target is torch.ops.aten.clone.default
        x = new
    return x


def _is_view(x: torch.Tensor, shape: Any, mode: Any) -> bool:
    try:
        with mode:
            x.view(shape)
    except (RuntimeError, ValueError):
        return False
    return True


def _strides(val: Any) -> Any:
    return [v.stride() if isinstance(v, torch.Tensor) else None for v in (val if isinstance(val, (list, tuple)) else [val])]
