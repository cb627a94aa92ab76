"""How many bytes the calls of a rewritten step leave in memory, once neighbours are compiled into one kernel as `cost.fusion` says.

The simulator counts all results, as an eager run does; the integer program only what kernels write. In between:

    a product, attention, a convolution, a collective, a copy for one     all of it
    a memory-bound operator                                               the outputs that its kernel writes, nothing of what its local lowering makes
                                                                          on the way (random bits, indices, halves of a softmax)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from autopar.cost import Cost
from autopar.graph import Graph, Op
from autopar.passes import local
from autopar.passes.nodes import is_collective, part_bytes, shares_storage
from autopar.rules import lookup

_COPY = "aten.clone.default"


def stored(graph: Graph, cost: Cost) -> Callable[[fx.Node], list[int]]:
    """By call, bytes of every part of its result. graph: the whole captured one, whose fusion `cost` knows."""
    ops = {op.name: op for op in graph.ops}
    fused = cost.fused or {}

    def sizes(n: fx.Node) -> list[int]:
        op = ops.get(n.meta["op"])
        if op is None or op.name not in fused or lookup(op).is_heavy or is_collective(n):
            return part_bytes(n)
        if str(n.target) == op.target:
            written = [t is not None and t.name in fused[op.name].writes for t in op.outputs]
            return [b if w else 0 for b, w in zip(part_bytes(n), written, strict=True)]
        if local.lookup(op.target) is None or str(n.target) == _COPY:
            return part_bytes(n)  # a copy for a collective
        return [b if fused[op.name].writes and _leaves(n, op) else 0 for b in part_bytes(n)]

    return sizes


def _leaves(n: fx.Node, op: Op) -> bool:
    """Whether another operator reads what `n` makes, also through views."""
    todo: list[Any] = [n]
    while todo:
        for u in todo.pop().users:
            if u.op == "output" or u.meta["op"] != op.name:
                return True
            if shares_storage(u) is not None:
                todo.append(u)
    return False
