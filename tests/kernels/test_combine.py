"""Results of a token's experts added up; and routed experts whole, by kernels and by torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.kernels.experts import experts
from autopar.kernels.gates import named
from autopar.kernels.triton.combine import combine
from tests.kernels.where import DTYPES, close, only, random


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize(("tokens", "chosen", "features"), [(5, 3, 37), (2, 2, 1030), (3, 1, 16), (0, 2, 8)])
def test_combine(tokens: int, chosen: int, features: int, scored: bool, dtype: str) -> None:
    y = random(tokens * chosen, features, seed=0, dtype=DTYPES[dtype])
    place = torch.randperm(tokens * chosen, generator=torch.Generator().manual_seed(1)).to(y.device).view(tokens, chosen)
    scores = random(chosen, tokens, seed=2).t() if scored else None
    rows = y[place].double()
    want = (rows if scores is None else rows * scores.double().unsqueeze(-1)).sum(1)
    close(combine(y, place, scores, DTYPES[dtype]), want)


def swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def side_by_side(h: Tensor) -> Tensor:
    gate, up = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


@pytest.mark.parametrize("gate", [swiglu, side_by_side], ids=["swiglu", "clamped, biases"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts(dtype: str, gate: object) -> None:
    biased = gate is side_by_side
    name, found = named(gate, DTYPES[dtype]), list[list[Tensor]]()  # type: ignore[arg-type]
    assert name is not None
    for kernels in (True, False):
        shapes = [(7, 8), (7, 2), (4, 24, 8), (4, 8, 12), *([(4, 24), (4, 8)] if biased else [])]
        x, scores, w1, w2, *rest = (
            random(*s, seed=i, dtype=torch.float32 if i == 1 else DTYPES[dtype]).requires_grad_() for i, s in enumerate(shapes)
        )
        index = torch.tensor([[0, 3], [1, 0], [3, 1], [0, 1], [3, 0], [1, 3], [0, 3]], device=x.device)  # none to the third
        with only(kernels):
            b1, b2 = rest if biased else (None, None)
            out = experts(x, index, scores, w1, w2, b1, b2, False, biased, name, "", 1, [])
            out.backward(random(7, 8, seed=9, dtype=DTYPES[dtype]))
        assert out.dtype == x.dtype
        found.append([out.detach(), *(t.grad for t in (x, scores, w1, w2, *rest) if t.grad is not None)])
    assert len(found[0]) == 5 + len(rest)
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype
        worst = float((got.double() - want.double()).abs().max() / want.double().abs().max())
        assert worst <= {"float32": 1e-5, "bfloat16": 3e-2}[dtype], worst
