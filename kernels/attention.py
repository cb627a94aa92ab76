"""Attention as one op: softmax(scale q k^T + bias) v, with its log-sum-exp and a backward of its own.

`autopar::attention_v1` (q [B, Hq, Q, E], k [B, Hkv, S, E], v [B, Hkv, S, D], bias? [B|1, Hq|1, Q|1, S], is_causal, scale, q_index?)
-> (out [B, Hq, Q, D], lse [B, Hq, Q] in float32, float64 for doubles).

- Hq is a multiple of Hkv: query head h reads key/value head h // (Hq / Hkv).
- is_causal: query i sees keys 0 .. i. q_index [Q], int64: the global index of every query, where a rank has some of them only.
- A row that sees no key gives zeros, as torch's attention does.
- `attention_backward_v1` recomputes the probabilities from lse (Dao et al., FlashAttention, section 3.1) and also gives the
  gradient of the bias, summed to the bias's shape, where one is wanted.

On CPU torch's flash kernel does the work where it can, plain math where it cannot (a bias gradient, unequal head sizes). The bodies may
change: then so must the names, since compiled graphs are cached by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def _causal(q: Tensor, k: Tensor, q_index: Tensor | None) -> Tensor:
    """Bool [Q, S]: what a causal query may see."""
    rows = torch.arange(q.shape[2], device=q.device) if q_index is None else q_index
    return rows.unsqueeze(1) >= torch.arange(k.shape[2], device=q.device)


def _bias(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, q_index: Tensor | None) -> Tensor | None:
    """bias and causality as one additive mask in q's dtype; None if there is neither."""
    if bias is not None:
        bias = bias.to(q.dtype)
    if not is_causal:
        return bias
    hidden = torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(~_causal(q, k, q_index), float("-inf"))
    return hidden if bias is None else bias + hidden


def _group(x: Tensor, heads: int) -> Tensor:
    """Key/value heads repeated to `heads`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    s = (q @ _group(k, q.shape[1]).transpose(-1, -2)).to(acc) * scale
    return s if mask is None else s + mask.to(acc)


def _math(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    s = _scores(q, k, mask, scale)
    lse = s.logsumexp(-1)
    lse = lse.masked_fill(lse == float("-inf"), 0.0)
    p = (s - lse.unsqueeze(-1)).exp()
    return p.to(v.dtype) @ _group(v, q.shape[1]), lse


def _flash_fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and q.dtype == k.dtype == v.dtype and q.numel() > 0 and k.numel() > 0


@torch.library.custom_op("autopar::attention_v1", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float, q_index: Tensor | None
) -> tuple[Tensor, Tensor]:
    plain = bias is None and q_index is None
    if _flash_fits(q, k, v):
        mask = None if plain else _bias(q, k, bias, is_causal, q_index)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q.contiguous(), _group(k, q.shape[1]).contiguous(), _group(v, q.shape[1]).contiguous(), 0.0, is_causal and plain,
            attn_mask=mask, scale=scale,
        )  # fmt: skip
    elif q.device.type == "cuda" and plain and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] == v.shape[-1] <= 256:
        r = aten._scaled_dot_product_flash_attention(
            q.contiguous(), _group(k, q.shape[1]).contiguous(), _group(v, q.shape[1]).contiguous(), 0.0, is_causal, scale=scale
        )
        out, lse = r[0], r[1]
    else:
        out, lse = _math(q, k, v, _bias(q, k, bias, is_causal, q_index), scale)
    return out.contiguous(), lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32).contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float, q_index: Tensor | None) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=dtype)


@torch.library.custom_op("autopar::attention_backward_v1", mutates_args=())
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, is_causal: bool, scale: float,
    q_index: Tensor | None, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dbias); dbias is an empty tensor unless `bias_grad`."""
    heads, groups = q.shape[1], k.shape[1]
    kk, vv = _group(k, heads).contiguous(), _group(v, heads).contiguous()
    plain = bias is None and q_index is None
    none = grad.new_empty((0,))
    if _flash_fits(q, k, v) and not bias_grad:
        mask = None if plain else _bias(q, k, bias, is_causal, q_index)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.contiguous(), q.contiguous(), kk, vv, out, lse, 0.0, is_causal and plain, attn_mask=mask, scale=scale
        )
        dbias = none
    else:
        s = _scores(q, k, _bias(q, k, bias, is_causal, q_index), scale)
        p = (s - lse.unsqueeze(-1)).exp()
        acc = s.dtype
        dv = p.transpose(-1, -2) @ grad.to(acc)
        dp = grad.to(acc) @ vv.to(acc).transpose(-1, -2)
        ds = p * (dp - (grad.to(acc) * out.to(acc)).sum(-1, keepdim=True))
        dq, dk = ds @ kk.to(acc) * scale, ds.transpose(-1, -2) @ q.to(acc) * scale
        dbias = none
        if bias_grad:
            assert bias is not None
            dims = [i for i in range(4) if bias.shape[i] == 1 and ds.shape[i] != 1]
            dbias = (ds.sum(dims, keepdim=True) if dims else ds).to(bias.dtype)
    if groups != heads:
        dk = dk.unflatten(1, (groups, heads // groups)).sum(2)
        dv = dv.unflatten(1, (groups, heads // groups)).sum(2)
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous(), dbias.contiguous()


@attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, is_causal: bool, scale: float,
    q_index: Tensor | None, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dbias = bias.new_empty(bias.shape) if bias_grad and bias is not None else grad.new_empty((0,))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


def _setup(ctx: object, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, is_causal, scale, q_index = inputs
    ctx.save_for_backward(q, k, v, output[0], output[1], bias, q_index)  # type: ignore[attr-defined]
    ctx.rest = (is_causal, scale)  # type: ignore[attr-defined]
    ctx.bias_grad = isinstance(bias, Tensor) and bias.requires_grad  # type: ignore[attr-defined]


def _backward(ctx: object, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, bias, q_index = ctx.saved_tensors  # type: ignore[attr-defined]
    is_causal, scale = ctx.rest  # type: ignore[attr-defined]
    dq, dk, dv, dbias = attention_backward(grad, q, k, v, out, lse, bias, is_causal, scale, q_index, ctx.bias_grad)  # type: ignore[attr-defined]
    return dq, dk, dv, dbias if ctx.bias_grad else None, None, None, None  # type: ignore[attr-defined]


attention.register_autograd(_backward, setup_context=_setup)
