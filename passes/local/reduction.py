"""Sums that are split: a mean's divisor is the global count, and what is added to a split sum is added once.

Softmax over a split dim, with m and s all-reduced (max, sum) over the axes that split it:

    m = max x,  s = sum exp(x - m),  softmax = exp(x - m) / s,  log_softmax = x - m - log s
    softmax backward      y (g - sum g y)
    log_softmax backward  g - exp(y) sum g
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autopar.passes.local import local, one_tensor, operator
from autopar.passes.local.context import Local


@local("aten.mean.dim", "aten.mean.default")
def _mean(ctx: Local, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The local mean, weighted by the share of the elements that are here: a sum could overflow in float16."""
    out = one_tensor(operator(ctx.op.target)(x, *args, **kwargs))
    letters = {a for dims in ctx.rule.outputs if dims is not None for d in dims for a in d}
    shares = math.prod(ctx.mesh.axis_size(a) for a, (letter, _) in ctx.strategy.items() if letter not in letters)
    return out if shares == 1 else out / shares


def once(ctx: Local, x: torch.Tensor, letters: Sequence[str]) -> torch.Tensor:
    """`x` on the first of the ranks that split `letters`, zero on the others: it counts once in their sum."""
    axes = ctx.axes(*letters)
    if not axes:
        return x
    position = ctx.coordinate(axes[0])
    for axis in axes[1:]:
        position = position + ctx.coordinate(axis)
    return x.masked_fill(position != 0, 0)


def missing(ctx: Local) -> tuple[str, ...]:
    """The letters that the output lacks, over which it is a sum."""
    dims = ctx.rule.outputs[0]
    assert dims is not None
    kept = {a for d in dims for a in d}
    return tuple(a for a in ctx.rule.factors if a not in kept)


@local("aten.addmm.default", "aten.baddbmm.default", "aten.addmv.default", "aten.addbmm.default")
def _added(ctx: Local, bias: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return one_tensor(operator(ctx.op.target)(once(ctx, bias, missing(ctx)), *args, **kwargs))


@local("aten.linear.default")
def _linear(ctx: Local, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if bias is not None:
        bias = once(ctx, bias, missing(ctx))
    return one_tensor(torch.ops.aten.linear(x, weight, bias))


def _axes_of(ctx: Local, dim: int) -> tuple[str, ...]:
    p = ctx.outputs[0]
    assert p is not None
    return ctx.mesh.sort(tuple(s.axis for s in p.splits if s.dim == dim % len(p.shape))) if p.shape else ()


def _wide(x: torch.Tensor) -> torch.Tensor:
    """torch's kernels compute in float32 inside."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@local("aten._softmax.default", "aten._log_softmax.default", "aten._safe_softmax.default")
def _softmax(ctx: Local, x: torch.Tensor, dim: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    axes = _axes_of(ctx, dim)
    if not axes:
        return one_tensor(operator(ctx.op.target)(x, dim, *args, **kwargs))
    x = _wide(x)
    largest = ctx.reduce(x.amax(dim, keepdim=True), axes, "max")
    # A row of -inf alone: not a number in softmax, zeros in the safe one.
    safe = ctx.op.target == "aten._safe_softmax.default"
    x = x - (largest.masked_fill(largest == -math.inf, 0) if safe else largest)
    e = x.exp()
    total = ctx.reduce(e.sum(dim, keepdim=True), axes)
    if safe:
        total = total.masked_fill(total == 0, 1)
    out = x - total.log() if ctx.op.target == "aten._log_softmax.default" else e / total
    return out.to(getattr(torch, ctx.op.out.dtype))


@local("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default")
def _softmax_backward(ctx: Local, grad: torch.Tensor, y: torch.Tensor, dim: int, input_dtype: torch.dtype) -> torch.Tensor:
    axes = _axes_of(ctx, dim)
    if not axes:
        return one_tensor(operator(ctx.op.target)(grad, y, dim, input_dtype))
    grad, y = _wide(grad), _wide(y)
    log = ctx.op.target == "aten._log_softmax_backward_data.default"
    total = ctx.reduce((grad if log else grad * y).sum(dim, keepdim=True), axes)
    out = grad - y.exp() * total if log else y * (grad - total)
    return out.to(getattr(torch, ctx.op.out.dtype))
