"""What the other files here rest on: a narrowing in a kernel rounds as torch does, on a GPU and in the repaired interpreter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.where import DEVICE, DTYPES


@triton.jit
def _narrowed(X, Y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at).to(Y.dtype.element_ty))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrowing_rounds(dtype: str) -> None:
    x = torch.cat([torch.randn(2048, generator=torch.Generator().manual_seed(0)), 1 + torch.arange(2048) * 2.0**-10]).to(DEVICE)
    y = torch.empty(4096, dtype=DTYPES[dtype], device=DEVICE)
    _narrowed[(1,)](x, y, BLOCK=4096)
    assert torch.equal(y, x.to(y.dtype))
