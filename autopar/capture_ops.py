"""While capturing, scaled_dot_product_attention becomes one op of ours, on any device and with any mask."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from autopar import _torch
from autopar.kernels.attention import attention


@contextlib.contextmanager
def captured_ops() -> Iterator[None]:
    with _torch.replaced_attention(_sdpa):
        yield


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(q.dtype)
    if dropout_p > 0.0 or q.dim() not in (3, 4):
        # torch's own math: softmax, then dropout on [B, H, Q, S]. It would add a bool mask as zeros and ones.
        return torch.ops.aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    flat = q.dim() == 3
    if flat:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(1)
    batch = max(q.shape[0], k.shape[0], v.shape[0])
    q, k, v = (x if x.shape[0] == batch else x.expand(batch, *x.shape[1:]) for x in (q, k, v))
    if k.shape[1] != v.shape[1]:
        heads = max(k.shape[1], v.shape[1])
        k, v = (x if x.shape[1] == heads else x.expand(-1, heads, -1, -1) for x in (k, v))
    bias = attn_mask
    if bias is not None:
        while bias.dim() < 4:
            bias = bias.unsqueeze(0)
        if bias.shape[-1] != k.shape[2]:
            bias = bias.expand(*bias.shape[:-1], k.shape[2])
    out = attention(q, k, v, bias, is_causal, q.shape[-1] ** -0.5 if scale is None else scale, None)[0]
    return out.squeeze(1) if flat else out
