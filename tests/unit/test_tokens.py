"""Checks of factorisations, and operators with effects: torch threads tokens through a graph that has them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import autopar
from tests.eager import assert_trains_alike, compiled, seeded, whole

pytestmark = pytest.mark.usefixtures("one_process")


class Factors(nn.Module):
    """Inverse, Cholesky factor and solution of a system."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(4) + 0.1 * torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spread = x.mT @ x / len(x) + torch.eye(4)
        solved = torch.linalg.solve(self.w, x.mT)
        return (torch.linalg.inv(self.w) @ solved).square().mean() + torch.linalg.cholesky(spread @ self.w.mT @ self.w @ spread.mT).mean()


def test_factorisations() -> None:
    assert_trains_alike(Factors)


class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(self.w + x).sum()


def test_the_inverse_of_a_singular_matrix_is_nan() -> None:
    model = compiled(seeded(Inverse))
    with pytest.raises(RuntimeError, match="singular"):
        seeded(Inverse)(torch.zeros(2, 2))
    assert math.isnan(float(whole(model(torch.zeros(2, 2)))))
    assert math.isfinite(float(whole(model(torch.eye(2)))))


@torch.library.custom_op("autopar_tests::heard", mutates_args=())
def heard(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@heard.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Effect(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = heard(x)
        return (self.a(x) + y).sum()


def test_another_effect_is_refused() -> None:
    from torch._library.effects import EffectType

    heard.register_effect(EffectType.ORDERED)
    with pytest.raises(autopar.AutoparError, match=r"heard.* has an effect besides what it returns"):
        compiled(seeded(Effect))(torch.ones(8, 4))
