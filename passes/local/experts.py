"""Routed experts on a rank: its tokens, its features of every expert, or its experts, to which rows come from the ranks that have the others.

Where features are split, results are sums, and one rank of them adds the second bias.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.graph.runs import rank_by_rank
from autopar.passes.local import local, operator
from autopar.passes.local.context import Local
from autopar.rules.experts import BACKWARD, FORWARD


def _exchanged(ctx: Local, at: int) -> tuple[str, int, list[int]]:
    """group, ranks and order; at: position of the first weight among the operands."""
    axes = tuple(a for a in ctx.axes(*ctx.rule.pairs) if ctx.mesh.axis_size(a) > 1)
    if not axes:
        return "", 1, []
    weights = ctx.inputs[at]
    order = rank_by_rank(weights.digits(0, ctx.mesh), weights.shape[0], axes, ctx.mesh)
    return ctx.group(axes), ctx.mesh.sizes_product(axes), [] if order == sorted(order) else order


def _once(ctx: Local, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Zeros but on the first of the ranks that split features."""
    if bias is None:
        return None
    for a in ctx.axes("f"):
        bias = bias * (ctx.coordinate(a) == 0).to(bias.dtype)
    return bias


@local(FORWARD)
def _experts(
    ctx: Local, x: torch.Tensor, index: torch.Tensor, scores: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, b1: Any, b2: Any,
    transposed: bool, interleaved: bool, gate: str, *_: Any,
) -> Any:  # fmt: skip
    return operator(FORWARD)(x, index, scores, w1, w2, b1, _once(ctx, b2), transposed, interleaved, gate, *_exchanged(ctx, 3))


@local(BACKWARD)
def _experts_backward(
    ctx: Local, grad: torch.Tensor, x: torch.Tensor, index: torch.Tensor, scores: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
    b1: Any, b2: Any, transposed: bool, interleaved: bool, gate: str, *_: Any,
) -> Any:  # fmt: skip
    found = operator(BACKWARD)(grad, x, index, scores, w1, w2, b1, _once(ctx, b2), transposed, interleaved, gate, *_exchanged(ctx, 4))
    return *found[:5], found[5] if b2 is None else _once(ctx, found[5])
