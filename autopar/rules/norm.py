"""Normalisations. Layer norm splits its batch dims, group norm also its groups; batch norm all dims, its statistics reduced over all ranks.

native_layer_norm             ... h!, h!, h! -> ... h!, ... 1, ... 1
native_layer_norm_backward    dgamma and dbeta are sums over ...
batch norm                    n:all c s:all, c ... -> n c s, c, c, c, c
group norm                    n (g c!) s!, (g c!), (g c!) -> n (g c!) s!, n g, n g
"""

from __future__ import annotations

from autopar.graph.graph import Op, Tensor
from autopar.rules import rule
from autopar.rules.grammar import Line
from autopar.rules.letters import names


def _split(x: Tensor, inner: int, mark: str) -> tuple[list[str], list[str]]:
    """Letters of the batch dims and of the normalised ones."""
    n = len(x.shape) - inner
    return names(x.shape[:n], "b", mark), names(x.shape[n:], "h", "!")


def _given(*operands: tuple[object, list[str]]) -> list[str]:
    """Texts of the operands that are tensors."""
    return [" ".join(dims) or "?" for t, dims in operands if isinstance(t, Tensor)]


def _outputs(op: Op, texts: list[list[str]]) -> str:
    return ", ".join("-" if t is None else " ".join(d) for t, d in zip(op.outputs, texts, strict=True))


@rule("aten.native_layer_norm.default")
def _layer_norm(op: Op) -> Line:
    x, shape, weight, bias = op.args[:4]
    batch, hidden = _split(x, len(shape), "")
    ones = batch + ["1"] * len(shape)
    left = _given((x, batch + hidden), (weight, hidden), (bias, hidden))
    return Line(f"{', '.join(left)} -> {_outputs(op, [batch + hidden, ones, ones])}", kind="norm")


@rule("aten.native_layer_norm_backward.default")
def _layer_norm_backward(op: Op) -> Line:
    grad, x, shape, mean, rstd, weight, bias = op.args[:7]
    batch, hidden = _split(x, len(shape), "+")
    ones = batch + ["1"] * len(shape)
    left = _given((grad, batch + hidden), (x, batch + hidden), (mean, ones), (rstd, ones), (weight, hidden), (bias, hidden))
    return Line(f"{', '.join(left)} -> {_outputs(op, [batch + hidden, hidden, hidden])}", linear="0", kind="norm")


@rule("aten._fused_rms_norm.default")
def _rms_norm(op: Op) -> Line:
    x, shape, weight = op.args[:3]
    batch, hidden = _split(x, len(shape), "")
    left = _given((x, batch + hidden), (weight, hidden))
    return Line(f"{', '.join(left)} -> {_outputs(op, [batch + hidden, batch + ['1'] * len(shape)])}", kind="norm")


@rule("aten._fused_rms_norm_backward.default")
def _rms_norm_backward(op: Op) -> Line:
    grad, x, shape, rstd, weight = op.args[:5]
    batch, hidden = _split(x, len(shape), "+")
    left = _given((grad, batch + hidden), (x, batch + hidden), (rstd, batch + ["1"] * len(shape)), (weight, hidden))
    return Line(f"{', '.join(left)} -> {_outputs(op, [batch + hidden, hidden])}", linear="0", kind="norm")


def _channels(x: Tensor, mark: str) -> tuple[list[str], list[str]]:
    dims = names(x.shape, "s", mark)
    channel = ["1" if x.shape[1] == 1 else "c"]
    dims[1] = channel[0]
    return dims, channel


def _or_empty(t: object, dims: list[str]) -> list[str]:
    """Statistics that were not computed are empty tensors: their dim is no loop."""
    return ["1"] if isinstance(t, Tensor) and t.numel == 0 else dims


@rule(
    "aten._native_batch_norm_legit_functional.default",
    "aten.native_batch_norm.default",
    "aten._native_batch_norm_legit.no_stats",
    "aten._native_batch_norm_legit_no_training.default",
)
def _batch_norm(op: Op) -> Line:
    x = op.inputs[0]
    dims, c = _channels(x, ":all")
    left = [" ".join(dims)] + [" ".join(_or_empty(t, c)) for t in op.inputs[1:]]
    right = [dims] + [_or_empty(t, c) for t in op.outputs[1:]]
    return Line(f"{', '.join(left)} -> {_outputs(op, right)}", kind="norm")


@rule("aten.native_batch_norm_backward.default")
def _batch_norm_backward(op: Op) -> Line:
    dims, c = _channels(op.inputs[0], ":all")
    left = [" ".join(dims)] * 2 + [" ".join(_or_empty(t, c)) for t in op.inputs[2:]]
    return Line(f"{', '.join(left)} -> {_outputs(op, [dims, c, c])}", kind="norm")


@rule("aten.native_group_norm.default")
def _group_norm(op: Op) -> Line:
    x, weight, bias = op.args[:3]
    dims, c, sizes = _groups(x, op.args[6], "n")
    left = _given((x, dims), (weight, c), (bias, c))
    return Line(f"{', '.join(left)} -> {_outputs(op, [dims, ['n', 'g'], ['n', 'g']])}", kind="norm", sizes=sizes)


def _groups(x: Tensor, groups: int, batch: str) -> tuple[list[str], list[str], dict[str, int]]:
    """Letters of x [N, C, ...] and of one number a channel; channels are groups of `c`."""
    channel = "(g c!)"
    return [batch, channel, *names(x.shape[2:], "s", "!")], [channel], {"g": groups, "c": x.shape[1] // groups}


@rule("aten.native_group_norm_backward.default")
def _group_norm_backward(op: Op) -> Line:
    grad, x, mean, rstd, weight = op.args[:5]
    dims, c, sizes = _groups(x, op.args[8], "n+")
    stats = ["n+", "g"]
    left = _given((grad, dims), (x, dims), (mean, stats), (rstd, stats), (weight, c))
    return Line(f"{', '.join(left)} -> {_outputs(op, [dims, c, c])}", linear="0", kind="norm", sizes=sizes)
