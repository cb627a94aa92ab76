"""What K experts made of every token, added up: rows that lie sorted by expert are read where they are, weighted and summed in float32, in one pass.

    out[t] = sum_k s[t, k] y[place[t, k]]                       without scores: s = 1

The torch form puts rows in order first, writes them weighted, and sums them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.triton.launching import launch

BLOCK, WARPS = 1024, 4


@triton.jit(do_not_specialize=["chosen"])
def _combine(Y, PLACE, SCORES, OUT, features, chosen, BLOCK: tl.constexpr):
    """BLOCK features of a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < features
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, chosen):
        at = token * chosen + k
        row = tl.load(Y + tl.load(PLACE + at).to(tl.int64) * features + column, mask=inside, other=0.0).to(tl.float32)
        if SCORES is not None:
            row *= tl.load(SCORES + at).to(tl.float32)
        total += row
    tl.store(OUT + token * features + column, total.to(OUT.dtype.element_ty), mask=inside)


def combine(y: Tensor, place: Tensor, scores: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y [T K, D] contiguous, place [T, K] (which row of y), scores [T, K] or None -> [T, D] of `dtype`."""
    (tokens, chosen), features = place.shape, y.shape[1]
    assert y.is_contiguous() and place.is_contiguous()
    out = y.new_empty(tokens, features, dtype=dtype)
    if out.numel():
        operands = y, place, None if scores is None else scores.contiguous(), out, features, chosen
        launch(_combine, (tokens, triton.cdiv(features, BLOCK)), y, *operands, BLOCK=BLOCK, num_warps=WARPS)
    return out
