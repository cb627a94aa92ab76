"""Which operator of forward an operator of backward belongs to: autograd numbers those of forward, and its backward runs under the same number.

Operators that autograd has no node for (in no_grad, on integers) bear the number of the one before them, so the first of a number is it.
"""

from __future__ import annotations

from torch import fx

from autopar import _torch
from autopar.graph.graph import Graph


def belongs(gm: fx.GraphModule, graph: Graph) -> dict[str, str]:
    """Operator of backward -> operator of forward. graph: of `gm`."""
    backward = {op.name for op in graph.ops if op.direction == "backward"}
    numbered: dict[int, str] = {}
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and not _torch.is_getitem(n) and n.meta.get("seq_nr") is not None]
    for n in calls:
        if n.name not in backward:
            numbered.setdefault(n.meta["seq_nr"], n.name)
    return {n.name: numbered[n.meta["seq_nr"]] for n in calls if n.name in backward and n.meta["seq_nr"] in numbered}
