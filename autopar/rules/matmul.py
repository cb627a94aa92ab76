"""Matrix products. A bias or an accumulator that is added to a product whose inner dim is split is added once."""

from __future__ import annotations

from autopar.graph.graph import Op
from autopar.rules import rule, table
from autopar.rules.grammar import Line
from autopar.rules.letters import aligned, names, write

table(
    {
        "aten.mm.default": Line("m k+, k+ n -> m n", "0|1", "matmul"),
        "aten.bmm.default": Line("b m k+, b k+ n -> b m n", "0|1", "matmul"),
        "aten.mv.default": Line("m k+, k+ -> m", "0|1", "matmul"),
        "aten.dot.default": Line("k+, k+ -> ", "0|1", "matmul"),
        "aten.vdot.default": Line("k+, k+ -> ", "0|1", "matmul"),
    }
)


@rule("aten.addmm.default", "aten.baddbmm.default", "aten.addmv.default", "aten.addbmm.default")
def _added(op: Op) -> Line:
    out = op.out.shape
    dims = {"addmm": ["m", "n"], "baddbmm": ["b", "m", "n"], "addmv": ["m"], "addbmm": ["m", "n"]}[op.target.split(".")[1]]
    a, b = {
        "addmm": (["m", "k+"], ["k+", "n"]),
        "baddbmm": (["b", "m", "k+"], ["b", "k+", "n"]),
        "addmv": (["m", "k+"], ["k+"]),
        "addbmm": (["b+", "m", "k+"], ["b+", "k+", "n"]),
    }[op.target.split(".")[1]]
    return write([aligned(op.inputs[0].shape, out, dims), a, b], [dims], "0&1|0&2", "matmul")


@rule("aten.linear.default")
def _linear(op: Op) -> Line:
    """x [..., k], weight [n, k] or [k], bias [n] or []."""
    x, weight = op.inputs[0].shape, op.inputs[1].shape
    lead = names(x[:-1])
    n = ["n"] if len(weight) == 2 else []
    bias = [n if t.shape else [] for t in op.inputs[2:]]
    linear = "0&2|1&2" if bias else "0|1"
    return write([[*lead, "k+"], [*n, "k+"], *bias], [[*lead, *n]], linear, "matmul")
