"""Random ops draw from the counter (seed, step, op, global element index), on one rank as on many."""

from __future__ import annotations

from typing import Any

import torch

from autopar.kernels.random import SAMPLERS, Draw, dropout, sample
from autopar.passes.local import local
from autopar.passes.local.context import Local


def _draw(ctx: Local) -> Draw:
    placement = ctx.outputs[0]
    assert placement is not None
    return Draw(ctx.seed(), ctx.op_index, ctx.linear_index(placement), getattr(torch, ctx.op.out.dtype))


@local(*SAMPLERS)
def _sample(ctx: Local, *args: Any, **kwargs: Any) -> torch.Tensor:
    return sample(ctx.op.target, _draw(ctx), args, kwargs)


@local("aten.native_dropout.default")
def _dropout(ctx: Local, x: torch.Tensor, p: float, train: bool | None = True) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False:
        return x.clone(), torch.ones(x.shape, dtype=torch.bool)
    draw = _draw(ctx)
    return dropout(x, p, draw.seed, draw.op_index, draw.index)
