"""`as_strided` speaks of the memory behind a tensor. Here it is made to speak of the tensor: of its elements in order.

Elsewhere a value's memory is not its captured one: a rank's shard lies in storage of its own. So the operand becomes the permutation of it that has no gaps,
and the offset counts from its first element. A window that shows more than the operand has no such form and is refused.

A window on all of it, each element once, is a view and a permutation; what is written to such a window is all that there is. Pooling to one element has both, forward and
backward, to give its results the strides of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar.errors import CaptureError
from autopar.tensors.memory_format import Order, dense_order, inverse

_WRITE = torch.ops.aten.as_strided_scatter.default
_READ = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_copy.default)
_COPY = torch.ops.aten.copy.default


def plain_windows(gm: fx.GraphModule, mode: Any) -> bool:
    """Rewrites the `as_strided` calls of a captured graph in place; whether there are any."""
    windows = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in (*_READ, _WRITE)]
    for n in windows:
        _rewrite(gm.graph, n, mode)
    return bool(windows)


def _rewrite(graph: fx.Graph, n: fx.Node, mode: Any) -> None:
    at = 2 if n.target is _WRITE else 1
    source = n.args[0]
    assert isinstance(source, fx.Node)
    x = source.meta["val"]
    size: Any = n.args[at]
    stride: Any = n.args[at + 1]
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
    whole = _whole(size, stride, x.numel()) if offset == 0 else None
    if whole is None and order == tuple(range(x.dim())) and offset == (given or 0):
        return

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        values = fx.map_arg(args, lambda a: a.meta["val"])
        with mode:
            new.meta = {**n.meta, "val": target(*values, **kwargs)}
        return new

    def permuted(a: fx.Node, dims: Sequence[int]) -> fx.Node:
        return a if list(dims) == sorted(dims) else call(torch.ops.aten.permute.default, a, list(dims))

    def viewed(a: fx.Node, shape: Sequence[int]) -> fx.Node:
        if a.meta["val"].shape == torch.Size(shape):
            return a
        a = a if a.meta["val"].is_contiguous() else call(torch.ops.aten.clone.default, a, memory_format=torch.contiguous_format)
        return call(torch.ops.aten.view.default, a, list(shape))

    with graph.inserting_before(n):
        if whole is None:
            dense = permuted(source, order)
            result = call(n.target, dense, *n.args[1:at], size, stride, offset)
            result = permuted(result, inverse(order)) if n.target is _WRITE else result
        elif n.target is _WRITE:
            written = permuted(_written(n.args[1]), whole)
            result = permuted(viewed(written, [x.shape[d] for d in order]), inverse(order))
        else:
            result = permuted(viewed(permuted(source, order), [size[d] for d in whole]), inverse(whole))
    n.replace_all_uses_with(result)
    graph.erase_node(n)


def _whole(size: Sequence[int], stride: Sequence[int], numel: int) -> Order | None:
    """The order of dims in which a window shows so many elements one after the other, each once; dims of one element stay in their place. None where it does not."""
    more = [d for d, k in enumerate(size) if k != 1]
    wide = iter(sorted(more, key=lambda d: -stride[d]))
    order = tuple(next(wide) if k != 1 else d for d, k in enumerate(size))
    step = 1
    for d in reversed(order):
        if size[d] != 1 and stride[d] != step:
            return None
        step *= size[d]
    return order if step == numel else None


def _written(n: Any) -> fx.Node:
    """What is written, without the copy of it that has the window's strides."""
    assert isinstance(n, fx.Node)
    if n.target is not _COPY:
        return n
    a = n.args[1]
    assert isinstance(a, fx.Node)
    there, new = n.meta["val"], a.meta["val"]
    return a if (there.shape, there.dtype) == (new.shape, new.dtype) else n
