"""Causal attention whose queries are split needs to know which queries it has; where keys are split beside them, they go round (`autopar.kernels.ring`)."""

from __future__ import annotations

from typing import Any

import torch

from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.kernels import ring as _ring_operators  # noqa: F401  (registers them)
from autopar.passes.local import local, operator
from autopar.passes.local.context import Local, rank_by_rank

RING, RING_BACKWARD = "autopar.ring_attention_v1.default", "autopar.ring_attention_backward_v1.default"


def runs_of(keys: Placement, axes: tuple[str, ...], mesh: Mesh) -> tuple[list[int], int]:
    """Of the keys that each rank of the group over `axes` has, in the order of its ranks: the global index of the first of every run of neighbours, and how long a run is."""
    digits = keys.digits(2, mesh)
    run = digits.pop()[0] if digits and digits[-1][1] is None else 1
    return rank_by_rank(digits, keys.shape[2], axes, mesh), run


def _ring(ctx: Local, keys: Placement, q_index: torch.Tensor | None) -> tuple[Any, ...]:
    """What the ring's operators are told besides their operands: q_index, place, starts, run, group, ranks."""
    axes = tuple(a for a in ctx.axes("s") if ctx.mesh.axis_size(a) > 1)
    place = torch.zeros((), dtype=torch.int64)
    for a in axes:
        place = place * ctx.mesh.axis_size(a) + ctx.coordinate(a)
    return q_index, place, *runs_of(keys, axes, ctx.mesh), ctx.group(axes), ctx.mesh.sizes_product(axes)


@local("autopar.attention_v2.default")
def _attention(
    ctx: Local, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, is_causal: bool, scale: float, q_index: Any
) -> Any:
    if is_causal and q_index is None and ctx.is_split("q", "s"):
        q_index = ctx.index(ctx.inputs[0], 2)
    if ctx.is_split("s"):
        assert bias is None, f"{ctx.op.name}: keys do not go round where there is a mask"
        return operator(RING)(q, k, v, is_causal, scale, *_ring(ctx, ctx.inputs[1], q_index))
    return operator(ctx.op.target)(q, k, v, bias, is_causal, scale, q_index)


@local("autopar.attention_backward_v3.default")
def _attention_backward(
    ctx: Local, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    bias: Any, is_causal: bool, scale: float, q_index: Any, bias_grad: bool,
) -> Any:  # fmt: skip
    if is_causal and q_index is None and ctx.is_split("q", "s"):
        q_index = ctx.index(ctx.inputs[1], 2)
    if ctx.is_split("s"):
        found = operator(RING_BACKWARD)(grad, q, k, v, out, lse, is_causal, scale, *_ring(ctx, ctx.inputs[2], q_index))
        return *found, grad.new_empty((0,))
    return operator(ctx.op.target)(grad, q, k, v, out, lse, bias, is_causal, scale, q_index, bias_grad)
