"""Random ops on simulated ranks: the numbers are those that one device draws, element by element, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar import rules
from autopar.graph.mesh import Mesh
from autopar.kernels.random import SAMPLERS, EagerRandom
from autopar.passes import local
from tests.spmd.ops import check
from tests.spmd.recorded import f, registered

X, P = f(12, 24).detach(), torch.rand(12, 24, dtype=torch.float64)
SHAPE = [24, 12]
FLOAT = {"dtype": torch.float64}
SAMPLES: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "aten.native_dropout.default": [((X, 0.3, True), {}), ((X.float(), 0.9, None), {}), ((X, 1.0, True), {}), ((X, 0.3, False), {})],
    "aten.rand.default": [((SHAPE,), FLOAT), ((SHAPE,), {"dtype": torch.float32}), ((SHAPE,), {"dtype": torch.bfloat16})],
    "aten.rand_like.default": [((X,), {}), ((X.float(),), {}), ((X,), {"dtype": torch.float16})],
    "aten.uniform.default": [((X,), {}), ((X, -2.0, 3.0), {})],
    "aten.randn.default": [((SHAPE,), FLOAT)],
    "aten.randn_like.default": [((X,), {}), ((X.float(),), {}), ((X.bfloat16(),), {})],
    "aten.normal_functional.default": [((X,), {}), ((X, 1.0, 2.0), {})],
    "aten.normal.Tensor_Tensor": [((X, P), {})],
    "aten.normal.Tensor_float": [((X, 2.0), {})],
    "aten.normal.float_Tensor": [((1.0, P), {})],
    "aten.normal.float_float": [((1.0, 2.0, SHAPE), FLOAT)],
    "aten.log_normal.default": [((X, 0.5, 0.25), {})],
    "aten.exponential.default": [((X,), {}), ((X, 2.0), {})],
    "aten.cauchy.default": [((X, 1.0, 2.0), {})],
    "aten.geometric.default": [((X, 0.3), {})],
    "aten.bernoulli.default": [((P,), {})],
    "aten.bernoulli.Tensor": [((X, P), {})],
    "aten.bernoulli.p": [((X, 0.3), {}), ((X.bool(), 0.5), {})],
    "aten.randint.default": [((1000, SHAPE), {"dtype": torch.int64})],
    "aten.randint.low": [((-5, 1000, SHAPE), {"dtype": torch.int32})],
    "aten.randint_like.default": [((X, 1000), {})],
    "aten.randint_like.low_dtype": [((X, -5, 1000), {})],
}
MESHES = tuple(Mesh.of(sizes) for sizes in ({"a": 2}, {"a": 3}, {"a": 4}, {"a": 8}, {"a": 2, "b": 3}))


def _op(target: str) -> Any:
    _, name, overload = target.split(".")
    return getattr(getattr(torch.ops.aten, name), overload)


def _whole(target: str) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with EagerRandom(1, 2):
            return _op(target)(*args, **kwargs)

    return run


@pytest.mark.parametrize("target", SAMPLES)
def test_every_strategy(target: str) -> None:
    for args, kwargs in SAMPLES[target]:
        report = check(target, args, kwargs, meshes=MESHES, reference=_whole(target))
        assert report.rule.kind == "random"
        assert report.letters == set(report.rule.factors)


def test_every_rule_is_tried() -> None:
    drawn = {t for t in registered(rules._RULES, "random") if "backward" not in t}
    assert drawn == set(SAMPLES) == registered(local._LOCAL, "random") == {*SAMPLERS, "aten.native_dropout.default"}


@pytest.mark.parametrize("target", SAMPLES)
def test_without_its_lowering_an_op_fails(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args, kwargs = SAMPLES[target][0]
    registered(local._LOCAL)
    monkeypatch.delitem(local._LOCAL, target)
    with pytest.raises(AssertionError):
        check(target, args, kwargs, reference=_whole(target))


def test_dropout_backward() -> None:
    args = (X, P > 0.3, 1 / 0.7)
    report = check("aten.native_dropout_backward.default", args)
    assert report.letters == set(report.rule.factors)
    assert report.partials == {frozenset({0})}
