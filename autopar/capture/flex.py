"""While capturing, `torch.nn.attention.flex_attention.flex_attention` becomes the one attention operator, with a mask.

A mask function says of two positions whether one sees the other. torch runs it for each pair of them; here it is run once, on index tensors that broadcast, which is the same
for what it may be made of (comparisons, arithmetic, lookups in tensors). So the mask is a tensor like any other: it is split over batch and heads with the rest. Its size is
batch x queries x keys where documents differ by sample, queries x keys where they do not. A `score_mod` may do anything to the scores: with one, attention is
traced as its formula. Block masks are for speed alone: of one, only its mask function counts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention


def _as_attention(
    query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None, enable_gqa: bool = False,
    return_lse: bool = False, kernel_options: Any = None, *, return_aux: Any = None,
) -> Any:  # fmt: skip
    """Takes the place of torch's own, as code: it finds no names of this file."""
    from autopar.capture.flex import attention_of

    return attention_of(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse or return_aux is not None)


def _as_mask(
    mask_mod: Any, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, device: Any = None, BLOCK_SIZE: Any = None, _compile: bool = False, **rest: Any
) -> Any:
    """Takes the place of create_block_mask."""
    from autopar.capture.flex import Mask

    return Mask(mask_mod)


class Mask:
    """A mask function, without the blocks that it leaves empty."""

    def __init__(self, mask_mod: Any) -> None:
        self.mask_mod = mask_mod


def attention_of(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, scale: float | None, enable_gqa: bool, wants_lse: bool
) -> Tensor:
    if wants_lse:
        raise NotImplementedError(
            "flex_attention(return_lse=True) is not captured: write attention out in the model where its log-sum-exp is needed"
        )
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError(f"flex_attention: {q.shape[1]} heads of queries and {k.shape[1]} of keys want enable_gqa=True")
    b, h, i, j = _indices(q, k)
    mask = None if block_mask is None else block_mask.mask_mod(b, h, i, j)
    if mask is not None:
        while mask.dim() < 4:
            mask = mask.unsqueeze(0)
        mask = mask.expand(*mask.shape[:2], q.shape[2], k.shape[2])
    if score_mod is None:
        out: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
        return out
    if q.shape[1] != k.shape[1]:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q.float() @ k.float().transpose(-2, -1)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = score_mod(scores, b, h, i, j)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    formula: Tensor = (scores.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0) @ v.float()).to(q.dtype)
    return formula


def _indices(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of batch, heads, queries and keys, made to broadcast."""
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    at = [torch.arange(n, device=q.device).reshape([-1 if d == e else 1 for e in range(4)]) for d, n in enumerate(sizes)]
    return at[0], at[1], at[2], at[3]


CODE = ((flex_attention.flex_attention, _as_attention.__code__), (flex_attention.create_block_mask, _as_mask.__code__))
