"""A log-softmax that backward makes again is made of one number a row, and not by reducing its rows once more.

    log_softmax(x) = x - lse,    lse = x[0] - log_softmax(x)[0]

in forward, which has both at hand. Backward's kernel then reads a row once, where it would read it twice (`x` may be gigabytes of logits). As the last bits of lse
are those of a difference, only rows that are large together are made so. Not bitwise.

Requires: "local". For graphs that are compiled: run call by call, a difference is no faster than what it stands for.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import fx

from autopar.graph.calls import nbytes

aten = torch.ops.aten
LEAST_BYTES = 2**26
_NAMES = (aten.detach.default, aten.alias.default)  # which give the same tensor another name


def row_statistics(gm: fx.GraphModule, mode: Any, ops: Set[str]) -> None:
    """In place. ops: names of those that backward makes again."""
    for n in list(gm.graph.nodes):
        if n.target is aten._log_softmax.default and n.meta["direction"] == "forward" and n.meta["op"] in ops and nbytes(n) >= LEAST_BYTES:
            readers = [u for u in n.users if u.op == "call_function" and (u.meta["direction"] == "backward" or u.target in _NAMES)]
            if readers:
                again = _difference(gm.graph, mode, n)
                for u in readers:
                    u.replace_input_with(n, again)


def _difference(graph: fx.Graph, mode: Any, n: fx.Node) -> fx.Node:
    """`n`, as the difference of what it was made of and a number a row."""
    x, dim = n.args[0], n.args[1]
    assert isinstance(x, fx.Node)
    place = n

    def call(target: Any, args: tuple[Any, ...], op: str, kwargs: dict[str, Any] | None = None) -> fx.Node:
        nonlocal place
        with graph.inserting_after(place):
            place = graph.call_function(target, args, kwargs or {})
        with mode:
            value = target(*fx.map_arg(args, lambda a: a.meta["val"]), **(kwargs or {}))
        place.meta = {"val": value, "direction": "forward", "op": op}
        return place

    dtype, own = n.meta["val"].dtype, n.meta["op"]
    rows = f"rows of {own}"  # no operator of the plan's: what it says to make again are others
    first = call(aten.slice.Tensor, (x, dim, 0, 1), rows)
    if first.meta["val"].dtype != dtype:
        first = call(aten._to_copy.default, (first,), rows, {"dtype": dtype})
    lse = call(aten.sub.Tensor, (first, call(aten.slice.Tensor, (n, dim, 0, 1), rows)), rows)
    if x.meta["val"].dtype != dtype:
        x = call(aten._to_copy.default, (x,), own, {"dtype": dtype})
    return call(aten.sub.Tensor, (x, lse), own)
