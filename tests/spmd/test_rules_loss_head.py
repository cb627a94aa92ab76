"""The head without logits on simulated ranks against the whole operator: tokens and words split, at any digits, alone and together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar import rules
from autopar.kernels.loss_head import linear_log_prob
from autopar.passes import local
from tests.spmd.ops import call, check
from tests.spmd.recorded import Recorded, check_all, f, fails, ints, record, registered

TARGETS = registered(rules._RULES, "loss_head")


def _called(
    tokens: int = 24, words: int = 36, bias: bool = False, total: bool = False, scale: float = 1.0, cap: float = 0.0, tile: int = 30,
    lacking: tuple[int, ...] = (),
) -> list[Recorded]:  # fmt: skip
    """lacking: positions among h, w and b of operands that want no gradient."""
    y = ints(words, tokens)
    y[::5] = -100
    y[1] = words  # outside on the other side
    operands = [f(tokens, 5), f(words, 5), f(words) if bias else None]
    operands = [t.detach() if t is not None and i in lacking else t for i, t in enumerate(operands)]

    def fn(*given: Any) -> Any:
        found = linear_log_prob(*given)
        return found if total else (found[0], found[2])

    calls = record(TARGETS, fn, *operands, y, total, scale, cap, tile)
    assert {str(c[0]) for c in calls} == TARGETS
    return calls


CASES: dict[str, Callable[[], list[Recorded]]] = {
    "plain": _called,
    "all of it": lambda: _called(bias=True, total=True, scale=0.7, cap=2.0),
    "bias": lambda: _called(bias=True),
    "the weight alone": lambda: _called(bias=True, lacking=(0, 2)),
    "the input alone": lambda: _called(total=True, lacking=(1,)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_split(name: str) -> None:
    for reports in check_all(CASES[name]()).values():
        assert set.union(*(r.letters for r in reports)) == {"t", "v"}


@pytest.mark.parametrize("target", sorted(registered(local._LOCAL, "loss_head")))
def test_lowering_is_needed(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(local._LOCAL, target)
    assert fails(CASES["plain"](), target)


def test_scores_far_apart_between_ranks() -> None:
    """The largest score of a token is on one rank, and those of the others are nothing beside it."""
    h, w = torch.ones(12, 1, dtype=torch.float64), torch.zeros(12, 1, dtype=torch.float64)
    w[:6], w[6:] = -1e4, 1e4
    target = torch.arange(12)
    c = call("autopar.linear_log_prob_v1.default", (h, w, None, target, False, 1.0, 0.0, 30))
    assert c.outputs[2] is not None and torch.allclose(c.outputs[2], torch.full((12,), 1e4 + torch.tensor(6.0).log().item()).double())
    check(torch.ops.autopar.linear_log_prob_v1.default, (h, w, None, target, False, 1.0, 0.0, 30))
