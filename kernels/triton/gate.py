"""The gate between the two products of routed experts (`autopar.kernels.experts`), in the forms of `autopar.kernels.gate_forms`, in one pass each way.

    forward    a = f(min(g, limit)) (clamp(u, -limit, limit) + shift)
    backward   given r = dy W2^T without the router's score s:  ds = r . a,  dg = s r f'(g) (u + shift),  du = s r f(g);  a is made again beside them

Backward writes a over r and (dg, du) over (g, u). Computed in float32 and rounded once, where torch rounds after every operator.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.kernels.gate_forms import KINDS, GateForm
from autopar.kernels.triton.launching import launch

BLOCK, WARPS = 1024, 4
SWISH, GELU, GELU_TANH = (tl.constexpr(KINDS.index(k)) for k in KINDS[:3])


@triton.jit
def _activation(g, slope, KIND: tl.constexpr):
    """f and its derivative."""
    if KIND == SWISH:
        s = 1.0 / (1.0 + tl.exp(-slope * g))
        f, df = g * s, s + slope * g * s * (1.0 - s)
    elif KIND == GELU:
        cdf = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        f, df = g * cdf, cdf + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    elif KIND == GELU_TANH:
        t = 1.0 - 2.0 / (tl.exp(1.5957691216057308 * (g + 0.044715 * g * g * g)) + 1.0)
        f = 0.5 * g * (1.0 + t)
        df = 0.5 * (1.0 + t) + 0.3989422804014327 * g * (1.0 - t * t) * (1.0 + 0.134145 * g * g)
    else:
        f, df = tl.where(g < 0.0, 0.0, g), tl.where(g > 0.0, 1.0, 0.0)
    return f, df


@triton.jit
def _clamped(g, u, limit, LIMITED: tl.constexpr):
    """Not by minimum, which would give the limit for what is no number."""
    if LIMITED:
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    return g, u


@triton.jit
def _places(H, row, column, stride, features, APART: tl.constexpr, GATE_FIRST: tl.constexpr):
    """Of the gate and of what it gates. In halves, or in turn: then both are read of the same lines of memory."""
    at = H + row.to(tl.int64) * stride
    if APART:
        one, two = at + column, at + features + column
    else:
        one, two = at + 2 * column, at + 2 * column + 1
    if GATE_FIRST:
        g, u = one, two
    else:
        g, u = two, one
    return g, u


@triton.jit
def _forward(
    H, A, features, stride, slope, limit, shift,
    KIND: tl.constexpr, LIMITED: tl.constexpr, APART: tl.constexpr, GATE_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < features
    at_g, at_u = _places(H, row, column, stride, features, APART, GATE_FIRST)
    g, u = tl.load(at_g, mask=inside, other=0.0).to(tl.float32), tl.load(at_u, mask=inside, other=0.0).to(tl.float32)
    g, u = _clamped(g, u, limit, LIMITED)
    f, _df = _activation(g, slope, KIND)
    tl.store(A + row.to(tl.int64) * features + column, (f * (u + shift)).to(A.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    H, R, S, DS, features, stride, slope, limit, shift,
    KIND: tl.constexpr, LIMITED: tl.constexpr, APART: tl.constexpr, GATE_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row, whose score's gradient is a sum over all of it. No thread reads what another writes: a block has a place for every thread."""
    row = tl.program_id(0)
    s = tl.load(S + row).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, features, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < features
        at_g, at_u = _places(H, row, column, stride, features, APART, GATE_FIRST)
        at_r = R + row.to(tl.int64) * features + column
        x, y = tl.load(at_g, mask=inside, other=0.0).to(tl.float32), tl.load(at_u, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(at_r, mask=inside, other=0.0).to(tl.float32)
        g, u = _clamped(x, y, limit, LIMITED)
        f, df = _activation(g, slope, KIND)
        a = (f * (u + shift)).to(R.dtype.element_ty)
        total += r * a.to(tl.float32)
        da = r * s
        dg, du = da * df * (u + shift), da * f
        if LIMITED:
            dg, du = tl.where(x > limit, 0.0, dg), tl.where((y > limit) | (y < -limit), 0.0, du)
        tl.store(at_r, a, mask=inside)
        tl.store(at_g, dg.to(H.dtype.element_ty), mask=inside)
        tl.store(at_u, du.to(H.dtype.element_ty), mask=inside)
    tl.store(DS + row, tl.sum(total, 0))


def _numbers(form: GateForm) -> tuple[tuple[float, float, float], dict[str, Any]]:
    flags = {"KIND": KINDS.index(form.kind), "LIMITED": form.limit > 0, "APART": form.apart, "GATE_FIRST": form.gate_first}
    return (form.slope, form.limit, form.shift), {**flags, "BLOCK": BLOCK, "num_warps": WARPS}


def forward(form: GateForm, h: Tensor) -> Tensor:
    """h [S, 2 F], rows together -> [S, F]."""
    rows, features = h.shape[0], h.shape[1] // 2
    a = h.new_empty(rows, features)
    if a.numel():
        numbers, flags = _numbers(form)
        launch(_forward, (rows, triton.cdiv(features, BLOCK)), h, h, a, features, h.stride(0), *numbers, **flags)
    return a


def backward(form: GateForm, h: Tensor, r: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h [S, 2 F] and r [S, F], which are written over, s [S, 1] -> (gradient of h, a, gradient of s [S, 1] in float32)."""
    assert h.stride(1) == 1 and r.is_contiguous() and s.is_contiguous()
    ds = s.new_zeros(s.shape, dtype=torch.float32)
    if r.numel():
        numbers, flags = _numbers(form)
        launch(_backward, (r.shape[0],), h, h, r, s, ds, r.shape[1], h.stride(0), *numbers, **flags)
    return h, r, ds
