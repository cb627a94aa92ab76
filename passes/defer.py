"""One layer later: a gradient's reduction is awaited at the end of the stretch after the one that computes the gradient.

It is issued where it is, right behind the gradient; its wait, and what follows it (a cast, the placement's permutation), are moved. A second
reduction of the same gradient (within a node, then between nodes) is issued behind the wait of the first and awaited a stretch later.
The last two stretches' reductions are awaited at the end: nothing is left to overlap them with.

Memory. The unreduced gradients of one more repeated layer are alive, or, at the ends of a stack, less than 1.5 W or W plus one
(see `overlap` for W). Under Inductor the reductions of a repeated layer are issued behind it, all at once: the unreduced gradients of a whole layer
are alive together, twice.

Requires: the backward half of `partition`. Provides: the same nodes in another order, a pure function of the graph. Bitwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.capture.capture import Role
from autopar.graph.calls import is_collective, is_wait, nbytes
from autopar.passes.overlap import STRETCH, behind, calls_between, mark, reorder, windows


def defer(gm: fx.GraphModule, inputs: Sequence[Role | None]) -> fx.GraphModule:
    """`gm`, the backward half, with its gradients' reductions awaited a stretch later. inputs: roles of the placeholders (`overlap.inputs_of`)."""
    gm = mark(gm, inputs)
    calls = calls_between(gm)
    position = {n: i for i, n in enumerate(calls)}
    chain = behind(gm, position)
    stage: dict[fx.Node, int] = {}  # the reductions before and including a node
    origin: dict[fx.Node, int] = {}  # the call behind which a node's first reduction is issued
    for n, before in chain.items():
        earlier = [a for a in n.all_input_nodes if a in chain]
        stage[n] = max((stage[a] for a in earlier), default=0) + is_collective(n)
        origin[n] = max((origin[a] for a in earlier), default=before)
    reductions = sorted((n for n in chain if is_collective(n)), key=origin.__getitem__)
    where = windows(calls, [origin[n] for n in reductions], [nbytes(n.all_input_nodes[0]) for n in reductions])
    index = {reductions[m]: i for i, s in enumerate(where) for m in s.members}
    moved: dict[fx.Node, tuple[int, int, int]] = {}
    for n in reductions:
        n.meta[STRETCH] = index[n], stage[n]
    for n in chain:
        if is_wait(n):
            (issue,) = n.all_input_nodes
            at = index[issue] + stage[issue]
            moved[n] = (where[at].end if at < len(where) else len(calls), -1, 0)
        elif any(a in moved for a in n.all_input_nodes):
            moved[n] = max(moved[a] for a in n.all_input_nodes if a in moved)
    return reorder(gm, calls, moved)
