"""Values that follow from the global index, on the rank's own indices."""

from __future__ import annotations

from typing import Any

import torch

from autopar.passes.local import local, one_tensor, operator
from autopar.passes.local.context import Local
from autopar.rules.factory import MADE_WHOLE


def _dtype(ctx: Local) -> torch.dtype:
    dtype = getattr(torch, ctx.op.out.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _is_split(ctx: Local) -> bool:
    p = ctx.outputs[0]
    assert p is not None
    return bool(p.splits)


def _indices(ctx: Local, dim: int, kwargs: dict[str, Any]) -> torch.Tensor:
    """Global indices along `dim` of the output, on the device the op asks for."""
    p = ctx.outputs[0]
    assert p is not None
    return ctx.index(p, dim).to(device=kwargs.get("device"))


@local("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def _arange(ctx: Local, *args: Any, **kwargs: Any) -> torch.Tensor:
    if not _is_split(ctx):
        return one_tensor(operator(ctx.op.target)(*args, **kwargs))
    start = 0 if ctx.op.target.endswith("default") else args[0]
    step = ctx.op.arg(2, "step", 1) if ctx.op.target.endswith("step") else 1
    integers = isinstance(start, int) and isinstance(step, int)
    index = _indices(ctx, 0, kwargs)
    values = index if integers else index.to(torch.float64)
    return (values * step + start).to(_dtype(ctx))


@local("aten.linspace.default")
def _linspace(ctx: Local, start: float, end: float, steps: int, **kwargs: Any) -> torch.Tensor:
    """The upper half counts back from the end, as torch does: rounding is then the same."""
    if not _is_split(ctx):
        return one_tensor(operator(ctx.op.target)(start, end, steps, **kwargs))
    index = _indices(ctx, 0, kwargs).to(torch.float64)
    step = (end - start) / (steps - 1)
    values = torch.where(index < steps // 2, start + step * index, end - step * (steps - 1 - index))
    return values.to(_dtype(ctx))


@local("aten.eye.default", "aten.eye.m")
def _eye(ctx: Local, *args: Any, **kwargs: Any) -> torch.Tensor:
    if not _is_split(ctx):
        return one_tensor(operator(ctx.op.target)(*args, **kwargs))
    return (_indices(ctx, 0, kwargs).unsqueeze(1) == _indices(ctx, 1, kwargs)).to(_dtype(ctx))


@local(*MADE_WHOLE)
def _cut(ctx: Local, *args: Any, **kwargs: Any) -> torch.Tensor:
    whole = one_tensor(operator(ctx.op.target)(*args, **kwargs))
    return whole.index_select(-1, _indices(ctx, whole.dim() - 1, kwargs)) if _is_split(ctx) else whole


@local("aten.tril.default", "aten.triu.default")
def _triangle(ctx: Local, x: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
    p = ctx.outputs[0]
    assert p is not None
    n = x.dim()
    if not any(s.dim >= n - 2 for s in p.splits):
        return one_tensor(operator(ctx.op.target)(x, diagonal))
    offset = (ctx.index(p, n - 1) - ctx.index(p, n - 2).unsqueeze(1)).to(x.device)
    dropped = offset > diagonal if ctx.op.target == "aten.tril.default" else offset < diagonal
    return x.masked_fill(dropped, 0)


@local("aten.new_empty_strided.default", "aten.empty_strided.default")
def _empty_strided(ctx: Local, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Dense, with the dims in the order of the strides asked for."""
    at = 1 if ctx.op.target.startswith("aten.new") else 0
    size, asked = ctx.local_shape(), args[at + 1]
    strides, step = [0] * len(size), 1
    for dim in sorted(range(len(size)), key=lambda i: (asked[i], -i)):
        strides[dim] = step
        step *= size[dim]
    return one_tensor(operator(ctx.op.target)(*args[:at], list(size), strides, **kwargs))
