"""Reductions, scans and softmax: what may be split along the reduced dims.

A sum, a count and a maximum combine across shards; a mean is a sum once its divisor is the global count. Variances,
products, scans and sorts do not combine in one step, so their dims stay whole. Softmax keeps its dim, which may be
split: its two reductions are all-reduced inside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.graph.graph import Op
from autopar.rules import rule
from autopar.rules.grammar import Line
from autopar.rules.letters import linear_in, names, write


def reduced_dims(dims: int | Sequence[int] | None, ndim: int) -> set[int]:
    """None and [] mean all."""
    if isinstance(dims, int):
        dims = [dims]
    return {d % ndim for d in dims} if dims and ndim else set(range(ndim))


def reduce_over(op: Op, dims: int | Sequence[int] | None, mark: str, linear: str = "") -> Line:
    """All outputs lack `dims`, or keep them as `1`."""
    x = op.inputs[0].shape
    gone = reduced_dims(dims, len(x))
    ins = [d + mark if i in gone and d != "1" else d for i, d in enumerate(names(x))]
    kept = ["1" if i in gone else d for i, d in enumerate(ins)]
    dropped = [d for i, d in enumerate(ins) if i not in gone]
    outs = [None if o is None else kept if len(o.shape) == len(x) else dropped for o in op.outputs]
    return write([ins], outs, linear_in(op, linear))


@rule("aten.sum.dim_IntList", "aten.sum.default", "aten.nansum.default")
def _sum(op: Op) -> Line:
    return reduce_over(op, op.arg(1, "dim"), "+", "" if "nansum" in op.target else "0")


@rule("aten.mean.dim", "aten.mean.default")
def _mean(op: Op) -> Line:
    return reduce_over(op, op.arg(1, "dim"), "+", "0")


@rule("aten.count_nonzero.dim_IntList")
def _count(op: Op) -> Line:
    return reduce_over(op, op.arg(1, "dim"), "+")


@rule("aten.amax.default", "aten.max.default", "aten.any.default", "aten.any.dim", "aten.any.dims")
def _max(op: Op) -> Line:
    return reduce_over(op, op.arg(1, "dim"), ":max")


@rule("aten.amin.default", "aten.min.default", "aten.all.default", "aten.all.dim", "aten.all.dims")
def _min(op: Op) -> Line:
    return reduce_over(op, op.arg(1, "dim"), ":min")


@rule(
    "aten.argmax.default", "aten.argmin.default", "aten.max.dim", "aten.min.dim", "aten.prod.default", "aten.prod.dim_int",
    "aten.var.correction", "aten.var_mean.correction", "aten.std.correction", "aten.logsumexp.default",
    "aten.median.dim", "aten.nanmedian.dim", "aten.kthvalue.default", "aten.mode.default",
)  # fmt: skip
def _whole(op: Op) -> Line:
    at = 2 if "kthvalue" in op.target else 1
    default = -1 if "mode" in op.target or "kthvalue" in op.target else None
    return reduce_over(op, op.arg(at, "dim", default), "!")


@rule("aten.linalg_vector_norm.default")
def _vector_norm(op: Op) -> Line:
    """Of these only the 1-, 0- and infinity-norms are sums or maxima; the others end in a root."""
    order = op.arg(1, "ord", 2)
    mark = {0: "+", 1: "+", math.inf: ":max", -math.inf: ":min"}.get(order, "!")
    return reduce_over(op, op.arg(2, "dim"), mark)


@rule(
    "aten.cumsum.default", "aten.cumprod.default", "aten.logcumsumexp.default", "aten.cummax.default", "aten.cummin.default",
    "aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.argsort.stable",
)  # fmt: skip
def _scan(op: Op) -> Line:
    """Same shape out, each row along the dim by itself."""
    dims = names(op.inputs[0].shape)
    if dims:
        at, default = (2, -1) if op.target.endswith("stable") else (1, -1)
        dims[op.arg(at, "dim", default)] = "x!"
    return write([dims], [dims] * len(op.outputs), linear_in(op, "0") if op.target == "aten.cumsum.default" else "")


@rule("aten.topk.default")
def _topk(op: Op) -> Line:
    ins, outs = names(op.inputs[0].shape), names(op.inputs[0].shape)
    if ins:
        dim = op.arg(2, "dim", -1)
        ins[dim], outs[dim] = "x!", "k!"
    return write([ins], [outs, outs])


@rule("aten.histc.default")
def _histc(op: Op) -> Line:
    """Counts add up if the bins are given; without bounds they depend on the whole."""
    given = op.arg(2, "min", 0) != op.arg(3, "max", 0)
    return write([names(op.inputs[0].shape, mark="+" if given else "!")], [["bin!"]])


@rule("aten._fft_c2c.default", "aten._fft_r2c.default", "aten._fft_c2r.default")
def _fft(op: Op) -> Line:
    x, along = op.inputs[0].shape, {d % len(op.out.shape) for d in op.args[1]}
    ins = [f"x{i}!" if i in along else d for i, d in enumerate(names(x))]
    return write([ins], [[f"y{i}!" if i in along else d for i, d in enumerate(ins)]], "0")


@rule("aten._softmax.default", "aten._log_softmax.default", "aten._safe_softmax.default")
def _softmax(op: Op) -> Line:
    dims = names(op.out.shape)
    return write([dims], [dims])


@rule("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default")
def _softmax_backward(op: Op) -> Line:
    dims = names(op.out.shape)
    return write([dims, dims], [dims], "0")
