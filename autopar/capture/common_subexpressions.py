"""Equal calls become one node: q, k and v each flatten the norm's result, and a gather of it shall be shared.

The one that stays moves to where its tensor is made: a view of what all layers share then belongs to none of them, and they stay alike.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar import _torch
from autopar.capture.tags import join_tags


def merge_equal(gm: fx.GraphModule) -> int:
    """Merges pure calls with the same operands and arguments, those of forward with forward's, of backward with backward's.

    Returns how many were taken out. The graph must be functional: nothing is written in place.
    """
    seen: dict[Any, fx.Node] = {}
    moved: set[fx.Node] = set()
    merged = 0
    for node in list(gm.graph.nodes):
        target = node.target
        if node.op != "call_function" or not _torch.is_pure(node) or _torch.draws_random(node):
            continue
        key = (target, _frozen(node.args), _frozen(node.kwargs), node.meta.get("partitioner_tag"))
        first = seen.setdefault(key, node)
        if first is not node:
            if first not in moved:
                last = max(first.all_input_nodes, default=None)  # nodes compare by their place in the graph
                if last is None or last.op == "placeholder":
                    last = [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
                last.append(first)
                moved.add(first)
            join_tags(first, node)
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
            merged += 1
    if merged:
        gm.recompile()
    return merged


def _frozen(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return tuple(_frozen(y) for y in x)
    if isinstance(x, dict):
        return tuple(sorted((k, _frozen(v)) for k, v in x.items()))
    return (type(x).__name__, x)
