"""A head without logits on a rank: its tokens, or its words, of whose scores the ranks then put together what a loss reads.

lse = m + log sum over ranks exp(lse_r - m), m the largest of lse_r; picked and total are sums over ranks: two all-reduces of a few numbers a token
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.passes.local import local, operator
from autopar.passes.local.context import Local
from autopar.passes.local.index import locate
from autopar.rules.loss_head import BACKWARD, FORWARD


def _mine(ctx: Local, at: int, target: torch.Tensor) -> torch.Tensor:
    """Targets as rows of this rank's words, -1 where they are none. at: position of the weight among the operands."""
    words = ctx.inputs[at].shape[0]
    there, elsewhere = locate(ctx, ctx.inputs[at], 0, target)
    outside = (target < 0) | (target >= words)
    return torch.where(outside if elsewhere is None else outside | elsewhere, -1, there)


@local(FORWARD)
def _log_prob(ctx: Local, h: torch.Tensor, w: torch.Tensor, b: Any, target: torch.Tensor, with_total: bool, *rest: Any) -> Any:
    if not ctx.is_split("v"):
        return operator(FORWARD)(h, w, b, target, with_total, *rest)
    picked, total, lse = operator(FORWARD)(h, w, b, _mine(ctx, 1, target), with_total, *rest)
    axes = ctx.axes("v")
    largest = ctx.reduce(lse, axes, "max")
    parts = [(lse - largest).exp(), picked, *([total] if with_total else [])]
    normal, picked, *totals = ctx.reduce(torch.stack(parts), axes).unbind()
    return picked, totals[0] if totals else total, largest + normal.log()


@local(BACKWARD)
def _log_prob_backward(
    ctx: Local, picked: torch.Tensor, total: Any, normal: torch.Tensor, h: torch.Tensor, w: torch.Tensor, b: Any, target: torch.Tensor,
    lse: torch.Tensor, scale: float, cap: float, tile: int, wanted: Sequence[bool],
) -> Any:  # fmt: skip
    if ctx.is_split("v"):
        target = _mine(ctx, 3 if total is None else 4, target)
    return operator(BACKWARD)(picked, total, normal, h, w, b, target, lse, scale, cap, tile, wanted)
