"""`as_strided` speaks of the memory behind a tensor. Here it is made to speak of the tensor: of its elements in order.

Elsewhere a value's memory is not its captured one: a rank's shard lies in storage of its own. So the operand becomes the permutation of it that has no gaps,
and the offset counts from its first element. A window that shows more than the operand has no such form and is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar.errors import CaptureError
from autopar.tensors.memory_format import dense_order, inverse

_WRITE = torch.ops.aten.as_strided_scatter.default
_READ = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_copy.default)


def plain_windows(gm: fx.GraphModule, mode: Any) -> None:
    """Rewrites the `as_strided` calls of a captured graph in place."""
    for n in list(gm.graph.nodes):
        if n.op == "call_function" and n.target in (*_READ, _WRITE):
            _rewrite(gm.graph, n, mode)


def _rewrite(graph: fx.Graph, n: fx.Node, mode: Any) -> None:
    at = 2 if n.target is _WRITE else 1
    source = n.args[0]
    assert isinstance(source, fx.Node)
    x = source.meta["val"]
    size, stride = n.args[at], n.args[at + 1]
    assert isinstance(size, (list, tuple)) and isinstance(stride, (list, tuple))
    given: Any = n.args[at + 2] if len(n.args) > at + 2 else n.kwargs.get("storage_offset")
    offset = 0 if given is None else given - x.storage_offset()
    order = dense_order(x)
    reach = sum((k - 1) * s for k, s in zip(size, stride, strict=True)) + 1 if all(size) else 0
    if order is None or offset < 0 or offset + reach > x.numel():
        raise CaptureError(
            f"{n.target} looks at memory beyond the tensor of shape {tuple(x.shape)} that it is given",
            where=_torch.line_of(n),
            fix="write it with views that name what they show (unfold, transpose, slicing), or give it a tensor that owns all of the memory",
        )
    if order == tuple(range(x.dim())) and offset == (given or 0):
        return

    def call(target: Any, args: tuple[Any, ...]) -> fx.Node:
        new = graph.call_function(target, args)
        values = fx.map_arg(args, lambda a: a.meta["val"])
        with mode:
            new.meta = {**n.meta, "val": target(*values)}
        return new

    with graph.inserting_before(n):
        dense = call(torch.ops.aten.permute.default, (source, list(order)))
        result = call(n.target, (dense, *n.args[1:at], size, stride, offset))
        if n.target is _WRITE:
            result = call(torch.ops.aten.permute.default, (result, list(inverse(order))))
    n.replace_all_uses_with(result)
    graph.erase_node(n)
