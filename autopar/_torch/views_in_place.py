"""Views made in place (`x.transpose_(0, 1)`) as views.

torch loses the way back through one that is then written to, where `x` was a view already (a linear layer's result with more than two dims): "invalid gradient at index 0". Out of place it is
the same: what a later line means by `x` is the new view.
"""

from __future__ import annotations

from typing import Any

from torch import fx

VIEWS = frozenset({"transpose_", "t_", "unsqueeze_", "squeeze_", "swapaxes_", "swapdims_"})


def views_out_of_place(gm: fx.GraphModule) -> None:
    """In dynamo's graph. Those of the program's inputs, parameters and buffers stay, since the caller sees them."""
    root: dict[fx.Node, fx.Node] = {}  # of nodes that are one tensor, the first
    now: dict[fx.Node, fx.Node] = {}  # by root, the node that has the tensor's shape

    def of(n: fx.Node) -> fx.Node:
        return now.get(root.get(n, n), n)

    for n in gm.graph.nodes:
        if now:
            n.args, n.kwargs = fx.map_arg(n.args, of), fx.map_arg(n.kwargs, of)
        x = n.args[0] if n.args else None
        if not isinstance(x, fx.Node) or not _in_place(n):
            continue
        root[n] = first = root.get(x, x)
        if n.op == "call_method" and n.target in VIEWS and first.op not in ("placeholder", "get_attr"):
            n.target = str(n.target).removesuffix("_")
            now[first] = n
    gm.recompile()


def _in_place(n: fx.Node) -> bool:
    name: Any = n.target if n.op == "call_method" else getattr(n.target, "__name__", "")
    return isinstance(name, str) and n.op in ("call_method", "call_function") and name.endswith("_") and not name.endswith("__")
