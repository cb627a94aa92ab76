"""Lookups and scatters on a split table.

A global index i along a dim is at home on the rank whose coordinates are i's digits; what is left of the digits is the
local index. Elsewhere a lookup gives zero; a scatter that adds, adds zero; one that overwrites writes to a row of its own
at the end, which is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.graph.placement import Placement
from autopar.passes.local import local, one_tensor, operator
from autopar.passes.local.context import Local
from autopar.passes.local.reduction import once
from autopar.rules.index import layout


def locate(ctx: Local, placement: Placement, dim: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Local indices, and where they are another rank's (None: nowhere). An index from the end counts as from the start."""
    if not any(s.dim == dim for s in placement.splits):
        return index, None
    index = torch.where(index < 0, index + placement.shape[dim], index)
    stride = placement.shape[dim]
    at = torch.zeros_like(index)
    elsewhere: torch.Tensor | None = None
    for size, axis in placement.digits(dim, ctx.mesh):
        stride //= size
        digit = torch.remainder(torch.div(index, stride, rounding_mode="floor"), size)
        if axis is None:
            at = at * size + digit
        else:
            miss = digit != ctx.coordinate(axis)
            elsewhere = miss if elsewhere is None else elsewhere | miss
    return at, elsewhere


def _out(ctx: Local) -> Placement:
    p = ctx.outputs[0]
    assert p is not None
    return p


@local("aten.embedding.default")
def _embedding(ctx: Local, weight: torch.Tensor, indices: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    at, elsewhere = locate(ctx, ctx.inputs[0], 0, indices)
    if elsewhere is None:
        return one_tensor(torch.ops.aten.embedding(weight, indices, *args, **kwargs))
    return one_tensor(torch.ops.aten.embedding(weight, at)).masked_fill(elsewhere.unsqueeze(-1), 0)


@local("aten.embedding_dense_backward.default")
def _embedding_backward(ctx: Local, grad: torch.Tensor, indices: torch.Tensor, rows: int, padding_idx: int, scale: bool) -> torch.Tensor:
    at, elsewhere = locate(ctx, _out(ctx), 0, indices)
    if elsewhere is None:
        return one_tensor(torch.ops.aten.embedding_dense_backward(grad, indices, rows, padding_idx, scale))
    dropped = elsewhere | (indices == padding_idx)
    grad = grad.masked_fill(dropped.unsqueeze(-1), 0)
    return one_tensor(torch.ops.aten.embedding_dense_backward(grad, at, ctx.local_shape()[0], -1, scale))


@local("aten.gather.default")
def _gather(ctx: Local, x: torch.Tensor, dim: int, index: torch.Tensor, **_: Any) -> torch.Tensor:
    at, elsewhere = locate(ctx, ctx.inputs[0], dim % x.dim() if x.dim() else 0, index)
    out = one_tensor(torch.ops.aten.gather(x, dim, at))
    return out if elsewhere is None else out.masked_fill(elsewhere, 0)


def _with_spare_row(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([x, x.narrow(dim, 0, 1)], dim)


@local("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default")
def _scatter(ctx: Local, x: torch.Tensor, dim: int, index: torch.Tensor, src: Any) -> torch.Tensor:
    fn: Callable[..., torch.Tensor] = operator(ctx.op.target)
    if not x.dim():
        return fn(x, dim, index, src)
    at, elsewhere = locate(ctx, ctx.inputs[0], dim % x.dim(), index)
    if ctx.op.target == "aten.scatter_add.default":
        x = once(ctx, x, _summed(ctx, 1))
        if elsewhere is not None:
            # The source may be larger than the index, which then uses its first part.
            src = src[tuple(slice(0, n) for n in index.shape)].masked_fill(elsewhere, 0)
        return fn(x, dim, at, src)
    if elsewhere is None:
        return fn(x, dim, index, src)
    rows = x.shape[dim]
    out = fn(_with_spare_row(x, dim), dim, torch.where(elsewhere, rows, at), src)
    return out.narrow(dim, 0, rows)


def _summed(ctx: Local, operand: int) -> list[str]:
    """Letters of an operand that the output lacks: the output is a sum over them."""
    dims = ctx.rule.outputs[0]
    assert dims is not None
    kept = {a for d in dims for a in d}
    return [a for d in ctx.rule.inputs[operand] for a in d if a not in kept]


@local("aten.index_select.default")
def _index_select(ctx: Local, x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    at, elsewhere = locate(ctx, ctx.inputs[0], dim % x.dim() if x.dim() else 0, index)
    out = one_tensor(torch.ops.aten.index_select(x, dim, at))
    return out if elsewhere is None else out.masked_fill(_down(elsewhere.reshape(-1), x.dim(), dim), 0)


def _down(rows: torch.Tensor, ndim: int, dim: int) -> torch.Tensor:
    """A 1-d tensor along `dim` of `ndim`."""
    return rows.reshape([-1 if i == dim % ndim else 1 for i in range(ndim)])


@local("aten.index_add.default")
def _index_add(ctx: Local, x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    if x.dim() and src.dim():
        index, elsewhere = locate(ctx, ctx.inputs[0], dim % x.dim(), index)
        x = once(ctx, x, _summed(ctx, 2))
        if elsewhere is not None:
            src = src.masked_fill(_down(elsewhere.reshape(-1), x.dim(), dim), 0)
    return one_tensor(torch.ops.aten.index_add(x, dim, index, src, **kwargs))


def _locate_all(
    ctx: Local, placement: Placement, indices: Sequence[torch.Tensor | None]
) -> tuple[list[torch.Tensor | None], torch.Tensor | None, int]:
    """All indices local, where any of them is another rank's, and the first dim that is split (-1: none)."""
    found: list[torch.Tensor | None] = []
    elsewhere: torch.Tensor | None = None
    split = -1
    for dim, index in enumerate(indices):
        if index is not None:
            index, miss = locate(ctx, placement, dim, index)
            if miss is not None:
                elsewhere = miss if elsewhere is None else elsewhere | miss
                split = dim if split < 0 else split
        found.append(index)
    return found, elsewhere, split


def _of_result(ctx: Local, mask: torch.Tensor) -> torch.Tensor:
    """A mask of the indices' shape, made to broadcast with `x[indices]`."""
    order = layout(ctx.op)[2]
    ndim = order.count(None)
    mask = mask.reshape((1,) * (ndim - mask.dim()) + tuple(mask.shape))
    sizes = iter(mask.shape)
    return mask.reshape([next(sizes) if i is None else 1 for i in order])


@local("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(ctx: Local, x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    at, elsewhere, _ = _locate_all(ctx, ctx.inputs[0], indices)
    out = one_tensor(operator(ctx.op.target)(x, at))
    return out if elsewhere is None else out.masked_fill(_of_result(ctx, elsewhere), 0)


@local("aten.index_put.default", "aten._unsafe_index_put.default")
def _index_put(
    ctx: Local, x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    fn: Callable[..., torch.Tensor] = operator(ctx.op.target)
    if any(t is not None and t.dtype == torch.bool for t in indices):
        return fn(x, indices, values, accumulate)
    at, elsewhere, split = _locate_all(ctx, ctx.inputs[0], indices)
    if accumulate:
        x = once(ctx, x, [a for i in range(1, len(ctx.inputs)) for a in _summed(ctx, i)])
        if elsewhere is not None:
            values = torch.where(_of_result(ctx, elsewhere), torch.zeros_like(values), values)
        return fn(x, at, values, True)
    if elsewhere is None:
        return fn(x, indices, values, False)
    rows = x.shape[split]
    index = at[split]
    assert index is not None
    at[split] = torch.where(elsewhere, rows, index)
    return fn(_with_spare_row(x, split), at, values, False).narrow(split, 0, rows)
