"""One value a row, written into a constant, without the constant in memory.

The gradient of a cross-entropy is one number a row in a zero [tokens, vocabulary], which decompositions make by filling it and scattering into it: gigabytes that are
written, read and kept. As

    out[i, j] = value[i] where j = index[i], else the constant

it is an elementwise operator that Inductor puts into the kernel of what reads it. torch.compile does the same in its pass over a joint graph (`scatter_upon_const_tensor`), which halves
that are handed to Inductor do not go through. Bitwise.

Requires: a graph after late decompositions, with values on its nodes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_SCATTERS = (aten.scatter.value, aten.scatter.src)


def constant_scatters(gm: fx.GraphModule, mode: Any) -> fx.GraphModule:
    changed = False
    for n in list(gm.graph.nodes):
        if n.target in _SCATTERS and n.all_input_nodes[0].target is aten.full.default and _is_one_a_row(n):
            _replace(gm.graph, mode, n)
            changed = True
    if changed:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return gm


def _operands(n: fx.Node) -> tuple[fx.Node, int, fx.Node, Any]:
    full, dim, index, value = n.args
    assert isinstance(full, fx.Node) and isinstance(dim, int) and isinstance(index, fx.Node)
    return full, dim, index, value


def _is_one_a_row(n: fx.Node) -> bool:
    full, dim, index, value = _operands(n)
    whole, rows = full.meta["val"].shape, index.meta["val"].shape
    if len(whole) != len(rows) or not whole or not isinstance(whole[dim], int):
        return False
    at = dim % len(whole)
    same = all(str(a) == str(b) for i, (a, b) in enumerate(zip(whole, rows, strict=True)) if i != at)  # sizes may be symbols
    fits = not isinstance(value, fx.Node) or str(value.meta["val"].shape) == str(rows)
    return same and fits and str(rows[at]) == "1"


def _replace(graph: fx.Graph, mode: Any, n: fx.Node) -> None:
    full, dim, index, value = _operands(n)
    val = full.meta["val"]
    how = {"dtype": val.dtype, "device": val.device, "layout": torch.strided, "pin_memory": False}

    def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        made = graph.call_function(target, args, kwargs or {})
        with mode:
            made.meta = {**n.meta, "val": target(*fx.map_arg(args, lambda a: a.meta["val"]), **(kwargs or {}))}
        return made

    with graph.inserting_before(n):
        shape = [1] * val.dim()
        shape[dim] = val.shape[dim]
        count = {"start": 0, "step": 1, "dtype": torch.int64, "device": val.device, "requires_grad": False}
        places = call(aten.reshape.default, (call(torch.ops.prims.iota.default, (val.shape[dim],), count), shape))
        chosen = value if isinstance(value, fx.Node) else call(aten.full.default, ([], value), how)
        out = call(aten.where.self, (call(aten.eq.Tensor, (index, places)), chosen, call(aten.full.default, ([], full.args[1]), how)))
    n.replace_all_uses_with(out)
    graph.erase_node(n)
