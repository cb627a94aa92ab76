"""Losses on shards: global counts, masked lookups of split classes, means over the global number of elements."""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.passes.local import local, one_tensor, operator
from autopar.passes.local.context import Local
from autopar.passes.local.index import locate

MEAN, SUM = 1, 2


def _picked(
    ctx: Local, at: int, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The class dim, the local class of every target, and its weight: zero if ignored or at home on another rank."""
    dim = 1 if x.dim() > 1 else 0
    counted = target != ignore_index
    cls, elsewhere = locate(ctx, ctx.inputs[at], dim, torch.where(counted, target, 0))
    w = torch.ones((), dtype=x.dtype).expand(cls.shape) if weight is None else weight[cls]
    here = counted if elsewhere is None else counted & ~elsewhere
    return dim, cls, torch.where(here, w, 0.0)


@local("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def _nll(
    ctx: Local, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if not ctx.strategy:
        loss, total_weight = operator(ctx.op.target)(x, target, weight, reduction, ignore_index)
        return loss, total_weight
    dim, cls, w = _picked(ctx, 0, x, target, weight, ignore_index)
    losses = -x.gather(dim, cls.unsqueeze(dim)).squeeze(dim) * w
    losses = torch.where(w == 0, 0.0, losses)  # -inf at an ignored or foreign class must not become nan
    everywhere = ctx.axes(*ctx.rule.factors)
    if reduction not in (MEAN, SUM):
        return ctx.reduce(losses, ctx.axes("c")), torch.zeros((), dtype=x.dtype)
    # One collective for both sums, in float32 at least: bfloat16 cannot count beyond 256.
    wide = torch.promote_types(x.dtype, torch.float32)
    total, count = ctx.reduce(torch.stack([losses.sum(dtype=wide), w.sum(dtype=wide)]), everywhere).unbind()
    return (total / count if reduction == MEAN else total).to(x.dtype), count.to(x.dtype, copy=True)


@local("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def _nll_backward(
    ctx: Local,
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    count: torch.Tensor,
) -> torch.Tensor:
    if not ctx.is_split("c"):
        return one_tensor(operator(ctx.op.target)(grad, x, target, weight, reduction, ignore_index, count))
    dim, cls, w = _picked(ctx, 1, x, target, weight, ignore_index)
    g = -grad * w
    if reduction == MEAN:
        g = torch.where(w == 0, 0.0, g / count)
    return torch.zeros_like(x).scatter(dim, cls.unsqueeze(dim), g.unsqueeze(dim))


def _shares(ctx: Local) -> int:
    """The global number of elements over the local one."""
    return math.prod(ctx.mesh.axis_size(a) for a in ctx.strategy)


@local(
    "aten.mse_loss.default", "aten.smooth_l1_loss.default", "aten.huber_loss.default", "aten.soft_margin_loss.default",
    "aten.binary_cross_entropy.default", "aten.binary_cross_entropy_with_logits.default",
)  # fmt: skip
def _elementwise(ctx: Local, *args: Any, **kwargs: Any) -> torch.Tensor:
    out = one_tensor(operator(ctx.op.target)(*args, **kwargs))
    return out / _shares(ctx) if _reduction(ctx, _AT[ctx.op.target]) == MEAN and ctx.strategy else out


_AT = {
    "aten.mse_loss.default": 2, "aten.smooth_l1_loss.default": 2, "aten.huber_loss.default": 2, "aten.soft_margin_loss.default": 2,
    "aten.binary_cross_entropy.default": 3, "aten.binary_cross_entropy_with_logits.default": 4,
    "aten.mse_loss_backward.default": 3, "aten.smooth_l1_loss_backward.default": 3, "aten.huber_loss_backward.default": 3,
    "aten.binary_cross_entropy_backward.default": 4, "aten.soft_margin_loss_backward.default": 3,
}  # fmt: skip


def _reduction(ctx: Local, at: int) -> int:
    return int(ctx.op.arg(at, "reduction", MEAN))


@local(
    "aten.mse_loss_backward.default",
    "aten.smooth_l1_loss_backward.default",
    "aten.huber_loss_backward.default",
    "aten.binary_cross_entropy_backward.default",
    "aten.soft_margin_loss_backward.default",
)
def _elementwise_backward(ctx: Local, *args: Any, **kwargs: Any) -> torch.Tensor:
    out = one_tensor(operator(ctx.op.target)(*args, **kwargs))
    return out / _shares(ctx) if _reduction(ctx, _AT[ctx.op.target]) == MEAN and ctx.strategy else out
