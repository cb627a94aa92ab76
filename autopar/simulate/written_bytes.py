"""How many bytes the calls of a rewritten step leave in memory, once neighbours are compiled into one kernel as `cost.fusion` says.

The simulator counts all results, as an eager run does; the integer program only what kernels write. In between:

    a product, attention, a convolution, a collective, a copy for one     all of it
    a memory-bound operator                                               the outputs that its kernel writes, nothing of what its local lowering makes
                                                                          on the way (random bits, indices, halves of a softmax)
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import fx

from autopar import _torch
from autopar.cost import Cost
from autopar.graph.calls import is_collective, is_transfer, is_wait, nbytes, part_bytes, shares_storage
from autopar.graph.graph import Graph, Op
from autopar.passes import local
from autopar.passes.partition import Parts
from autopar.passes.sharding.operators import HOLDS
from autopar.rules import lookup

_COPY = "aten.clone.default"


def stored(graph: Graph, cost: Cost, backward: fx.GraphModule | None = None) -> Callable[[fx.Node], list[int]]:
    """By call, bytes of every part of its result, but for what is kept for backward: that is in memory whatever is said here. graph: the whole captured one, whose
    fusion `cost` knows; backward: the half in which forward's operators run again."""
    ops = {op.name: op for op in graph.ops}
    fused = cost.fused or {}

    def sizes(n: fx.Node) -> list[int]:
        op = ops.get(n.meta["op"])
        if op is None or op.name not in fused or lookup(op).is_heavy or is_collective(n):
            return part_bytes(n)
        made = cost.stored(op, backward is not None and n.graph is backward.graph and op.direction == "forward")
        if str(n.target) == op.target:
            written = [t is not None and t.name in made for t in op.outputs]
            return [b if w else 0 for b, w in zip(part_bytes(n), written, strict=True)]
        if local.lookup(op.target) is None or str(n.target) == _COPY:
            return part_bytes(n)  # a copy for a collective
        return [b if made and _leaves(n, op) else 0 for b in part_bytes(n)]

    return sizes


def saved_tensors(parts: Parts) -> dict[str, int]:
    """Names of captured values that are saved for backward, wherever they are meanwhile -> bytes of what is saved of them; what they are views of is among them."""
    found: dict[str, int] = {}
    results = _torch.results_of(parts.forward.graph)
    for n in results[len(results) - len(parts.saved) :] if parts.saved else ():
        while n is not None:
            for name in (*([n.meta["kept"]] if "kept" in n.meta else []), *(held for held, _ in n.meta.get(HOLDS, ()))):
                found.setdefault(name, nbytes(n))
            n = n.args[0] if is_transfer(n) or is_wait(n) else shares_storage(n)
    return found


def with_saved(parts: Parts, sizes: Callable[[fx.Node], list[int]], nothing: Collection[fx.Node] = ()) -> Callable[[fx.Node], list[int]]:
    """`sizes`, and all of what is saved for backward, which is written also where fusion alone would not have written it. nothing: calls whose results are in no memory."""
    results = _torch.results_of(parts.forward.graph)
    whole: dict[fx.Node, set[int]] = {}
    for n in results[len(results) - len(parts.saved) :] if parts.saved else ():
        while (base := shares_storage(n)) is not None:
            if isinstance(base.meta["val"], (list, tuple)) and shares_storage(base) is None:
                whole.setdefault(base, set()).add(n.args[1])
                break
            n = base
        else:
            whole.setdefault(n, set()).add(0)

    def of(n: fx.Node) -> list[int]:
        usual = [0] * len(part_bytes(n)) if n in nothing else sizes(n)
        return [full if i in whole.get(n, ()) else b for i, (b, full) in enumerate(zip(usual, part_bytes(n), strict=True))]

    return of


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
