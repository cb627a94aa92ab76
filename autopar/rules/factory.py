"""Factories and triangular masks: tensors that depend on global indices only, or on nothing.

Each output dim is a loop of its own; `^` where the values depend on the index. The tensor that a `new_*` op is called on
lends its dtype and device alone, so its dims are shared with the output's where they have the same size.
"""

from __future__ import annotations

from autopar.graph.graph import Op
from autopar.rules import rule
from autopar.rules.grammar import Line
from autopar.rules.letters import linear_in, names, write


@rule(
    "aten.full.default", "aten.zeros.default", "aten.ones.default", "aten.empty.memory_format",
    "aten.empty_strided.default", "aten.empty_permuted.default", "aten.scalar_tensor.default",
)  # fmt: skip
def _constant(op: Op) -> Line:
    return write([], [names(op.out.shape)])


@rule("aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.eye.default", "aten.eye.m", "aten.linspace.default")
def _indexed(op: Op) -> Line:
    return write([], [names(op.out.shape, mark="^")])


# A rank makes the whole and cuts out its own: they are short, and each has a formula of its own.
MADE_WHOLE = (
    "aten.logspace.default", "aten.range.step", "aten.fft_fftfreq.default", "aten.fft_rfftfreq.default", "aten.hann_window.default",
    "aten.hann_window.periodic", "aten.hamming_window.default", "aten.hamming_window.periodic", "aten.hamming_window.periodic_alpha",
    "aten.hamming_window.periodic_alpha_beta", "aten.blackman_window.default", "aten.blackman_window.periodic", "aten.bartlett_window.default",
    "aten.bartlett_window.periodic", "aten.kaiser_window.default", "aten.kaiser_window.periodic", "aten.kaiser_window.beta",
    "aten.tril_indices.default", "aten.triu_indices.default",
)  # fmt: skip


@rule(*MADE_WHOLE)
def _made_whole(op: Op) -> Line:
    *rows, last = names(op.out.shape, mark="^")
    return write([], [[*(f"{x}!" for x in rows), last]])


@rule("aten.full_like.default", "aten.ones_like.default", "aten.empty_like.default")
def _like(op: Op) -> Line:
    dims = names(op.out.shape)
    return write([dims], [dims])


@rule("aten.zeros_like.default")
def _zeros_like(op: Op) -> Line:
    """Of a Partial it is a zero, which is a sum of zeros."""
    dims = names(op.out.shape)
    return write([dims], [dims], linear_in(op, "0"))


@rule("aten.new_empty.default", "aten.new_empty_strided.default", "aten.new_full.default", "aten.new_ones.default")
def _new(op: Op) -> Line:
    return _lent(op, "")


@rule("aten.new_zeros.default")
def _new_zeros(op: Op) -> Line:
    return _lent(op, linear_in(op, "0"))


def _lent(op: Op, linear: str) -> Line:
    x, out = op.inputs[0].shape, op.out.shape
    dims = names(out)
    own = [d if n == m else "1" for n, m, d in zip(x, out, dims, strict=False)]
    return write([own + ["1"] * (len(x) - len(own))], [dims], linear)


@rule("aten.tril.default", "aten.triu.default")
def _triangle(op: Op) -> Line:
    dims = names(op.out.shape)
    dims[-2:] = [x if x == "1" else f"{x}^" for x in dims[-2:]]
    return write([dims], [dims], linear_in(op, "0"))
