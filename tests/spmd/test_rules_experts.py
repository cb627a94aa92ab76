"""Routed experts on simulated ranks against the whole op: tokens, features and experts split, at any digits, alone and together.

Routing that is even, all to one expert, to all but one, and no token at all on a rank; weights in either order, gates and what they gate side by side or
apart, biases, no gate; scores in another precision.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar import rules
from autopar.kernels.experts import experts
from autopar.kernels.gates import named
from autopar.passes import local
from tests.spmd.recorded import Recorded, check_all, f, fails, record, registered

TARGETS = registered(rules._RULES, "experts")
TOKENS, CHOSEN, EXPERTS, WIDTH, FEATURES = 144, 2, 12, 4, 12


def swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def side_by_side(h: Tensor) -> Tensor:
    gate, up = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


def routed(how: str) -> Tensor:
    """[T, K], K different experts for each token."""
    generator = torch.Generator().manual_seed(0)
    if how == "one expert":
        return torch.tensor([3, 5]).repeat(TOKENS, 1)
    if how == "the last":
        return torch.tensor([EXPERTS - 1, EXPERTS - 2]).repeat(TOKENS, 1)
    likely = torch.ones(TOKENS, EXPERTS)
    if how == "all but some":
        likely[:, ::3] = 0
    return torch.multinomial(likely, CHOSEN, generator=generator)


def called(how: str, gate: Callable[[Tensor], Tensor], transposed: bool = False, biases: bool = False, units: int = 2) -> list[Recorded]:
    name = named(gate, torch.float64)
    assert name is not None
    w1, w2 = f(EXPERTS, units * FEATURES, WIDTH), f(EXPERTS, WIDTH, FEATURES)
    if transposed:
        w1, w2 = (w.detach().mT.contiguous().requires_grad_() for w in (w1, w2))
    b1, b2 = (f(EXPERTS, units * FEATURES), f(EXPERTS, WIDTH)) if biases else (None, None)
    rest = (transposed, gate is side_by_side, name, "", 1, [])
    return record(TARGETS, experts, f(TOKENS, WIDTH), routed(how), f(TOKENS, CHOSEN), w1, w2, b1, b2, *rest)


CASES: dict[str, Callable[[], list[Recorded]]] = {
    "even": lambda: called("even", swiglu),
    "one expert": lambda: called("one expert", swiglu, biases=True),
    "the last": lambda: called("the last", side_by_side, transposed=True, biases=True),
    "all but some": lambda: called("all but some", F.silu, units=1),
}


@pytest.mark.parametrize("name", CASES)
def test_every_split(name: str) -> None:
    for reports in check_all(CASES[name]()).values():
        assert set.union(*(r.letters for r in reports)) == {"t", "f", "x0", "x1", "x2"}


@pytest.mark.parametrize("target", sorted(registered(local._LOCAL, "experts")))
def test_lowering_is_needed(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(local._LOCAL, target)
    assert fails(CASES["even"](), target)
