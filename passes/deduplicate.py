"""Equal work once: a node with the same target and operands as an earlier one of the same direction is replaced by it.

The shard pass already shares redistributions of one tensor; this finds those of tensors that are equal (a weight seen through two
transposes, masks built anew in every layer), so no collective is issued twice for the same data. Only across nodes of one direction:
merging a backward node into forward would change what is saved.

The counters of random ops are shared where a compiler will fuse them. Run one call at a time, they would lie in memory from the first dropout to the
last, eight bytes for every element: there each op makes its own.

Requires: local. Provides: deduplicated. Bitwise.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar import _torch


def deduplicate(gm: fx.GraphModule, share_counters: bool = True) -> fx.GraphModule:
    seen: dict[Any, fx.Node] = {}
    for n in list(gm.graph.nodes):
        if n.op != "call_function" or not _torch.is_pure(n):
            continue
        owner = n.meta["op"] if n.meta.get("random") and not share_counters else ""
        key = (owner, str(n.target), n.meta["direction"], _freeze(n.args), _freeze(n.kwargs))
        first = seen.setdefault(key, n)
        if first is not n:
            n.replace_all_uses_with(first)
            gm.graph.erase_node(n)
    gm.recompile()
    return gm


def _freeze(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return tuple(_freeze(y) for y in x)
    if isinstance(x, dict):
        return tuple((k, _freeze(v)) for k, v in x.items())
    if isinstance(x, slice):
        return ("slice", _freeze(x.start), _freeze(x.stop), _freeze(x.step))
    if isinstance(x, float):
        return ("float", x.hex())
    return (type(x).__name__, x) if isinstance(x, (bool, int)) else x if isinstance(x, (fx.Node, str, type(None))) else str(x)
