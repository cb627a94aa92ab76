"""Where kernels run in these tests, how exact they are, and the torch forms beside them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from autopar.kernels import triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
RUNS = INTERPRETED or (DEVICE == "cuda" and not triton.why_not(torch.device("cuda"), torch.float32))
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16)}


@contextlib.contextmanager
def only(kernels: bool) -> Iterator[None]:
    """While open, operators run by kernels, whatever the device; or by torch."""
    before, triton.TYPES = triton.TYPES, (DEVICE,) if kernels else ()
    try:
        yield
    finally:
        triton.TYPES = before


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def close(got: Tensor, want: Tensor, times: float = 1.0) -> None:
    """want: in float64. Of what is rounded once to got's dtype: half a unit of it, and what float32's own operations and exponentials lose, beside the largest."""
    assert got.shape == want.shape
    got, unit = got.double(), torch.finfo(got.dtype).eps
    assert bool((got.isfinite() == want.isfinite()).all()) and bool((got[~got.isfinite()] == want[~want.isfinite()]).all())
    got, want = got[got.isfinite()], want[want.isfinite()]
    if not want.numel():
        return
    allowed = 0.51 * times * unit * want.abs() + 3e-6 * times * max(1.0, float(want.abs().max()))
    assert bool(((got - want).abs() <= allowed).all()), f"{float(((got - want).abs() / allowed).max()):.1f} of what rounding may do"
