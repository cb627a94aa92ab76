"""Which calls backward makes again, rather than read what forward saved of them.

A plan names ops of the captured graph. Recomputed are the calls emitted for them in forward, with the redistribution of their operands, unless
an earlier op already had the operand redistributed, or the plan keeps that version: then it is read. `partition` makes a recomputed call right before backward first
needs it, with all it needs itself; so a recomputed layer appears where its backward begins, and what a recomputed op reads of ops that are
not recomputed is saved. Random numbers come from counters, so a mask is the same both times. Bitwise.

What follows from parameters alone is no matter of ops: it is made again, but for gathers, of which `reshard_after_forward` decides, and each parameter's
`ParamChoice.keeps_gathered`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import torch
from torch import fx

from autopar import _torch
from autopar.capture.capture import Role
from autopar.graph.calls import MOVES, nbytes, storage_of
from autopar.passes.shard import Sharded


def from_parameters(
    nodes: Iterable[fx.Node], role_of: dict[fx.Node, Role], *, gathers: bool = True, kept: Set[str] = frozenset()
) -> set[fx.Node]:
    """Forward calls that depend on parameters and coordinates only, and `counters`. gathers: those that bring them to another place too, but not the parameters in `kept`."""
    nodes = list(nodes)
    out: set[fx.Node] = set()
    follows: set[fx.Node] = set()  # those that depend on parameters only, brought here or not
    exchanged: set[fx.Node] = set()  # of them, those that a collective made, and what lays it out
    of_kept = {n for n, role in role_of.items() if role.kind == "param" and role.name in kept}
    given = {n for n, role in role_of.items() if role.kind in ("param", "coordinate")}
    for n in nodes:
        if any(a in of_kept for a in n.all_input_nodes):
            of_kept.add(n)
        if not _is_forward(n) or not n.all_input_nodes or not all(a in follows or a in given for a in n.all_input_nodes):
            continue
        follows.add(n)
        if "c10d" in str(n.target) or (MOVES in n.meta and any(a in exchanged for a in n.all_input_nodes)):
            exchanged.add(n)
        if n not in exchanged or (gathers and n not in of_kept):
            out.add(n)
    return out | counters(nodes, role_of)


def staying(nodes: Iterable[fx.Node], role_of: Mapping[fx.Node, Role], params: Set[str]) -> dict[fx.Node, bool]:
    """What forward makes of `params` alone by collectives, and lays out; and of each whether anything else of forward reads it."""
    found: dict[fx.Node, None] = {}
    follows = {n for n, role in role_of.items() if role.kind == "coordinate" or (role.kind == "param" and role.name in params)}
    for n in nodes:
        if _is_forward(n) and n.all_input_nodes and all(a in follows for a in n.all_input_nodes):
            follows.add(n)
            if "c10d" in str(n.target) or (MOVES in n.meta and any(a in found for a in n.all_input_nodes)):
                found[n] = None
    return {n: any(_is_forward(u) and u not in found for u in n.users) for n in found}


def counters(nodes: Iterable[fx.Node], role_of: dict[fx.Node, Role]) -> set[fx.Node]:
    """The integers that random numbers are drawn from: of the seed, coordinates and constants. Operators share them, so they are nobody's; each
    is eight times as large as a mask."""
    whole: set[fx.Node] = set()
    drawn = {n for n, role in role_of.items() if role.kind == "seed"}
    for n in nodes:
        known = all(a in whole or (a in role_of and role_of[a].kind in ("coordinate", "seed")) for a in n.all_input_nodes)
        if _is_forward(n) and known and getattr(n.meta["val"], "dtype", None) == torch.int64:
            whole.add(n)
            if any(a in drawn for a in n.all_input_nodes):
                drawn.add(n)
    todo, found = [n for n in drawn if n in whole], set[fx.Node]()
    while todo:
        n = todo.pop()
        if n in whole and n not in found:
            found.add(n)
            todo += n.all_input_nodes
    return found


def recomputed_calls(
    nodes: Iterable[fx.Node], role_of: dict[fx.Node, Role], ops: Set[str], *, reshard_after_forward: bool, kept: Set[str] = frozenset()
) -> set[fx.Node]:
    """All forward calls that backward makes again where it needs them. kept: parameters of which what forward gathered stays, where others' is gathered again."""
    nodes = list(nodes)
    parameters = from_parameters(nodes, role_of)
    recomputed = from_parameters(nodes, role_of, gathers=reshard_after_forward, kept=kept)
    return recomputed | {n for n in nodes if _is_forward(n) and n.meta.get("op") in ops and n not in parameters and "kept" not in n.meta}


def recomputable(sharded: Sharded) -> frozenset[str]:
    """The names of all ops that can be recomputed: those with a call in forward that depends on more than parameters."""
    nodes = list(sharded.gm.graph.nodes)
    role_of = dict(zip((n for n in nodes if n.op == "placeholder"), sharded.inputs, strict=True))
    parameters = from_parameters(nodes, role_of)
    return frozenset(n.meta["op"] for n in nodes if _is_forward(n) and n not in parameters) - {"output"}


def saved_bytes(forward: fx.GraphModule, saved: int) -> int:
    """Memory that the last `saved` results of a forward graph keep, each storage once, without the graph's own inputs."""
    results = _torch.results_of(forward.graph)
    kept = {storage_of(n) for n in results[len(results) - saved :]}
    return sum(nbytes(n) for n in kept if n.op == "call_function")


def _is_forward(n: fx.Node) -> bool:
    return n.op == "call_function" and n.meta["direction"] == "forward"
