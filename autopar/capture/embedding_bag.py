"""While capturing, an embedding bag becomes a lookup and a sum (mean, maximum), which have rules: rows, features and bags may all be split.

    bags of one size [B, K]      rows = weight[ids] [B, K, E], reduced over K
    bags of any size, offsets    rows [N, E], added where they belong; the bag of a position is the last that starts at it or before

The largest of bags of any size stays torch's operator; so does what scales gradients by how often a row is read, of which torch's CPU kernel has a notion of
its own (2.13: the count of another row).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

SUM, MEAN, MAX = 0, 1, 2
MODES = {"sum": SUM, "mean": MEAN, "max": MAX}
_torchs = F.embedding_bag


@contextlib.contextmanager
def equal_bags() -> Iterator[None]:
    """What is called is torch.nn.functional's function: the operator below it no longer knows that bags are of one size."""
    with mock.patch.object(F, "embedding_bag", _embedding_bag):
        yield


def _embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    equal = input.dim() == 2 and weight.dim() == 2 and offsets is None and not input.is_nested and input.shape[1] > 0
    plain = mode in MODES and max_norm is None and not scale_grad_by_freq and not (sparse and mode == "max")
    weighted = per_sample_weights is not None and (mode != "sum" or per_sample_weights.shape != input.shape)
    if not equal or not plain or weighted:
        return _torchs(
            input,
            weight,
            offsets,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            per_sample_weights,
            include_last_offset,
            padding_idx,
        )
    rows, keep = _rows(weight, input, sparse, per_sample_weights, padding_idx)
    if mode == "max":
        if keep is None:
            return rows.max(1).values
        found = rows.masked_fill(~keep.unsqueeze(-1), float("-inf")).max(1).values
        return torch.where(keep.any(1, keepdim=True), found, 0.0)
    total = (rows if keep is None else rows.masked_fill(~keep.unsqueeze(-1), 0.0)).sum(1)
    if mode == "sum":
        return total
    return total / (input.shape[1] if keep is None else keep.sum(1, keepdim=True).clamp(min=1))


def _rows(weight: Tensor, ids: Tensor, sparse: bool, weights: Tensor | None, padding: int | None) -> tuple[Tensor, Tensor | None]:
    """What is looked up, times its weight, and which of it counts (None: all)."""
    rows = F.embedding(ids, weight, padding, sparse=sparse)
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    return rows, None if padding is None else ids != (padding + weight.shape[0] if padding < 0 else padding)


def _any_bags(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = SUM, sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The operator: (result, each position's bag, sizes of bags, and where a maximum comes from, which only its own backward reads)."""
    if mode == MAX or scale_grad_by_freq or not indices.shape[0]:
        padding = -1 if padding_idx is None else padding_idx
        found: tuple[Tensor, ...] = torch.ops.aten._embedding_bag(
            weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding
        )
        return found
    starts = offsets[:-1] if include_last_offset else offsets
    position = torch.arange(indices.shape[0], dtype=offsets.dtype, device=offsets.device)
    bag = torch.searchsorted(starts, position, right=True) - 1
    rows, keep = _rows(weight, indices, sparse, per_sample_weights, padding_idx)
    if keep is not None:
        rows = rows.masked_fill(~keep.unsqueeze(-1), 0.0)
    out = rows.new_zeros((starts.shape[0], rows.shape[1])).index_add(0, bag, rows)
    sizes = torch.zeros_like(starts).index_add(0, bag, torch.ones_like(position) if keep is None else keep.to(starts.dtype))
    if mode == MEAN:
        out = out / sizes.clamp(min=1).unsqueeze(-1)
    return out, bag, sizes, torch.zeros_like(starts)


REPLACED = {torch.ops.aten.embedding_bag.padding_idx: _any_bags, torch.ops.aten.embedding_bag.default: _any_bags}
