"""Optimizers that cannot work on sharded parameters say at their first step which operation, and which parameter; state of other shapes than a parameter's goes through checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import autopar
from autopar._torch import stepping
from autopar.errors import OptimizerError
from tests.dist.habits.common import Classes, features, labels, seeded
from tests.dist.habits.outside import Adam8bit, Shampoo
from tests.dist.launch import run
from tests.wide import cases


class ByKernel(torch.optim.Optimizer):
    """Hands addresses to a kernel, as bitsandbytes does."""

    def __init__(self, parameters: Any, of: str = "grad") -> None:
        super().__init__(parameters, {})
        self.of = of

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            (p.grad if self.of == "grad" else p).data_ptr()


class Quantizes(torch.optim.Optimizer):
    """By an operator that torch has no sharding for."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            torch.quantize_per_tensor(p.grad * 2, 0.1, 0, torch.qint8)


def _backward(model: Any, i: int) -> float:
    loss = torch.nn.functional.cross_entropy(model(features(i)), labels(i))
    loss.backward()
    return loss.item()


def _refusals() -> None:
    model = autopar.compile(seeded(Classes), (2,), layout="fsdp", backend="aot_eager")
    _backward(model, 0)
    for optimizer, operation, of in (
        (ByKernel(model.parameters()), "data_ptr", "the gradient of 'a.weight'"),
        (ByKernel(model.parameters(), "parameter"), "data_ptr", "parameter 'a.weight'"),
        (Quantizes(model.parameters()), "aten.quantize_per_tensor.default", "the gradient of 'a.weight'"),
    ):
        with pytest.raises(OptimizerError, match="cannot step parameters of a mesh") as e:
            optimizer.step()
        assert f"{operation} of {of}" in str(e.value) and type(optimizer).__name__ in str(e.value) and "to_local" in e.value.fix
        assert isinstance(next(model.parameters()).data_ptr(), int)  # only while it steps
    _backward(model, 1)
    assert stepping.current() is None, "the watch stayed"
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert stepping.current() is None


def _resumed(folder: str, kind: str) -> None:
    """Four steps, and two, a checkpoint, and two: the same, on a mesh of another layout as well."""
    make = {"eight bits": lambda m: Adam8bit(m.parameters(), lr=1e-2), "matrices": lambda m: Shampoo(m.parameters(), lr=1e-2)}[kind]

    def steps(model: Any, optimizer: Any, which: range) -> list[float]:
        out = []
        for i in which:
            out.append(_backward(model, i))
            optimizer.step()
            optimizer.zero_grad()
        return out

    plain = seeded(Classes)
    want = steps(plain, make(plain), range(4))
    model = autopar.compile(seeded(Classes), (2,), layout="fsdp", backend="aot_eager")
    optimizer = make(model)
    got = steps(model, optimizer, range(2))
    autopar.checkpoint.save(folder, model, optimizer, step=2)
    other = autopar.compile(seeded(Classes, seed=5), (2,), layout="tp", backend="aot_eager")
    again = make(other)
    assert autopar.checkpoint.load(folder, other, again)["step"] == 2
    got += steps(other, again, range(2, 4))
    assert got == pytest.approx(want, rel=1e-3)
    assert any(isinstance(p, DTensor) for p in other.parameters())


def test_what_failed_on_which_parameter() -> None:
    run(_refusals, 2, timeout=200)


@pytest.mark.parametrize("kind", cases(["eight bits", "matrices"], ["matrices"]))
def test_state_of_other_shapes_in_checkpoints(kind: str, tmp_path: Path) -> None:
    run(_resumed, 2, str(tmp_path), kind, timeout=200)
