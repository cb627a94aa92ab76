"""Losses. A mean is sum(n+) / count(n+), divided after both are reduced over all ranks; the class dim may be split (vocabulary-parallel)."""

from __future__ import annotations

from autopar.graph.graph import Op, Tensor
from autopar.rules import rule
from autopar.rules.grammar import Line
from autopar.rules.letters import aligned, names, write

MEAN, SUM = 1, 2


def _classes(op: Op, x: Tensor, mark: str) -> tuple[str, str]:
    """Letters of the scores [N, C, ...] (or [C]) and of the targets."""
    scores = names(x.shape, "n", mark)
    at = 1 if len(x.shape) > 1 else 0
    scores[at] = "c" + mark + "^" if x.shape[at] != 1 else "1"
    targets = [s for i, s in enumerate(scores) if i != at]
    return " ".join(scores), " ".join(targets) or "?"


def _weight(weight: object) -> str:
    """One number a class."""
    return "" if not isinstance(weight, Tensor) else ", c" if weight.shape[0] != 1 else ", 1"


@rule("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def _nll(op: Op) -> Line:
    x, _, weight, reduction = op.args[:4]
    scores, targets = _classes(op, x, ":all")
    w = _weight(weight)
    out = targets.replace("?", "") if reduction not in (MEAN, SUM) else ""
    return Line(f"{scores}, {targets}{w} -> {out}, ", kind="loss")


@rule("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def _nll_backward(op: Op) -> Line:
    _, x, _, weight, reduction = op.args[:5]
    scores, targets = _classes(op, x, "")
    w = _weight(weight)
    grad = targets if reduction not in (MEAN, SUM) else "?"
    return Line(f"{grad}, {scores}, {targets}{w}, ? -> {scores}", linear="0", kind="loss")


@rule(
    "aten.mse_loss.default", "aten.smooth_l1_loss.default", "aten.huber_loss.default", "aten.soft_margin_loss.default",
    "aten.binary_cross_entropy.default", "aten.binary_cross_entropy_with_logits.default",
)  # fmt: skip
def _elementwise(op: Op) -> Line:
    """The weights of classes broadcast."""
    shape = op.inputs[0].shape
    reduced = op.out.shape != shape or not shape
    dims = names(shape, "n", "+" if reduced else "")
    return write([aligned(t.shape, shape, dims) for t in op.inputs], [[] if reduced else dims], kind="loss")


@rule(
    "aten.mse_loss_backward.default",
    "aten.smooth_l1_loss_backward.default",
    "aten.huber_loss_backward.default",
    "aten.binary_cross_entropy_backward.default",
    "aten.soft_margin_loss_backward.default",
)
def _elementwise_backward(op: Op) -> Line:
    shape = op.out.shape
    dims = names(shape, "n")
    return write([aligned(t.shape, shape, dims) for t in op.inputs], [dims], linear="0", kind="loss")


@rule("autopar.ctc_loss_v1.default")
def _ctc(op: Op) -> Line:
    """Samples by themselves."""
    return Line("t! n c!, n s!, n, n -> n, n t! a!", kind="loss")


@rule("autopar.ctc_loss_backward_v1.default")
def _ctc_backward(op: Op) -> Line:
    return Line("n, t! n c!, n s!, n, n, n, n t! a! -> t! n c!", linear="0", kind="loss")
