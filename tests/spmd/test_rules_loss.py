"""Losses on simulated ranks against the whole op: a mean is over all ranks' targets, however they are spread."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from autopar import rules
from autopar.graph.mesh import Mesh
from autopar.kernels.ctc import ctc_loss
from autopar.passes import local
from autopar.rules.strategy import placements
from tests.spmd.ops import call, check, cut, run_ranks
from tests.spmd.recorded import Recorded, check_all, f, fails, ints, record, registered

TARGETS = registered(rules._RULES, "loss")
IGNORED = -100


def _labels(n: int, classes: int, ignored: str) -> torch.Tensor:
    """Labels of which some are ignored: a few, unevenly spread; all of the first ranks', whatever the mesh; or all."""
    y = ints(classes, n)
    if ignored == "some":
        y[: n // 4 + 1 : 2] = IGNORED
    elif ignored == "first half":
        y[: n // 2] = IGNORED
    elif ignored == "every third":
        y[::3] = IGNORED
    elif ignored == "all":
        y[:] = IGNORED
    return y


def _nll(ignored: str, weighted: bool = False, reduction: str = "mean", ignore_index: int = IGNORED) -> list[Recorded]:
    y = _labels(24, 12, ignored)
    w = torch.arange(12, dtype=torch.float64) / 7 if weighted else None
    return record(
        TARGETS, F.nll_loss, f(24, 12).log_softmax(1).detach().requires_grad_(), y, w, reduction=reduction, ignore_index=ignore_index
    )


def _nll2d(ignored: str, weighted: bool = False, reduction: str = "mean") -> list[Recorded]:
    y = _labels(12 * 4 * 6, 12, ignored).reshape(12, 4, 6)
    w = torch.rand(12, dtype=torch.float64) if weighted else None
    return record(TARGETS, F.nll_loss, f(12, 12, 4, 6).log_softmax(1).detach().requires_grad_(), y, w, reduction=reduction)


def _minus_infinity() -> list[Recorded]:
    """A masked class: -inf must not meet the zero weight of another rank's or an ignored target."""
    x = f(12, 12).detach()
    x[:, 6:] = float("-inf")
    y = ints(6, 12)
    y[3] = IGNORED
    return record(TARGETS, F.nll_loss, x.requires_grad_(), y)


def _pair(fn: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor, **kwargs: object) -> Callable[[], list[Recorded]]:
    return lambda: [c for r in ("mean", "sum", "none") for c in record(TARGETS, fn, x, y, reduction=r, **kwargs)]


def _probabilities(*shape: int) -> torch.Tensor:
    return (torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()


def _ctc(zero_infinity: bool) -> list[Recorded]:
    """One target is longer than its time allows, where that may be: its loss is infinite."""
    x = f(8, 12, 6).log_softmax(-1).detach().requires_grad_()
    lengths, sizes = ints(4, 12) + 5, ints(4, 12)
    if zero_infinity:
        lengths[2], sizes[2] = 2, 3
    else:
        sizes.clamp_(max=2)
    calls = record(TARGETS, lambda *a: ctc_loss(*a)[0], x, ints(5, 12, 3) + 1, lengths, sizes, 0, zero_infinity)
    assert {str(c[0]) for c in calls} == {"autopar.ctc_loss_v1.default", "autopar.ctc_loss_backward_v1.default"}
    return calls


CASES: dict[str, Callable[[], list[Recorded]]] = {
    **{f"nll, {how}": lambda how=how: _nll(how) for how in ("none", "some", "first half", "every third", "all")},
    **{f"nll, {how}, weighted": lambda how=how: _nll(how, True) for how in ("none", "some", "first half", "every third")},
    **{f"nll, {r}": lambda r=r: _nll("some", True, r) + _nll("first half", False, r) for r in ("sum", "none")},
    "nll, a class ignored": lambda: _nll("none", ignore_index=5) + _nll("none", True, ignore_index=0),
    "nll, -inf": _minus_infinity,
    "nll, one target": lambda: record(TARGETS, F.nll_loss, f(12).log_softmax(0).detach().requires_grad_(), torch.tensor(7)),
    "nll, one class": lambda: record(TARGETS, F.nll_loss, f(12, 1), torch.zeros(12, dtype=torch.int64)),
    **{f"nll2d, {how}": lambda how=how: _nll2d(how) + _nll2d(how, True) for how in ("none", "first half", "every third")},
    **{f"nll2d, {r}": lambda r=r: _nll2d("some", True, r) for r in ("sum", "none")},
    "mse": _pair(F.mse_loss, f(12, 6), f(12, 6).detach()),
    "smooth_l1": _pair(F.smooth_l1_loss, f(12, 6), f(12, 6).detach(), beta=0.5),
    "huber": _pair(F.huber_loss, f(12, 6), f(12, 6).detach(), delta=0.7),
    "soft_margin": _pair(F.soft_margin_loss, f(12, 6), f(12, 6).detach().sign()),
    "bce": _pair(F.binary_cross_entropy, _probabilities(12, 6), _probabilities(12, 6).detach()),
    "bce, weighted": _pair(F.binary_cross_entropy, _probabilities(12, 6), _probabilities(12, 6).detach(), weight=torch.rand(12, 6).double()),
    "bce, broadcast weight": _pair(F.binary_cross_entropy, _probabilities(12, 6), _probabilities(12, 6).detach(), weight=torch.rand(6).double()),
    "bce logits": _pair(F.binary_cross_entropy_with_logits, f(12, 6), _probabilities(12, 6).detach()),
    "bce logits, weighted": _pair(
        F.binary_cross_entropy_with_logits, f(12, 6), _probabilities(12, 6).detach(), weight=torch.rand(12, 1).double(),
        pos_weight=torch.rand(6).double(),
    ),
    "ctc": lambda: _ctc(True) + _ctc(False),
    "mse, one element": _pair(F.mse_loss, f(1, 1), f(1, 1).detach()),
    "mse, no dims": _pair(F.mse_loss, f(), f().detach()),
}  # fmt: skip
NOTHING_TO_SPLIT = ("mse, one element", "mse, no dims")


@pytest.mark.parametrize("name", CASES)
def test_every_strategy(name: str) -> None:
    for target, reports in check_all(CASES[name]()).items():
        assert all(r.letters for r in reports) or name in NOTHING_TO_SPLIT, target


def test_every_rule_is_tried() -> None:
    assert TARGETS - {str(c[0]) for case in CASES.values() for c in case()} == set()


@pytest.mark.parametrize("target", sorted(registered(local._LOCAL, "loss")))
def test_without_its_lowering_an_op_fails(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [c for case in CASES.values() for c in case() if str(c[0]) == target]
    monkeypatch.delitem(local._LOCAL, target)
    assert fails(calls, target)


def test_the_class_dim_and_every_batch_dim_split() -> None:
    reports = check_all(_nll2d("some"))
    assert reports["aten.nll_loss2d_forward.default"][0].letters == {"n0", "c", "n2", "n3"}
    assert reports["aten.nll_loss2d_backward.default"][0].letters == {"n0", "c", "n2", "n3"}


def test_all_ignored_is_nan_as_on_one_device() -> None:
    c = call("aten.nll_loss_forward.default", _nll("all")[0][1])
    assert c.outputs[0] is not None and c.outputs[0].isnan()


@pytest.mark.parametrize("letter", ["n0", "c"])
def test_a_bfloat16_mean_is_rounded_once(letter: str) -> None:
    """On ranks it is the exact mean's nearest bfloat16: neither sum nor count is rounded before they are divided."""
    mesh = Mesh.of({"a": 2})
    for trial in range(8):
        x, y = f(2048, 8).log_softmax(1).detach().bfloat16(), _labels(2048, 8, "every third" if trial % 2 else "some")
        c = call("aten.nll_loss_forward.default", (x, y, None, 1, IGNORED))
        rule = rules.lookup(c.op)
        strategy = {"a": (letter, rule.factors[letter].size // 2)}
        ins, outs = placements(rule, strategy, tuple(t.shape for t in c.op.inputs), ((), ()))
        pieces = [cut(t, p, mesh, torch.Generator()) for t, p in zip(c.tensors, ins, strict=True)]
        for loss, _ in run_ranks(c, rule, mesh, strategy, ins, outs, pieces):
            assert loss is not None and torch.equal(loss, F.nll_loss(x.double(), y).bfloat16())


@pytest.mark.parametrize("name", ["cross_entropy", "kl_div", "l1", "label_smoothing"])
def test_losses_made_of_other_ops(name: str) -> None:
    """No piece of these falls back, and each gives what one device does."""
    targets = set(rules.targets())
    y = _labels(12, 6, "some")
    x = f(12, 6)
    calls = {
        "cross_entropy": lambda: record(targets, F.cross_entropy, x, y),
        "kl_div": lambda: record(targets, F.kl_div, x.log_softmax(1), f(12, 6).detach().softmax(1), reduction="batchmean"),
        "l1": lambda: record(targets, F.l1_loss, x, f(12, 6).detach()),
        "label_smoothing": lambda: record(targets, F.cross_entropy, x, y, label_smoothing=0.1),
    }[name]()
    for op, args, kwargs in calls:
        assert not check(op, args, kwargs).rule.is_fallback, op
