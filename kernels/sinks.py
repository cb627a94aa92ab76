"""Attention with sinks: beside its keys, a row's softmax has a learned score of its head that nothing is attended to by (gpt-oss; Xiao et al., StreamingLLM, 2024).

    p = exp(s - lse'),  lse' = log(exp(lse) + exp(sink)),  out' = p v = out exp(lse - lse')

Attention's backward takes `out` and `lse` as they are given, so that with these it is that of attention with sinks, and torch's fused kernels do the work:

    dv = p^T g,  ds = p (g v^T - delta),  delta = sum_d g out',  dsink = - sum over batch and queries of exp(sink - lse') delta

As formulas it is a product of queries x keys for each head, kept for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.kernels.attention import attention, attention_backward


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor, is_causal: bool, scale: float) -> Tensor:
        out, lse = attention(q, k, v, bias, is_causal, scale, None)
        both = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
        out = (out * (lse - both).exp().unsqueeze(-1)).to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, sinks, out, both)
        ctx.rest = (is_causal, scale)
        found: Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, sinks, out, both = ctx.saved_tensors
        is_causal, scale = ctx.rest
        bias_grad = ctx.needs_input_grad[3]
        dq, dk, dv, dbias = attention_backward(grad, q, k, v, out, both, bias, is_causal, scale, None, bias_grad)
        delta = (grad.to(both.dtype) * out.to(both.dtype)).sum(-1)
        dsinks = -((sinks.to(both.dtype)[None, :, None] - both).exp() * delta).sum((0, 2))
        return dq, dk, dv, dbias if bias_grad else None, dsinks.to(sinks.dtype), None, None


def attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor, is_causal: bool, scale: float) -> Tensor:
    """q [B, Hq, Q, E], k [B, Hkv, S, E], v [B, Hkv, S, D], bias [B|1, Hq|1, Q|1, S] or None, sinks [Hq] -> [B, Hq, Q, D]."""
    apply: Any = _Attention.apply
    out: Tensor = apply(q, k, v, bias, sinks, is_causal, scale)
    return out


# A composite: what is traced is what it is made of.
_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("attention_with_sinks_v1(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor sinks, bool is_causal, float scale) -> Tensor")
_LIBRARY.impl("attention_with_sinks_v1", attention_with_sinks, "CompositeImplicitAutograd")
with_sinks = torch.ops.autopar.attention_with_sinks_v1.default
