"""Convolutions, pools and resampling, on simulated ranks against the whole op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autopar import rules
from autopar.passes import local
from tests.spmd.recorded import Recorded, check_all, f, fails, record, registered

TARGETS = registered(rules._RULES, "conv")


def _grid(*shape: int) -> torch.Tensor:
    return (torch.rand(shape, dtype=torch.float64) * 2.2 - 1.1).requires_grad_()


def _conv(transposed: bool, dims: int, *shapes: tuple[int, ...], **kwargs: Any) -> Callable[[], list[Recorded]]:
    fn = getattr(F, f"conv{'_transpose' if transposed else ''}{dims}d")
    return lambda: record(TARGETS, fn, *(f(*s) for s in shapes), **kwargs)


def _plain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], list[Recorded]]:
    return lambda: record(TARGETS, fn, *(f(*a) if isinstance(a, tuple) else a() if callable(a) else a for a in args), **kwargs)


class _Shape(list[int]):
    """A size, not a tensor to be made."""


def _frozen() -> list[Recorded]:
    """A frozen weight: only the input's gradient is computed; then only the weight's."""
    w, x = f(12, 12, 3, 3), f(4, 12, 6, 6)
    return record(TARGETS, F.conv2d, x, w.detach()) + record(TARGETS, F.conv2d, x.detach(), w)


CASES: dict[str, Callable[[], list[Recorded]]] = {
    "conv2d": _conv(False, 2, (12, 12, 6, 6), (12, 12, 3, 3), padding=1),
    "conv2d, bias": _conv(False, 2, (12, 12, 6, 6), (24, 12, 3, 3), (24,), stride=2),
    "conv2d, frozen": _frozen,
    "conv2d, groups": _conv(False, 2, (2, 24, 4, 4), (48, 2, 3, 3), (48,), groups=12, padding=1),
    "conv2d, wide groups": _conv(False, 2, (2, 24, 4, 4), (24, 12, 3, 3), (24,), groups=2, padding=1),
    "conv2d, depthwise": _conv(False, 2, (2, 12, 4, 4), (12, 1, 3, 3), (12,), groups=12),
    "conv1d": _conv(False, 1, (4, 12, 10), (12, 12, 3), (12,), dilation=2),
    "conv3d": _conv(False, 3, (2, 4, 4, 4, 4), (4, 4, 2, 2, 2), (4,)),
    "patches": _conv(False, 2, (4, 3, 8, 8), (12, 3, 4, 4), (12,), stride=4),
    "transposed": _conv(True, 2, (4, 12, 3, 3), (12, 12, 3, 3), (12,), stride=2, output_padding=1),
    "transposed, groups": _conv(True, 1, (4, 24, 5), (24, 2, 3), (24,), groups=12),
    "avg_pool": _plain(F.avg_pool2d, (12, 12, 6, 6), 3, stride=2, padding=1, count_include_pad=False),
    "avg_pool, no batch": _plain(F.avg_pool2d, (12, 6, 6), 2),
    "avg_pool3d": _plain(F.avg_pool3d, (4, 6, 4, 4, 4), 2),
    "max_pool": _plain(F.max_pool2d, (12, 12, 6, 6), 3, stride=2),
    "max_pool3d": _plain(F.max_pool3d, (4, 6, 4, 4, 4), 2),
    "adaptive_avg_pool": _plain(F.adaptive_avg_pool2d, (12, 12, 7, 5), _Shape([3, 2])),
    "adaptive_avg_pool3d": _plain(F.adaptive_avg_pool3d, (4, 6, 5, 5, 5), _Shape([3, 2, 2])),
    "adaptive_max_pool": _plain(F.adaptive_max_pool2d, (12, 12, 7, 5), _Shape([3, 2])),
    "adaptive_max_pool3d": _plain(F.adaptive_max_pool3d, (4, 6, 5, 5, 5), _Shape([3, 2, 2])),
    "grid_sample": _plain(F.grid_sample, (12, 12, 5, 5), lambda: _grid(12, 3, 4, 2), align_corners=False),
    "grid_sample3d": _plain(F.grid_sample, (4, 6, 3, 3, 3), lambda: _grid(4, 2, 3, 2, 3), align_corners=True),
    "pixel_shuffle": _plain(F.pixel_shuffle, (2, 48, 4, 6), 2),
    "pixel_unshuffle": _plain(F.pixel_unshuffle, (2, 12, 8, 12), 2),
}
for _mode, _dims in (
    ("nearest", (1, 2, 3)), ("nearest-exact", (1, 2, 3)), ("linear", (1,)), ("bilinear", (2,)), ("bicubic", (2,)), ("trilinear", (3,)),
):  # fmt: skip
    for _d in _dims:
        _corners = {} if "nearest" in _mode else {"align_corners": False}
        CASES[f"{_mode}{_d}"] = _plain(F.interpolate, (4, 6, *(3, 4, 5)[:_d]), scale_factor=2, mode=_mode, **_corners)
        CASES[f"{_mode}{_d}, size"] = _plain(F.interpolate, (4, 6, *(3, 4, 5)[:_d]), _Shape([7, 2, 4][:_d]), mode=_mode, **_corners)
for _mode in ("bilinear", "bicubic"):
    CASES[f"{_mode}, antialias"] = _plain(F.interpolate, (4, 6, 8, 8), _Shape([3, 4]), mode=_mode, align_corners=False, antialias=True)
for _mode in ("reflect", "replicate"):
    for _d in (1, 2, 3):
        CASES[f"{_mode}{_d}"] = _plain(F.pad, (4, 6, *(4, 5, 6)[:_d]), _Shape([1, 2] * _d), mode=_mode)


@pytest.mark.parametrize("name", CASES)
def test_every_strategy(name: str) -> None:
    for reports in check_all(CASES[name]()).values():
        assert reports[0].letters


def test_every_rule_is_tried() -> None:
    # A ".vec" overload has become its default one where calls are recorded; it shares the rule.
    tried = {str(c[0]) for case in CASES.values() for c in case()}
    assert {t for t in TARGETS - tried if not t.endswith(".vec")} == set()


@pytest.mark.parametrize("target", sorted(registered(local._LOCAL, "conv")))
def test_without_its_lowering_an_op_fails(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [c for case in CASES.values() for c in case() if str(c[0]) == target]
    monkeypatch.delitem(local._LOCAL, target)
    assert fails(calls, target)


def test_what_a_convolution_splits() -> None:
    reports = check_all(CASES["conv2d, bias"]())
    assert reports["aten.convolution.default"][0].letters == {"n", "i", "o"}
    assert reports["aten.convolution_backward.default"][0].letters == {"n", "i", "o"}
    assert "g" in check_all(CASES["conv2d, groups"]())["aten.convolution.default"][0].letters
