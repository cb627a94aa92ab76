"""Which collectives of a backward graph do nothing but reduce a gradient: what follows from them is one gradient (of a bucket, one for each member), and no product.

For messages alone: the graph is the same either way.
"""

from __future__ import annotations

from torch import fx

from autopar import _torch
from autopar.graph.calls import is_collective
from autopar.passes.bucket import MEMBERS

_PRODUCTS = ("mm", "conv", "attention", "embedding")


def only_gradients(gm: fx.GraphModule, kind: str, group: str, result: str) -> bool:
    """Whether that is so of the collective of a graph that makes `result`, else (compiled graphs have names of their own) of all of this kind and group."""
    alike = [n for n in gm.graph.nodes if is_collective(n) and kind in str(n.target) and group in n.args]
    named = [n for n in alike if n.name == result]
    return bool(alike) and all(map(_one_gradient, named or alike))


def _one_gradient(n: fx.Node) -> bool:
    output = n.graph.output_node()
    after, todo = {n}, [n]
    while todo:
        new = [u for u in todo.pop().users if u is not output and u not in after]
        after.update(new)
        todo += new
    if any(part in str(u.target) for u in after for part in _PRODUCTS):
        return False
    return sum(given in after for given in _torch.results_of(n.graph)) == len(n.meta.get(MEMBERS, (n,)))
