"""Buffers that forward sets to what they are: `self.table = self.table.to(x.device)`, where the table is there already."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autopar import _torch

aten = torch.ops.aten
_SAME = {
    aten.clone.default: 0,
    aten.alias.default: 0,
    aten.detach.default: 0,
    aten.copy.default: 1,
}  # which operand has the result's numbers


def drop_unchanged(gm: fx.GraphModule, buffers: Mapping[str, int], updates: Mapping[int, str]) -> set[int]:
    """Returns None in place of updates that change nothing, and says which these are. buffers: name -> place among the graph's inputs; updates: place among its results -> name."""
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    results = list(_torch.results_of(gm.graph))
    same = {i for i, name in updates.items() if name in buffers and _source(results[i]) is places[buffers[name]]}
    gm.graph.output_node().args = (tuple(None if i in same else n for i, n in enumerate(results)),)
    return same


def _source(n: fx.Node) -> fx.Node:
    """Whose numbers `n` has."""
    while n.op == "call_function" and n.target in _SAME:
        a = n.args[_SAME[n.target]]
        if not isinstance(a, fx.Node) or a.meta["val"].dtype != n.meta["val"].dtype or a.meta["val"].shape != n.meta["val"].shape:
            break
        n = a
    return n
