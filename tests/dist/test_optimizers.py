"""Optimizers that cannot work on sharded parameters say at their first step which operation, and which parameter; those that work by elements
step the parts; state of other shapes than a parameter's goes through checkpoints."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

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


class _Asked(TorchDispatchMode):
    """How often an operator is asked for on DTensors."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += any(isinstance(t, DTensor) for t in torch.utils._pytree.tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def _by_parts() -> None:
    """Optimizers that work by elements take the parts: a parameter that is nobody's part beside ours, state made in the step, momentum, scales."""
    O = torch.optim  # noqa: E741
    made: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: O.SGD(p, lr=0.1),
        "sgd-momentum": lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        "adamw": lambda p: O.AdamW(p, lr=0.1, amsgrad=True),
        "adamw-foreach": lambda p: O.AdamW(p, lr=0.1, foreach=True),
        "adamw-fused": lambda p: O.AdamW(p, lr=0.1, fused=True),
        "asgd": lambda p: O.ASGD(p, lr=0.1, t0=2),
        "rmsprop": lambda p: O.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    } | {name: functools.partial(getattr(O, name)) for name in ("Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "Rprop")}
    for name, make in made.items():
        plain, model = seeded(Classes), autopar.compile(seeded(Classes), (2,), layout="fsdp", backend="aot_eager")
        beside = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizers = [make([*m.parameters(), b]) for m, b in zip((plain, model), beside, strict=True)]
        for i in range(3):
            want, got = _backward(plain, i), _backward(model, i)
            assert got == pytest.approx(want, rel=1e-4), (name, i)
            for b in beside:
                b.grad = torch.full((3,), float(i))
            versions = [p._version for p in model.parameters()]
            with _Asked() if i else contextlib.nullcontext() as asked:
                optimizers[1].step()
            optimizers[0].step()
            assert asked is None or asked.number == 0, (name, asked.number)
            assert all(p._version > v for p, v in zip(model.parameters(), versions, strict=True)), name
            for optimizer in optimizers:
                optimizer.zero_grad()
        assert torch.equal(*[b.detach() for b in beside])
        for p in model.parameters():
            for key, value in optimizers[1].state[p].items():
                if isinstance(value, torch.Tensor) and value.shape == p.shape:
                    assert isinstance(value, DTensor) and value.placements == p.placements, (name, key)


def test_those_that_work_by_elements_take_the_parts() -> None:
    run(_by_parts, 2, timeout=400)


def test_what_failed_on_which_parameter() -> None:
    run(_refusals, 2, timeout=200)


@pytest.mark.parametrize("kind", cases(["eight bits", "matrices"], ["matrices"]))
def test_state_of_other_shapes_in_checkpoints(kind: str, tmp_path: Path) -> None:
    run(_resumed, 2, str(tmp_path), kind, timeout=200)
