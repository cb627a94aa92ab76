"""Random ops: every dim may be split, for each rank draws the numbers of its own elements."""

from __future__ import annotations

from autopar.graph.graph import Op
from autopar.rules import rule
from autopar.rules.grammar import Line
from autopar.rules.letters import aligned, names, write


@rule(
    "aten.native_dropout.default", "aten.rand.default", "aten.rand_like.default", "aten.uniform.default", "aten.randn.default",
    "aten.randn_like.default", "aten.normal_functional.default", "aten.normal.Tensor_Tensor", "aten.normal.Tensor_float",
    "aten.normal.float_Tensor", "aten.normal.float_float", "aten.log_normal.default", "aten.exponential.default", "aten.cauchy.default",
    "aten.geometric.default", "aten.bernoulli.default", "aten.bernoulli.Tensor", "aten.bernoulli.p", "aten.randint.default",
    "aten.randint.low", "aten.randint_like.default", "aten.randint_like.low_dtype",
)  # fmt: skip
def _random(op: Op) -> Line:
    dims = names(op.out.shape, "n", "^")
    return write([aligned(t.shape, op.out.shape, dims) for t in op.inputs], [dims] * len(op.outputs), kind="random")


@rule("aten.native_dropout_backward.default")
def _dropout_backward(op: Op) -> Line:
    dims = names(op.out.shape, "n")
    return write([dims, dims], [dims], linear="0")
