"""Rows that stand where the data says: experts' grouped matrix products, and a masked scatter.

The rows of expert j, sorted to stand together, times the matrix of expert j:

    product            m! k+, e+ k n, o! -> m n        rows of another rank's experts are zero, so splitting experts leaves a sum
    weight gradient    k m!, m! n, o! -> e k n

Splitting the rows would give each rank a part of every expert, at bounds that depend on the data: not offered here. The torch kernel
wants rows of whole 16-byte units, so it splits a dim by such blocks.

The elements of a source, one after another, into the places where a mask is true (an image's features among a text's embeddings):

    masked scatter     x.., mask..!, source! -> x..    which element comes next depends on the whole mask
    its backward       x..+, mask..! -> source!        each rank puts back what it has: a sum
"""

from __future__ import annotations

from autopar.graph.graph import DTYPE_BYTES, Op, Tensor
from autopar.rules import rule
from autopar.rules.grammar import Line
from autopar.rules.letters import aligned, linear_in, names, write

UNIT_BYTES = 16


@rule("transformers.grouped_mm_fallback.default")
def _fallback(op: Op) -> Line:
    return Line("m! k+, e+ k n, o! -> m n", "0|1", "moe")


@rule("transformers.grouped_mm_fallback_backward.default")
def _fallback_backward(op: Op) -> Line:
    return Line("m! k, e+ k n+, o!, m n -> m k, e k n", "3", "moe")


@rule("aten._grouped_mm.default")
def _grouped_mm(op: Op) -> Line | None:
    a, b = op.args[:2]
    if not isinstance(op.arg(2, "offs"), Tensor) or op.arg(3, "bias") is not None or len(a.shape) != 2:
        return None
    unit = UNIT_BYTES // DTYPE_BYTES[a.dtype]
    product = len(b.shape) == 3
    if any(n % unit for n in (a.shape[1 if product else 0], b.shape[-1])):
        return None
    if product:
        return Line("m! (k+ u!), e+ (k u!) (n v!), o! -> m (n v!)", "0|1", "moe", {"u": unit, "v": unit})
    return Line("(k u!) m!, m (n v!), o! -> e^ (k u!) (n v!)", "0|1", "moe", {"u": unit, "v": unit})


@rule("aten.masked_scatter.default")
def _masked_scatter(op: Op) -> Line:
    x, mask, source = op.inputs
    dims = names(op.out.shape)
    whole = [names(mask.shape, "m", "!"), names(source.shape, "s", "!")]
    return write([aligned(x.shape, op.out.shape, dims), *whole], [dims], linear_in(op, "0&2"))


@rule("aten.masked_scatter_backward.default")
def _masked_scatter_backward(op: Op) -> Line:
    grad, mask = op.inputs
    return write([names(grad.shape, mark="+"), names(mask.shape, "m", "!")], [names(op.out.shape, "s", "!")], linear_in(op, "0"))
