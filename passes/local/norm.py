"""Batch norm on shards: mean and variance of the whole batch, in two passes; group norm's sizes.

mu = sum x / N,  var = sum (x - mu)^2 / N,  running var from var N / (N - 1)       sums over all ranks
dx = gamma rstd (g - sum g / N - xhat sum(g xhat) / N)                             (Ioffe & Szegedy 2015, section 3)
"""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.passes.local import local, operator
from autopar.passes.local.context import Local


def _sum(ctx: Local, x: torch.Tensor) -> torch.Tensor:
    """Sum over all but the channel dim, over all ranks."""
    return ctx.reduce(x.sum([d for d in range(x.dim()) if d != 1]), _axes(ctx))


def _axes(ctx: Local) -> tuple[str, ...]:
    return ctx.axes(*(x for x in ctx.rule.factors if x != "c"))


def _count(ctx: Local) -> int:
    shape = ctx.inputs[0].shape
    return math.prod(n for d, n in enumerate(shape) if d != 1)


def _wide(v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A per-channel vector against [n, c, ...]."""
    return v.reshape([1, -1] + [1] * (x.dim() - 2))


@local("aten._native_batch_norm_legit_functional.default", "aten.native_batch_norm.default", "aten._native_batch_norm_legit.no_stats")
def _batch_norm(ctx: Local, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *rest: Any) -> Any:
    stats = rest[:2] if len(rest) == 5 else (None, None)
    training, momentum, eps = rest[-3:]
    if not training or not _axes(ctx):
        return operator(ctx.op.target)(x, weight, bias, *rest)
    mean_var, rstd, out = _normalise(ctx, x, weight, bias, eps)
    mean, var = mean_var
    results = [out, mean, rstd]
    n = _count(ctx)
    if ctx.op.target == "aten._native_batch_norm_legit_functional.default":
        running_mean, running_var = stats
        assert running_mean is not None and running_var is not None
        results.append(running_mean + momentum * (mean.to(running_mean.dtype) - running_mean))
        results.append(running_var + momentum * (var.to(running_var.dtype) * (n / max(n - 1, 1)) - running_var))
    return tuple(results)


def _normalise(ctx: Local, x: torch.Tensor, weight: Any, bias: Any, eps: float) -> tuple[Any, torch.Tensor, torch.Tensor]:
    n = _count(ctx)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = _sum(ctx, wide) / n
    centred = wide - _wide(mean, x)
    var = _sum(ctx, centred * centred) / n
    rstd = (var + eps).rsqrt()
    out = centred * _wide(rstd, x)
    if weight is not None:
        out = out * _wide(weight, x)
    if bias is not None:
        out = out + _wide(bias, x)
    return (mean, var), rstd, out.to(x.dtype)


@local("aten.native_batch_norm_backward.default")
def _batch_norm_backward(
    ctx: Local, grad: torch.Tensor, x: torch.Tensor, weight: Any, running_mean: Any, running_var: Any, mean: Any, rstd: Any,
    train: bool, eps: float, mask: list[bool],
) -> Any:  # fmt: skip
    if not _axes(ctx):
        return operator(ctx.op.target)(grad, x, weight, running_mean, running_var, mean, rstd, train, eps, mask)
    if not train:
        mean, rstd = running_mean, (running_var + eps).rsqrt()
    n = _count(ctx)
    g = grad.to(mean.dtype)
    hat = (x.to(mean.dtype) - _wide(mean, x)) * _wide(rstd, x)
    dbias, dweight = _sum(ctx, g), _sum(ctx, g * hat)
    dx = g - (_wide(dbias, x) + hat * _wide(dweight, x)) / n if train else g
    scale = rstd if weight is None else rstd * weight
    dx = (dx * _wide(scale, x)).to(x.dtype)
    found = (dx, dweight, dbias)
    return tuple(f if wanted else None for f, wanted in zip(found, mask, strict=True))


@local("aten.native_group_norm.default")
def _group_norm(ctx: Local, x: torch.Tensor, weight: Any, bias: Any, n: int, c: int, pixels: int, groups: int, eps: float) -> Any:
    n, groups = ctx.local_shape(1)
    return operator(ctx.op.target)(x, weight, bias, n, x.shape[1], pixels, groups, eps)


@local("aten.native_group_norm_backward.default")
def _group_norm_backward(
    ctx: Local, grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Any, n: int, c: int, pixels: int,
    groups: int, mask: list[bool],
) -> Any:  # fmt: skip
    n, groups = mean.shape
    return operator(ctx.op.target)(grad, x, mean, rstd, weight, n, x.shape[1], pixels, groups, mask)
