"""Normalisations on simulated ranks against the whole op; batch norm's statistics are those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch._decomp import decomposition_table

from autopar import rules
from autopar.passes import local
from tests.spmd.ops import call, check
from tests.spmd.recorded import Recorded, check_all, f, fails, record, registered

TARGETS = registered(rules._RULES, "norm")
aten = torch.ops.aten


def _batch_norm(*shape: int, affine: bool = True, masks: tuple[tuple[bool, bool, bool], ...] = ((True, True, True),)) -> list[Recorded]:
    """What capture gives for F.batch_norm in training: the functional op and its backward."""
    c = shape[1]
    # Means far from zero: a variance by E[x^2] - E[x]^2 would show.
    x, g = f(*shape).detach() * 3 + 100, f(*shape).detach()
    w, b = (f(c).detach(), f(c).detach()) if affine else (None, None)
    stats = [f(c).detach(), f(c).detach().abs()]
    forward = (aten._native_batch_norm_legit_functional.default, (x, w, b, *stats, True, 0.1, 1e-5), {})
    _, mean, rstd, *_ = forward[0](*forward[1])
    without = [
        (aten._native_batch_norm_legit.no_stats, (x, w, b, True, 0.1, 1e-5), {}),
        (aten.native_batch_norm.default, (x, w, b, None, None, True, 0.1, 1e-5), {}),
    ]
    backward = [(aten.native_batch_norm_backward.default, (g, x, w, *stats, mean, rstd, True, 1e-5, list(m)), {}) for m in masks]
    return [forward, *without, *backward]


def _evaluated(*shape: int) -> list[Recorded]:
    """Frozen statistics: nothing to reduce in forward; the backward's sums are still those of the batch."""
    c = shape[1]
    x, g, w, b, mean, var = f(*shape), f(*shape), f(c), f(c), f(c), f(c).detach().abs() + 0.5
    x, g, w, b, mean = (t.detach() for t in (x, g, w, b, mean))
    empty = x.new_empty(0)
    return [
        (aten._native_batch_norm_legit_functional.default, (x, w, b, mean, var, False, 0.1, 1e-5), {}),
        (aten._native_batch_norm_legit_no_training.default, (x, w, b, mean, var, 0.1, 1e-5), {}),
        (aten.native_batch_norm.default, (x, w, b, mean, var, False, 0.1, 1e-5), {}),
        (aten.native_batch_norm_backward.default, (g, x, w, mean, var, empty, empty, False, 1e-5, [True, True, True]), {}),
    ]


def _rms(shape: tuple[int, ...], inner: int, affine: bool = True) -> list[Recorded]:
    x, g = f(*shape).detach(), f(*shape).detach()
    normalised = list(shape[len(shape) - inner :])
    w = f(*normalised).detach() if affine else None
    rstd = aten._fused_rms_norm.default(x, normalised, w, 1e-5)[1]
    return [
        (aten._fused_rms_norm.default, (x, normalised, w, 1e-5), {}),
        (aten._fused_rms_norm_backward.default, (g, x, normalised, rstd, w, [True, affine]), {}),
    ]


CASES: dict[str, Callable[[], list[Recorded]]] = {
    "layer_norm": lambda: record(TARGETS, F.layer_norm, f(12, 6, 8), [8], f(8), f(8)),
    "layer_norm, two dims": lambda: record(TARGETS, F.layer_norm, f(12, 6, 8), [6, 8], f(6, 8), f(6, 8)),
    "layer_norm, no bias": lambda: record(TARGETS, F.layer_norm, f(12, 6, 8), [8], f(8), None),
    "layer_norm, plain": lambda: record(TARGETS, F.layer_norm, f(12, 1, 8), [8]),
    "layer_norm, frozen": lambda: record(TARGETS, F.layer_norm, f(12, 8), [8], f(8).detach(), f(8)),
    "group_norm": lambda: record(TARGETS, F.group_norm, f(12, 24, 5), 12, f(24), f(24)),
    "group_norm, one group": lambda: record(TARGETS, F.group_norm, f(12, 24, 2, 2), 1, f(24), f(24)),
    "group_norm, plain": lambda: record(TARGETS, F.group_norm, f(12, 24, 5), 4),
    "instance_norm": lambda: record(TARGETS, F.group_norm, f(12, 12, 5), 12, f(12), f(12)),
    "rms_norm": lambda: _rms((12, 6, 8), 1),
    "rms_norm, two dims": lambda: _rms((12, 6, 8), 2),
    "rms_norm, plain": lambda: _rms((12, 8), 1, affine=False),
    "batch_norm": lambda: _batch_norm(12, 12, 4, 6),
    "batch_norm, flat": lambda: _batch_norm(24, 12, masks=((True, False, False), (True, True, False), (False, True, True))),
    "batch_norm, plain": lambda: _batch_norm(12, 12, 4, affine=False),
    "batch_norm, one channel": lambda: _batch_norm(12, 1, 12),
    "batch_norm, evaluated": lambda: _evaluated(12, 12, 4),
}


@pytest.fixture(autouse=True, scope="module")
def _rms_norm_on_cpu() -> Iterator[None]:
    """torch has this kernel for GPUs only; its own decomposition stands in."""
    op = aten._fused_rms_norm_backward.default
    with torch.library._scoped_library("aten", "IMPL") as lib:
        lib.impl("_fused_rms_norm_backward", decomposition_table[op], "CPU")
        yield


@pytest.mark.parametrize("name", CASES)
def test_every_strategy(name: str) -> None:
    for target, reports in check_all(CASES[name]()).items():
        assert all(r.letters for r in reports), target


def test_every_rule_is_tried() -> None:
    assert TARGETS - {str(c[0]) for case in CASES.values() for c in case()} == set()


@pytest.mark.parametrize("target", sorted(registered(local._LOCAL, "norm")))
def test_without_its_lowering_an_op_fails(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [c for case in CASES.values() for c in case() if str(c[0]) == target]
    monkeypatch.delitem(local._LOCAL, target)
    assert fails(calls, target)


def test_batch_norm_splits_all_its_dims() -> None:
    for reports in check_all(_batch_norm(12, 12, 4, 6)).values():
        assert reports[0].letters == {"s0", "c", "s2", "s3"}


def test_group_norm_splits_batch_and_groups() -> None:
    for reports in check_all(CASES["group_norm"]()).values():
        assert reports[0].letters == {"n", "g"}


def test_bfloat16_statistics_are_float32() -> None:
    x, w = f(12, 12, 4).detach().bfloat16(), f(12).detach()
    args = (x, w.float(), w.float(), w.float(), w.float().abs(), True, 0.1, 1e-5)
    c = call("aten._native_batch_norm_legit_functional.default", args)
    assert c.outputs[1] is not None and c.outputs[1].dtype == torch.float32
    assert check("aten._native_batch_norm_legit_functional.default", args).letters
