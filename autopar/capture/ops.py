"""While capturing, scaled_dot_product_attention becomes one op of ours, on any device and with any mask.

Brought to that op's form: bool masks (False is -inf), masks of fewer dims, three dims for four, batches and heads that broadcast. The
rest is traced as torch's own formulas in torch's own order: dropout (so that its random numbers are those of [B, H, Q, S]), tensors of
other ranks, and calls that torch refuses, whose error is then torch's. (Embedding bags, CTC and flex_attention: `capture_bags`, `capture_ctc`, `capture_flex`.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from autopar import _torch
from autopar.capture import ctc as capture_ctc
from autopar.capture import embedding_bag as capture_bags
from autopar.capture import flex as capture_flex
from autopar.kernels.attention import attention


@contextlib.contextmanager
def captured_ops() -> Iterator[None]:
    ours: dict[Any, Callable[..., Any]] = {
        torch.ops.aten.scaled_dot_product_attention.default: _sdpa,
        torch.ops.aten.dropout.default: _dropout,
        **capture_bags.REPLACED,
        **capture_ctc.REPLACED,
    }
    with _torch.replaced_composites(ours), capture_bags.equal_bags(), _torch.other_code(*capture_flex.CODE):
        yield


_copies: ContextVar[bool] = ContextVar("copies", default=False)


@contextlib.contextmanager
def copied_operands() -> Iterator[None]:
    """Attention takes copies of its operands: of a program that writes them afterwards. torch's formulas allow that, which save products of them; ours save them."""
    before = _copies.set(True)
    try:
        yield
    finally:
        _copies.reset(before)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Where nothing is dropped it gives `x` itself, and what is written to one is written to the other. torch's decomposition gives a copy (2.13)."""
    if not train or p == 0 or x.numel() == 0:
        return x
    dropped: Tensor = torch.ops.aten.native_dropout.default(x, p, True)[0]
    return dropped


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # torch's formulas below would add it as zeros and ones
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(q.dtype)
    if dropout_p > 0.0 or not _is_ours(q, k, v, attn_mask, enable_gqa):
        by_formulas: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return by_formulas
    flat = q.dim() == 3
    if flat:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(1)
    if _copies.get():
        q, k, v, attn_mask = q.clone(), k.clone(), v.clone(), None if attn_mask is None else attn_mask.clone()
    batch, heads, groups = _leading(q, k, v)
    q, k, v = _expand(q, batch, heads), _expand(k, batch, groups), _expand(v, batch, groups)
    bias = attn_mask
    if bias is not None:
        while bias.dim() < 4:
            bias = bias.unsqueeze(0)
        if bias.shape[-1] != k.shape[2]:
            bias = bias.expand(*bias.shape[:-1], k.shape[2])
    out: Tensor = attention(q, k, v, bias, is_causal, q.shape[-1] ** -0.5 if scale is None else scale, None)[0]
    return out.squeeze(1) if flat else out


def _expand(x: Tensor, batch: int, heads: int) -> Tensor:
    return x if x.shape[:2] == (batch, heads) else x.expand(batch, heads, -1, -1)


def _leading(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int]:
    """Batch, query heads and key/value heads, once all is broadcast."""
    groups = max(k.shape[1], v.shape[1])
    return max(x.shape[0] for x in (q, k, v)), max(q.shape[1], groups), groups


def _is_ours(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, enable_gqa: bool) -> bool:
    """Dims agree or broadcast; heads are grouped only where that was asked for."""
    if q.dim() not in (3, 4) or not q.dim() == k.dim() == v.dim() or not q.dtype == k.dtype == v.dtype:
        return False
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        return False
    if q.dim() == 3:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
    batch, heads, groups = _leading(q, k, v)
    if any(x.shape[0] not in (1, batch) for x in (q, k, v)) or any(x.shape[1] not in (1, groups) for x in (k, v)):
        return False
    grouped = groups in (1, heads) or (enable_gqa and heads % groups == 0)
    if q.shape[1] not in (1, heads) or not grouped or (enable_gqa and q.shape[1] != heads):
        return False
    whole = (batch, heads, q.shape[2], k.shape[2])
    return mask is None or (2 <= mask.dim() <= 4 and all(n in (1, m) for n, m in zip(mask.shape, whole[4 - mask.dim() :], strict=True)))
