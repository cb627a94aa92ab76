"""Causal attention whose queries are split needs to know which queries it has; where keys are split beside them, they go round (`autopar.kernels.ring`)."""

from __future__ import annotations

from typing import Any

import torch

from autopar.graph.placement import Placement
from autopar.graph.runs import runs_of, visited
from autopar.kernels import ring as _ring_operators  # noqa: F401  (registers them)
from autopar.passes.local import local, operator
from autopar.passes.local.context import Local

RING, RING_BACKWARD = "autopar.ring_attention_v2.default", "autopar.ring_attention_backward_v2.default"


def _ring(ctx: Local, keys: Placement, before: int, after: int) -> tuple[Any, ...]:
    """What the ring's operators are told of where keys are: before, after, place, starts, run, hops, group, ranks."""
    axes = tuple(a for a in ctx.axes("s") if ctx.mesh.axis_size(a) > 1)
    place, ranks = torch.zeros((), dtype=torch.int64), ctx.mesh.sizes_product(axes)
    for a in axes:
        place = place * ctx.mesh.axis_size(a) + ctx.coordinate(a)
    starts, run = runs_of(keys, 2, axes, ctx.mesh)
    return before, after, place, starts, run, list(visited(tuple(starts), run, ranks, before, after)), ctx.group(axes), ranks


def _wants_index(ctx: Local, is_causal: bool, before: int, after: int) -> bool:
    """Whether what is computed goes by which queries are here."""
    return (is_causal and ctx.is_split("q", "s")) or ((before >= 0 or after >= 0) and ctx.is_split("s"))


@local("autopar.attention_v2.default")
def _attention(
    ctx: Local, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, is_causal: bool, scale: float, q_index: Any,
    before: int = -1, after: int = -1,
) -> Any:  # fmt: skip
    after = 0 if is_causal else after
    if _wants_index(ctx, is_causal, before, after) and q_index is None:
        q_index = ctx.index(ctx.inputs[0], 2)
    if ctx.is_split("s"):
        return operator(RING)(q, k, v, bias, is_causal, scale, q_index, *_ring(ctx, ctx.inputs[1], before, after))
    return operator(ctx.op.target)(q, k, v, bias, is_causal, scale, q_index)


@local("autopar.attention_backward_v3.default")
def _attention_backward(
    ctx: Local, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    bias: Any, is_causal: bool, scale: float, q_index: Any, bias_grad: bool, before: int = -1, after: int = -1,
) -> Any:  # fmt: skip
    after = 0 if is_causal else after
    if _wants_index(ctx, is_causal, before, after) and q_index is None:
        q_index = ctx.index(ctx.inputs[1], 2)
    if ctx.is_split("s"):
        where = _ring(ctx, ctx.inputs[2], before, after)
        return *operator(RING_BACKWARD)(grad, q, k, v, out, lse, bias, is_causal, scale, q_index, *where), grad.new_empty((0,))
    return operator(ctx.op.target)(grad, q, k, v, out, lse, bias, is_causal, scale, q_index, bias_grad)
