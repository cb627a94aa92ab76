"""What the first of a call's micro-batches gathers of parameters stays for the others (`ParamChoice.once_a_call`), as in ZeRO-1.

Forward hands it on with what it saves for backward (`partition`). Here is the forward of the later micro-batches: the same calls, but what was gathered is given, before all
else, and what led to it is gone. It is made before gathers are joined and moved, since those of other parameters may be joined otherwise without them.

Requires: the halves of `partition`. Provides: a forward with the same results and saved values, but for those that stay. Bitwise.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar import _torch
from autopar.capture.capture import Role
from autopar.passes.ancestors import ancestors
from autopar.passes.partition import Parts

STAYS = "stays"  # kind of role


def later(parts: Parts) -> Parts:
    """Of the later micro-batches: their forward alone."""
    results = list(_torch.results_of(parts.forward.graph))
    first = len(results) - len(parts.saved)
    staying = {first + i for i in parts.stays}
    given = {results[i]: Role(STAYS, "", k) for k, i in enumerate(sorted(staying))}
    left = [n for i, n in enumerate(results) if i not in staying]
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for n in given:
        env[n] = graph.placeholder(f"{STAYS}_{n.name}")
        env[n].meta = {"val": n.meta["val"], "direction": "forward"}
    needed = ancestors([n for n in left if isinstance(n, fx.Node)], given)
    for n in parts.forward.graph.nodes:
        if n not in env and (n.op == "placeholder" or (n in needed and n.op != "output")):
            env[n] = graph.node_copy(n, env.__getitem__)
            env[n].meta = dict(n.meta)
    graph.output(tuple(env[n] if isinstance(n, fx.Node) else None for n in left))
    gm = fx.GraphModule(parts.forward, graph)
    gm.graph.lint()
    saved = tuple(name for i, name in enumerate(parts.saved) if i not in parts.stays)
    return replace(parts, forward=gm, forward_inputs=(*given.values(), *parts.forward_inputs), saved=saved, stays=(), backward=None)
