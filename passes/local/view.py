"""Views on shards: shapes, bounds and shifts in local elements.

In a dim `(p g)` of which g is split, the local dim is p blocks of g_local, so a run that starts at a multiple of g
starts at the same multiple of g_local: positions scale by local size / global size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.graph.placement import Placement
from autopar.passes.local import local, one_tensor, operator
from autopar.passes.local.context import Local
from autopar.rules.view import bounds, contiguous_strides


@local(
    "aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten._reshape_alias.default",
    "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims",
)  # fmt: skip
def _reshape(ctx: Local, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """A squeeze too: a dim that is split to one element is not to be dropped."""
    return torch.reshape(x, ctx.local_shape())


@local("aten.repeat.default")
def _repeat(ctx: Local, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    out = ctx.local_shape()
    shape = (1,) * (len(out) - x.dim()) + tuple(x.shape)
    return x.repeat([m // n if n else 1 for m, n in zip(out, shape, strict=True)])


def _scaled(placement: Placement, ctx: Local, dim: int, position: int) -> int:
    """A multiple of the block of `dim`, in local elements."""
    whole = placement.shape[dim]
    return position * placement.local_shape(ctx.mesh)[dim] // whole if whole else 0


def _out(ctx: Local) -> Placement:
    placement = ctx.outputs[0]
    assert placement is not None
    return placement


def _local_slice(ctx: Local, whole: Placement, at: int, part: int) -> tuple[int, int, int, int]:
    """dim, start, end and step of a slice on the local whole; `part` is the local size of the slice."""
    dim = ctx.op.arg(at, "dim", 0) % len(whole.shape)
    start, step = bounds(ctx.op, whole.shape[dim], at)
    if step == 1:
        start = _scaled(whole, ctx, dim, start)
    # With a step the dim is whole, or split by periods: then the start lies within the first one.
    return dim, start, start + (part - 1) * step + 1 if part else start, step


@local("aten.slice.Tensor")
def _slice(ctx: Local, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    whole = ctx.inputs[0]
    dim = ctx.op.arg(1, "dim", 0) % len(whole.shape)
    return one_tensor(torch.ops.aten.slice.Tensor(x, *_local_slice(ctx, whole, 1, ctx.local_shape()[dim])))


@local("aten.slice_backward.default")
def _slice_backward(ctx: Local, grad: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    dim = ctx.op.arg(2, "dim") % len(_out(ctx).shape)
    return one_tensor(torch.ops.aten.slice_backward(grad, list(ctx.local_shape()), *_local_slice(ctx, _out(ctx), 2, grad.shape[dim])))


@local("aten.slice_scatter.default")
def _slice_scatter(ctx: Local, x: torch.Tensor, src: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    dim = ctx.op.arg(2, "dim", 0) % x.dim()
    return one_tensor(torch.ops.aten.slice_scatter(x, src, *_local_slice(ctx, _out(ctx), 2, src.shape[dim])))


@local("aten.split.Tensor", "aten.split_with_sizes.default", "aten.split_with_sizes_copy.default")
def _split(ctx: Local, x: torch.Tensor, *_: Any, **__: Any) -> Sequence[torch.Tensor]:
    dim = ctx.op.arg(2, "dim", 0) % x.dim()
    sizes = [ctx.local_shape(i)[dim] for i in range(len(ctx.outputs))]
    fn = torch.ops.aten.split_with_sizes_copy if "copy" in ctx.op.target else torch.ops.aten.split_with_sizes
    parts: Sequence[torch.Tensor] = fn(x, sizes, dim)
    return parts


@local("aten.constant_pad_nd.default")
def _pad(ctx: Local, x: torch.Tensor, pad: Sequence[int], value: float = 0) -> torch.Tensor:
    """Where the dim is empty the pad is all there is, and not split."""
    whole = ctx.inputs[0]
    sizes = []
    for i, n in enumerate(pad):
        dim = x.dim() - 1 - i // 2
        sizes.append(_scaled(whole, ctx, dim, n) if whole.shape[dim] else n)
    return one_tensor(torch.ops.aten.constant_pad_nd(x, sizes, value))


@local("aten.roll.default")
def _roll(ctx: Local, x: torch.Tensor, shifts: Any, dims: Any = ()) -> torch.Tensor:
    if not dims:
        return one_tensor(torch.ops.aten.roll(x, shifts, dims))
    shifts = shifts if isinstance(shifts, (list, tuple)) else [shifts]
    return one_tensor(
        torch.ops.aten.roll(x, [_scaled(ctx.inputs[0], ctx, d % x.dim(), s) for d, s in zip(dims, shifts, strict=True)], dims)
    )


def place(ctx: Local, placement: Placement, dim: int, index: int) -> tuple[torch.Tensor | None, int]:
    """Whether this rank has element `index` of a dim (None: every rank does), and where."""
    elsewhere: torch.Tensor | None = None
    at, stride = 0, placement.shape[dim]
    for size, axis in placement.digits(dim, ctx.mesh):
        stride //= size
        digit = index // stride % size
        if axis is None:
            at = at * size + digit
        else:
            miss = ctx.coordinate(axis) != digit
            elsewhere = miss if elsewhere is None else elsewhere | miss
    return elsewhere, at


@local("aten.select.int")
def _select(ctx: Local, x: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """Zero where the element is another rank's: the ranks' outputs add up to it."""
    whole = ctx.inputs[0]
    elsewhere, at = place(ctx, whole, dim % x.dim(), index % whole.shape[dim])
    out = one_tensor(torch.ops.aten.select.int(x, dim, at))
    return out if elsewhere is None else out.masked_fill(elsewhere, 0)


@local("aten.select_backward.default")
def _select_backward(ctx: Local, grad: torch.Tensor, _: Any, dim: int, index: int) -> torch.Tensor:
    elsewhere, at = place(ctx, _out(ctx), dim % len(_out(ctx).shape), index % _out(ctx).shape[dim])
    grad = grad if elsewhere is None else grad.masked_fill(elsewhere, 0)
    return one_tensor(torch.ops.aten.select_backward(grad, list(ctx.local_shape()), dim, at))


@local("aten.select_scatter.default")
def _select_scatter(ctx: Local, x: torch.Tensor, src: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    whole = ctx.inputs[0]
    elsewhere, at = place(ctx, whole, dim % x.dim(), index % whole.shape[dim])
    if elsewhere is not None:
        src = torch.where(elsewhere, torch.ops.aten.select.int(x, dim, at), src)
    return one_tensor(torch.ops.aten.select_scatter(x, src, dim, at))


@local("aten.as_strided.default", "aten.as_strided_scatter.default")
def _as_strided(ctx: Local, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The leading dims that are split keep their contiguous strides, in local elements."""
    scatter = ctx.op.target == "aten.as_strided_scatter.default"
    at = 2 if scatter else 1
    whole, size, stride = ctx.inputs[0], ctx.op.args[at], list(ctx.op.args[at + 1])
    shape = whole.local_shape(ctx.mesh)
    if shape != whole.shape:
        changed = max(i for i, (n, m) in enumerate(zip(shape, whole.shape, strict=True)) if n != m)
        stride[: changed + 1] = contiguous_strides(shape)[: changed + 1]
        size = [*shape[: changed + 1], *size[changed + 1 :]]
    rest = (size, stride, ctx.op.arg(at + 2, "storage_offset"))
    x = x.contiguous()
    x = x.clone() if x.storage_offset() else x  # offsets count from the start of its memory
    return one_tensor(operator(ctx.op.target)(x, *((args[0], *rest) if scatter else rest)))
