"""Causal attention whose queries are split needs to know which queries it has."""

from __future__ import annotations

from typing import Any

import torch

from autopar.passes.local import local, operator
from autopar.passes.local.context import Local


@local("autopar.attention_v2.default")
def _attention(
    ctx: Local, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, is_causal: bool, scale: float, q_index: Any
) -> Any:
    if is_causal and q_index is None and ctx.is_split("q"):
        q_index = ctx.index(ctx.inputs[0], 2)
    return operator(ctx.op.target)(q, k, v, bias, is_causal, scale, q_index)


@local("autopar.attention_backward_v3.default")
def _attention_backward(
    ctx: Local, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    bias: Any, is_causal: bool, scale: float, q_index: Any, bias_grad: bool,
) -> Any:  # fmt: skip
    if is_causal and q_index is None and ctx.is_split("q"):
        q_index = ctx.index(ctx.inputs[1], 2)
    return operator(ctx.op.target)(grad, q, k, v, out, lse, bias, is_causal, scale, q_index, bias_grad)
