"""One layer ahead: every gather of parameters is issued at the start of the stretch before the one that reads it.

The order of issue is the order of use. A wait, and the views that follow it, stay right before the first use; those of the first stretch are
issued before anything else. A chain of two gathers (storage that is padded over some axes and split over others) takes two stretches:
the second is issued, and so the first awaited, one stretch ahead, the first one stretch earlier.

Memory. Between the start of a stretch and its end there are, besides the parameters it is using, the gathered parameters of the next one: one
repeated layer's, or, at the ends of a stack, less than 1.5 W or W plus one gather (see `overlap` for W). Without the pass there is only the one
gathered last. Under Inductor the waits of a repeated layer stand before it, which changes no memory: a gather's result exists from its issue.

Requires: the halves of `partition`. Provides: the same nodes in another order, a pure function of the graph. Bitwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.capture.capture import Role
from autopar.graph.calls import is_collective, is_wait, nbytes
from autopar.passes.overlap import STRETCH, behind, calls_between, is_ahead, mark, reorder, windows


def prefetch(gm: fx.GraphModule, inputs: Sequence[Role | None]) -> fx.GraphModule:
    """`gm`, one half of a step, with its parameters gathered a stretch ahead. inputs: roles of the placeholders (`overlap.inputs_of`)."""
    gm = mark(gm, inputs)
    calls = calls_between(gm)
    position = {n: i for i, n in enumerate(calls)}
    read = {**position, **behind(gm, position)}
    chain = [n for n in gm.graph.nodes if is_ahead(n)]
    use: dict[fx.Node, int] = {}  # the first call that reads something of the node
    stage: dict[fx.Node, int] = {}  # how many gathers lie between the node and what reads it
    for n in reversed(chain):
        use[n] = min((use.get(u, position.get(u, len(calls))) for u in n.users), default=len(calls))
        stage[n] = max((stage[u] + is_collective(u) for u in n.users if u in stage), default=0)
    gathers = sorted((n for n in chain if is_collective(n)), key=use.__getitem__)
    where = windows(calls, [use[g] for g in gathers], [nbytes(g) for g in gathers])
    index = {m: i for i, s in enumerate(where) for m in s.members}
    moved: dict[fx.Node, tuple[int, int, int]] = {}
    for rank, g in enumerate(gathers):
        g.meta[STRETCH] = index[rank], stage[g]
        at = index[rank] - 1 - stage[g]
        key = (where[at].start if at >= 0 else 0, -2, rank)
        todo = [(g, key)]
        while todo:
            n, k = todo.pop()
            # A coordinate's index leads to a gather and is read by calls of the layer too, or by a gradient's redistribution.
            k = min([k, *((read[u], -3, rank) for u in n.users if u in read and not is_wait(n))])
            if n not in moved or k < moved[n]:
                moved[n] = k
                todo += [(a, k) for a in n.all_input_nodes if a in stage]
    for rank, g in enumerate(gathers):
        for w in (u for u in g.users if is_wait(u)):
            direct = min((position[u] for u in w.users if u in position), default=len(calls))
            moved[w] = min(moved.get(w, (direct, -1, rank)), (direct, -1, rank))
    return reorder(gm, calls, moved)
