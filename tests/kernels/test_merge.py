"""Two attentions over other keys as one: in float64, in place and not, and within the operator."""

from __future__ import annotations

import math

import pytest
import torch

from autopar.kernels.attention import attention
from autopar.kernels.triton.merge import merge
from tests.kernels.where import DTYPES, close, only, random


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 5, 24), (1, 2, 33, 80), (1, 1, 3, 1)])
def test_merge(shape: tuple[int, int, int, int], in_place: bool, dtype: str) -> None:
    """A slice of the queries, results as kernels lay them and otherwise, a padded log-sum-exp; rows of which one side, or neither, sees a key."""
    b, h, q, d = shape
    wide = random(b, q + 2, h, d, seed=0).transpose(1, 2)
    out, lse = wide[:, :, 1 : q + 1], random(b, h, q + 3, seed=1)[:, :, 2 : q + 2]
    other, its = random(b, h, q, d, seed=2, dtype=DTYPES[dtype]), random(b, h, q + 7, seed=3)[..., :q]
    lse[:, :, 0], its[:, :, 0], its[:, :, 1], lse[:, 0, 2] = -math.inf, -math.inf, -math.inf, -math.inf
    sums = torch.logaddexp(lse.double(), its.double())
    base = sums.masked_fill(sums == -math.inf, 0.0)
    want = out.double() * (lse - base).exp().unsqueeze(-1) + other.double() * (its - base).exp().unsqueeze(-1)
    edges = wide[:, :, [0, -1]].clone()
    into, total = (out, lse) if in_place else (torch.empty_like(other), torch.empty_like(lse))
    merge(into, total, out, lse, other, its)
    close(into, want)
    close(total, sums)
    assert torch.equal(wide[:, :, [0, -1]], edges)


def test_nothing() -> None:
    none = random(2, 3, 0, 8, seed=0)
    merge(none, none[..., 0], none, none[..., 0], none, none[..., 0])


def test_queries_of_a_rank() -> None:
    """Runs of queries see keys before theirs in one kernel, their own in another."""
    q, k, v = (random(1, 2, n, 8, seed=i) for i, n in enumerate((6, 12, 12)))
    index = torch.tensor([2, 3, 4, 9, 10, 11], device=q.device)
    found = []
    for kernels in (True, False):
        with only(kernels):
            found.append(attention(q, k, v, None, True, 0.3, index))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
