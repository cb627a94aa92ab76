"""Which calls backward makes again, rather than read what forward saved of them.

A plan names ops of the captured graph. Recomputed are the calls emitted for them in forward, with the redistribution of their operands, unless
an earlier op already had the operand redistributed, or the plan keeps that version: then it is read. `partition` makes a recomputed call right before backward first
needs it, with all it needs itself; so a recomputed layer appears where its backward begins, and what a recomputed op reads of ops that are
not recomputed is saved. Random numbers come from counters, so a mask is the same both times. Bitwise.

What follows from parameters alone (casts, gathers) is no matter of ops: `reshard_after_forward` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from torch import fx

from autopar.capture import Role
from autopar.passes.nodes import nbytes, shares_storage
from autopar.passes.shard import Sharded


def from_parameters(nodes: Iterable[fx.Node], role_of: dict[fx.Node, Role], *, gathers: bool = True) -> set[fx.Node]:
    """Forward calls that depend on parameters and coordinates only. gathers: collectives too, and what follows them."""
    out: set[fx.Node] = set()
    for n in nodes:
        if not _is_forward(n) or not n.all_input_nodes or ("c10d" in str(n.target) and not gathers):
            continue
        if all(a in out or (a in role_of and role_of[a].kind in ("param", "coordinate")) for a in n.all_input_nodes):
            out.add(n)
    return out


def made_again(nodes: Iterable[fx.Node], role_of: dict[fx.Node, Role], ops: Set[str], *, reshard_after_forward: bool) -> set[fx.Node]:
    """All forward calls that backward makes again where it needs them."""
    nodes = list(nodes)
    parameters = from_parameters(nodes, role_of)
    again = parameters if reshard_after_forward else from_parameters(nodes, role_of, gathers=False)
    return again | {n for n in nodes if _is_forward(n) and n.meta.get("op") in ops and n not in parameters and "kept" not in n.meta}


def recomputable(sharded: Sharded) -> frozenset[str]:
    """The names of all ops that can be recomputed: those with a call in forward that depends on more than parameters."""
    nodes = list(sharded.gm.graph.nodes)
    role_of = dict(zip((n for n in nodes if n.op == "placeholder"), sharded.inputs, strict=True))
    parameters = from_parameters(nodes, role_of)
    return frozenset(n.meta["op"] for n in nodes if _is_forward(n) and n not in parameters) - {"output"}


def saved_bytes(forward: fx.GraphModule, saved: int) -> int:
    """Memory that the last `saved` results of a forward graph keep, each storage once, without the graph's own inputs."""
    results = forward.graph.output_node().args[0]
    kept = set()
    for n in results[len(results) - saved :]:
        while (base := shares_storage(n)) is not None and not isinstance(base.meta["val"], (list, tuple)):
            n = base
        kept.add(n)
    return sum(nbytes(n) for n in kept if n.op == "call_function")


def _is_forward(n: fx.Node) -> bool:
    return n.op == "call_function" and n.meta["direction"] == "forward"
