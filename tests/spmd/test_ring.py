"""Attention whose keys go round equals attention over all of them, forward and backward, on ranks side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.kernels.attention import attention, attention_backward
from autopar.kernels.ring import Part, backward_body, forward_body, parts
from autopar.passes.local.attention import runs_of
from tests.spmd.exchange import side_by_side

RANKS, SEQ, SCALE = 4, 48, 0.3


def operands(heads: int, groups: int, dtype: torch.dtype, e: int = 8, d: int = 8, seq: int = SEQ) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    torch.manual_seed(0)
    shapes = (2, heads, seq, e), (2, groups, seq, e), (2, groups, seq, d), (2, heads, seq, d)
    return [torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes]


def dealt(blocks: int, seq: int = SEQ) -> list[Tensor]:
    """Which positions each rank has, of so many blocks that are split over all ranks."""
    return [torch.arange(seq).view(blocks, RANKS, -1)[:, r].reshape(-1) for r in range(RANKS)]


def starts(blocks: int, seq: int = SEQ) -> tuple[list[int], int]:
    run = seq // blocks // RANKS
    return [int(i) for rank in dealt(blocks, seq) for i in rank[::run]], run


def whole(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, is_causal: bool) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    out, lse = attention(q, k, v, None, is_causal, SCALE, None)
    return (out, lse), attention_backward(grad, q, k, v, out, lse, None, is_causal, SCALE, None, False)[:3]


def joined(found: Sequence[Tensor], where: list[Tensor]) -> Tensor:
    out = torch.empty_like(torch.cat(list(found), 2))
    out[:, :, torch.cat(where)] = torch.cat(list(found), 2)
    return out


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("heads", "groups", "d"), [(4, 4, 8), (8, 2, 8), (4, 1, 16)])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_equals_whole_attention(blocks: int, heads: int, groups: int, d: int, is_causal: bool) -> None:
    """In double precision, to its last digits."""
    _check(blocks, operands(heads, groups, torch.float64, d=d), is_causal, 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_equals_whole_attention_in_less_precision(dtype: torch.dtype, tolerance: float) -> None:
    _check(2, operands(8, 2, dtype), True, tolerance)


def _check(blocks: int, given: list[Tensor], is_causal: bool, tolerance: float) -> None:
    q, k, v, grad = given
    (out, lse), gradients = whole(q, k, v, grad, is_causal)
    where, (firsts, run) = dealt(blocks, q.shape[2]), starts(blocks, q.shape[2])
    shared = [(is_causal, SCALE, at if is_causal else None, torch.tensor(r), firsts, run, "ring", RANKS) for r, at in enumerate(where)]
    mine = [[t[:, :, at] for t in (q, k, v)] for at in where]
    forward = side_by_side([forward_body(*a, *b) for a, b in zip(mine, shared, strict=True)], [range(RANKS)])
    for i, want in enumerate((out, lse)):
        torch.testing.assert_close(joined([f[i] for f in forward], where), want, rtol=tolerance, atol=tolerance)
    bodies = [backward_body(grad[:, :, at], *a, *f, *b) for a, f, b, at in zip(mine, forward, shared, where, strict=True)]
    backward = side_by_side(bodies, [range(RANKS)])
    for i, want in enumerate(gradients):
        torch.testing.assert_close(joined([b[i] for b in backward], where), want, rtol=tolerance, atol=tolerance)


def test_two_rings_do_not_meet() -> None:
    """Ranks of two groups, each with a sequence of its own."""
    q, k, v, _ = operands(4, 4, torch.float64)
    where, (firsts, run) = dealt(1), starts(1)
    bodies = [
        forward_body(*(t[s : s + 1, :, at] for t in (q, k, v)), True, SCALE, at, torch.tensor(r), firsts, run, "ring", RANKS)
        for s, (r, at) in itertools.product(range(2), enumerate(where))
    ]
    found = side_by_side(bodies, [range(RANKS), range(RANKS, 2 * RANKS)])
    want = attention(q, k, v, None, True, SCALE, None)[0]
    for s in range(2):
        torch.testing.assert_close(joined([f[0] for f in found[s * RANKS : (s + 1) * RANKS]], where), want[s : s + 1])


def test_what_causality_hides_is_not_computed() -> None:
    """Queries 8 to 11 of a block with keys 0 to 3, 8 to 11 and 16 to 19: the first without a mask, the second causal, the third not at all."""
    assert parts([(8, slice(4, 8))], [0, 8, 16], 4, 12) == [Part(slice(4, 8), slice(0, 4), False), Part(slice(4, 8), slice(4, 8), True)]
    assert parts([(0, slice(0, 4))], [8], 4, 4) == []
    assert parts(None, [8], 4, 4) == [Part(slice(None), slice(0, 4), False)]


def test_runs_of_keys() -> None:
    """Two blocks of 24 positions, split over a, each part of which over b: rank (a, b) has positions 12 a + 6 b on, and those 24 further on."""
    mesh = Mesh.of({"a": 2, "b": 2})
    keys = Placement.of((1, 1, SEQ, 8), {"a": (2, 12), "b": (2, 6)})
    assert runs_of(keys, ("a", "b"), mesh) == ([0, 24, 6, 30, 12, 36, 18, 42], 6)
