"""What the loss head (`autopar.kernels.loss_head`) does to a tile of scores: one pass that adds to the statistics of its rows, one that makes its gradient in place.

    z = cap tanh(s x / cap)                                     x: the products, as they were made; without a cap: s x
    picked[t] += z[t, y[t]],  total[t] += sum_v z[t, v]
    largest' = max(largest, max_v z),  rest' = rest exp(largest - largest') + sum_v exp(z - largest')        (Milakov and Gimelshein, Online normalizer calculation, 2018)
    x[t, v] <- s (1 - (z / cap)^2) (p[t] [v = y[t]] + q[t] + l[t] exp(z - lse[t]))

A target is at home in a tile where it is one of its columns, by comparison of numbers: of a tile that a rank's last words leave unfilled, what is behind them is neither summed nor a target, though the next
rank's words have these numbers. tanh is made of one exponential: 6e-8 of the cap off at most.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.triton.launching import launch

BLOCK, WARPS = 4096, 8


@triton.jit
def _score(x, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    x = x.to(tl.float32)
    if CAPPED:
        x = cap * (1.0 - 2.0 / (tl.exp(x * (2.0 * scale / cap)) + 1.0))
    elif SCALED:
        x = x * scale
    return x


@triton.jit(do_not_specialize=["first"])
def _statistics(
    X, TARGET, PICKED, TOTAL, LARGEST, REST, first, columns, stride, scale, cap,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row. first: the number of the tile's first column."""
    row = tl.program_id(0)
    at = X + row.to(tl.int64) * stride
    largest, rest = tl.load(LARGEST + row), tl.load(REST + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        z = _score(tl.load(at + column, mask=inside, other=0.0), scale, cap, SCALED, CAPPED)
        if TOTAL is not None:
            total += tl.where(inside, z, 0.0)
        z = tl.where(inside, z, -float("inf"))
        more = tl.maximum(largest, tl.max(z, 0))
        base = tl.where(more == -float("inf"), 0.0, more)  # of a row of nothing but -inf the sum is 0
        rest = rest * tl.exp(largest - base) + tl.sum(tl.exp(z - base), 0)
        largest = more
    target = tl.load(TARGET + row) - first
    here = (target >= 0) & (target < columns)
    z = _score(tl.load(at + target, mask=here, other=0.0), scale, cap, SCALED, CAPPED)
    tl.debug_barrier()  # all threads have read what one of them now writes
    tl.store(PICKED + row, tl.load(PICKED + row) + tl.where(here, z, 0.0))
    if TOTAL is not None:
        tl.store(TOTAL + row, tl.load(TOTAL + row) + tl.sum(total, 0))
    tl.store(LARGEST + row, largest)
    tl.store(REST + row, rest)


@triton.jit(do_not_specialize=["first"])
def _gradient(
    X, TARGET, LSE, PICKED, TOTAL, NORMAL, first, columns, stride, scale, cap,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a row."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = X + row.to(tl.int64) * stride + column
    z = _score(tl.load(at, mask=inside, other=0.0), scale, cap, SCALED, CAPPED)
    d = tl.load(NORMAL + row) * tl.exp(z - tl.load(LSE + row))
    d += tl.where(column == tl.load(TARGET + row) - first, tl.load(PICKED + row), 0.0)
    if TOTAL is not None:
        d += tl.load(TOTAL + row)
    if CAPPED:
        d *= 1.0 - (z / cap) * (z / cap)
    if SCALED:
        d *= scale
    tl.store(at, d.to(X.dtype.element_ty), mask=inside)


def _flags(scale: float, cap: float) -> dict[str, Any]:
    return {"SCALED": scale != 1.0, "CAPPED": cap != 0.0}


def add_statistics(
    x: Tensor, target: Tensor, first: int, scale: float, cap: float, picked: Tensor, total: Tensor | None, largest: Tensor, rest: Tensor
) -> None:
    """Adds a tile to picked, total?, largest and rest [T], in place, float32. x [T, V]: products, the first of whose columns has the number `first`; target [T]."""
    rows, columns = x.shape
    if x.numel():
        operands = x, target.contiguous(), picked, total, largest, rest, first, columns, x.stride(0), scale, cap
        launch(_statistics, (rows,), x, *operands, **_flags(scale, cap), **_block(columns))


def gradient(
    x: Tensor, target: Tensor, first: int, scale: float, cap: float, lse: Tensor, picked: Tensor, total: Tensor | None, normal: Tensor
) -> Tensor:
    """`x`, which now holds its gradient. picked, total?, normal: gradients of those [T], as lse in float32."""
    rows, columns = x.shape
    if x.numel():
        gradients = [None if t is None else t.contiguous() for t in (target, lse, picked, total, normal)]
        block = _block(columns)
        grid = (rows, triton.cdiv(columns, block["BLOCK"]))
        launch(_gradient, grid, x, x, *gradients, first, columns, x.stride(0), scale, cap, **_flags(scale, cap), **block)
    return x


def _block(columns: int) -> dict[str, int]:
    """No more than a tile has: rows of toys are short."""
    block = min(BLOCK, triton.next_power_of_2(columns))
    return {"BLOCK": block, "num_warps": max(1, WARPS * block // BLOCK)}
