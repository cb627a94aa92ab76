"""Attention over two sets of keys from that over each (`autopar.kernels.attention.merged`), in one pass: reads each once, writes the result once, where it is to lie.

    lse = log(e^a + e^b),  out = out_a e^(a - lse) + out_b e^(b - lse)           (Dao et al., FlashAttention-2, section 2.3.1)

The torch form makes out_a e^(a - lse), out_b e^(b - lse), their sum, and a copy of it into a slice.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.triton.launching import launch

TILE, WARPS = 2048, 4  # numbers a program


@triton.jit(do_not_specialize=["rows", "queries"])
def _merge(
    INTO, SUMS, A, LSE_A, B, LSE_B, rows, heads, queries, features,
    into_b, into_h, into_q, sums_b, sums_h, sums_q, a_b, a_h, a_q, la_b, la_h, la_q,
    b_b, b_h, b_q, lb_b, lb_h, lb_q, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows, heads innermost, as results lie in memory."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    h, q, b = (row % heads).to(tl.int64), (row // heads % queries).to(tl.int64), (row // heads // queries).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = inside[:, None] & (column < features)[None, :]
    la = tl.load(LSE_A + b * la_b + h * la_h + q * la_q, mask=inside, other=0.0)
    lb = tl.load(LSE_B + b * lb_b + h * lb_h + q * lb_q, mask=inside, other=0.0)
    x = tl.load(A + (b * a_b + h * a_h + q * a_q)[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32)
    y = tl.load(B + (b * b_b + h * b_h + q * b_q)[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32)
    top = tl.maximum(la, lb)
    empty = top == -float("inf")  # a row that sees no key
    base = tl.where(empty, 0.0, top)
    ea, eb = tl.exp(la - base), tl.exp(lb - base)
    total = tl.where(empty, 1.0, ea + eb)
    z = x * (ea / total)[:, None] + y * (eb / total)[:, None]
    tl.debug_barrier()  # a row's log-sum-exps are read by all threads that have a part of it, and may be written over
    tl.store(INTO + (b * into_b + h * into_h + q * into_q)[:, None] + column[None, :], z.to(INTO.dtype.element_ty), mask=there)
    tl.store(SUMS + b * sums_b + h * sums_h + q * sums_q, tl.where(empty, top, base + tl.log(total)), mask=inside)


def merge(into: Tensor, sums: Tensor, out: Tensor, lse: Tensor, other: Tensor, its: Tensor) -> None:
    """Writes the merged attention to into [B, H, Q, D] and its log-sum-exp to sums [B, H, Q], float32; `into` may be `out`, and `sums` `lse`. All lie anyhow, elements of a head together."""
    b, h, q, d = into.shape
    if into.numel() == 0:
        return
    block = triton.next_power_of_2(d)
    rows = max(1, TILE // block)
    assert all(x.stride(-1) == 1 or d == 1 for x in (into, out, other))
    strides = [s for x in (into, sums, out, lse, other, its) for s in x.stride()[:3]]
    grid = (triton.cdiv(b * h * q, rows),)
    launch(_merge, grid, into, into, sums, out, lse, other, its, b * h * q, h, q, d, *strides, ROWS=rows, BLOCK=block, num_warps=WARPS)
