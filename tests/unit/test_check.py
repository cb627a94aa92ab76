"""AUTOPAR_CHECK=1 lets right steps pass, and names the operator where one is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.passes import local
from autopar.runtime.check import CheckError
from tests.images import batch_of, model_of
from tests.models import ZOO

pytestmark = pytest.mark.usefixtures("one_process")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.b(F.gelu(self.a(x))) ** 2).sum()


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CHECK", "1")


def test_right_steps_pass() -> None:
    zoo = ZOO["gpt2"]  # with dropout
    gpt2 = autopar.compile(zoo.build(1).train(), backend="aot_eager")
    gpt2(**zoo.inputs(2, 8)).loss.backward()
    unet = autopar.compile(model_of("unet", True), backend="aot_eager")
    unet(**batch_of("unet", 2, True)).backward()
    assert all(s.checked for m in (gpt2, unet) for s in m._programs.steps())


@pytest.mark.parametrize(("target", "half"), [("aten.gelu.default", "gelu(self.a(x))"), ("aten.gelu_backward.default", "gelu_backward")])
def test_the_first_wrong_operator_is_named(target: str, half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    local.lookup("")

    def wrong(ctx: Any, *args: Any, **kwargs: Any) -> Tensor:
        return local.operator(target)(*args, **kwargs) * 1.01  # type: ignore[no-any-return]

    monkeypatch.setitem(local._LOCAL, target, wrong)
    model = autopar.compile(Model(), backend="aot_eager")
    with pytest.raises(CheckError, match=r"another value than one device") as e:
        model(X).backward()
    assert "gelu" in e.value.where and (half in e.value.where or half in str(e.value)), str(e.value)


def test_a_value_that_is_not_what_was_traced() -> None:
    model = autopar.compile(Model(), backend="aot_eager")
    step = model.prepare(X)
    node = next(n for n in step.base.forward.graph.nodes if "gelu" in str(n.target))
    node.meta["val"] = node.meta["val"].double()
    with pytest.raises(CheckError, match="float64 was traced"):
        model(X)


def test_a_lowered_half_that_is_not_its_graph() -> None:
    model = autopar.compile(Model(), backend="aot_eager")
    step = model.prepare(X)
    real = step.lowered.fn

    def off(flat: list[Any]) -> list[Any]:
        out = real(flat)
        return [out[0] + 1, *out[1:]]

    step.lowered = dataclasses.replace(step.lowered, fn=off)
    with pytest.raises(CheckError, match="the forward half returns another output 0"):
        model(X)


def test_nothing_is_checked_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CHECK", "0")
    model = autopar.compile(Model(), backend="aot_eager")
    model(X).backward()
    assert not any(s.checked for s in model._programs.steps())
