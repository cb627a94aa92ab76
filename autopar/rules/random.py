"""Random ops: every dim may be split, for each rank draws the numbers of its own elements."""

from __future__ import annotations

from autopar.graph import Op
from autopar.rules import rule
from autopar.rules.grammar import Line
from autopar.rules.letters import names


@rule(
    "aten.native_dropout.default", "aten.rand_like.default", "aten.randn_like.default", "aten.bernoulli.default", "aten.bernoulli.p",
    "aten.uniform.default", "aten.normal_functional.default", "aten.exponential.default", "aten.rand.default", "aten.randn.default",
    "aten.randint.default", "aten.randint.low", "aten.randint_like.default",
)  # fmt: skip
def _random(op: Op) -> Line:
    dims = " ".join(names(op.out.shape, "n", "^")) or ("?" if op.inputs else "")
    left = ", ".join([dims] * len(op.inputs))
    right = ", ".join([dims.replace("?", "")] * len(op.outputs))
    return Line(f"{left} -> {right}", kind="random")


@rule("aten.native_dropout_backward.default")
def _dropout_backward(op: Op) -> Line:
    dims = " ".join(names(op.out.shape, "n")) or "?"
    return Line(f"{dims}, {dims} -> {dims.replace('?', '')}", linear="0")
