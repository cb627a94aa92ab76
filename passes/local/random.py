"""Random ops draw from the counter (seed, step, op, global element index), on one rank as on many."""

from __future__ import annotations

from typing import Any

import torch

from autopar import random
from autopar.passes.local import local
from autopar.passes.local.context import Local


def _index(ctx: Local) -> torch.Tensor:
    p = ctx.outputs[0]
    assert p is not None
    return ctx.linear_index(p)


def _dtype(ctx: Local) -> torch.dtype:
    return getattr(torch, ctx.op.out.dtype)  # type: ignore[no-any-return]


@local("aten.native_dropout.default")
def _dropout(ctx: Local, x: torch.Tensor, p: float, train: bool | None = True) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False:
        return x.clone(), torch.ones(x.shape, dtype=torch.bool)
    return random.dropout(x, p, ctx.seed(), ctx.op_index, _index(ctx))


@local("aten.rand_like.default", "aten.rand.default")
def _rand(ctx: Local, *_: Any, **__: Any) -> torch.Tensor:
    return random.uniform(ctx.seed(), ctx.op_index, _index(ctx), _dtype(ctx))


@local("aten.randn_like.default", "aten.randn.default")
def _randn(ctx: Local, *_: Any, **__: Any) -> torch.Tensor:
    return random.normal(ctx.seed(), ctx.op_index, _index(ctx), _dtype(ctx))


@local("aten.uniform.default")
def _uniform(ctx: Local, x: torch.Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> torch.Tensor:
    return random.uniform(ctx.seed(), ctx.op_index, _index(ctx), _dtype(ctx)) * (high - low) + low


@local("aten.normal_functional.default")
def _normal(ctx: Local, x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> torch.Tensor:
    return random.normal(ctx.seed(), ctx.op_index, _index(ctx), _dtype(ctx)) * std + mean


@local("aten.exponential.default")
def _exponential(ctx: Local, x: torch.Tensor, rate: float = 1.0, **_: Any) -> torch.Tensor:
    return -torch.log1p(-random.uniform(ctx.seed(), ctx.op_index, _index(ctx), _dtype(ctx))) / rate


@local("aten.bernoulli.default")
def _bernoulli(ctx: Local, p: torch.Tensor, **_: Any) -> torch.Tensor:
    return (random.uniform(ctx.seed(), ctx.op_index, _index(ctx), torch.float32) < p).to(p.dtype)


@local("aten.bernoulli.p")
def _bernoulli_p(ctx: Local, x: torch.Tensor, p: float = 0.5, **_: Any) -> torch.Tensor:
    return (~random.keep_mask(ctx.seed(), ctx.op_index, _index(ctx), p)).to(x.dtype)


@local("aten.randint.default")
def _randint(ctx: Local, high: int, *_: Any, **__: Any) -> torch.Tensor:
    return random.randint(ctx.seed(), ctx.op_index, _index(ctx), 0, high).to(_dtype(ctx))


@local("aten.randint.low")
def _randint_low(ctx: Local, low: int, high: int, *_: Any, **__: Any) -> torch.Tensor:
    return random.randint(ctx.seed(), ctx.op_index, _index(ctx), low, high).to(_dtype(ctx))


@local("aten.randint_like.default")
def _randint_like(ctx: Local, x: torch.Tensor, high: int, **_: Any) -> torch.Tensor:
    return random.randint(ctx.seed(), ctx.op_index, _index(ctx), 0, high).to(_dtype(ctx))
