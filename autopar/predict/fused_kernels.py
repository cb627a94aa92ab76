"""Which kernels a micro-batch runs, and which results of forward backward finds kept.

Memory-bound neighbours are one kernel, which reads from memory what others wrote and writes what others read (`autopar.cost.fusion`).

Compiled (`planned`), that is what the integer program answered: what is kept, what runs again in backward's kernels, and each at its price.

By hand (`by_hand`), what a kernel of backward reads of forward is at hand only if forward wrote it: if nothing but the kernel that made it reads it there (a norm's input in single
precision, an activation before the product that follows), backward's kernel makes it again on the way, from what that kernel read. So much is
true of any set of fused kernels, and costs nothing but reading.

    exact(t)   a product or attention in backward reads t: it is in memory
    soft(t)    a memory-bound kernel of backward reads t: t if it is in memory, else soft() of what made it
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from autopar.cost import Beside
from autopar.cost.fusion import Share, fused, is_fusible, kernels
from autopar.cost.memory import base_name, is_view, reads, writes
from autopar.graph.graph import Graph, Op, Tensor
from autopar.planner.formulation.where_kept import besides
from autopar.planner.found import Found
from autopar.rules.grammar import Rule
from autopar.solver.solve import Solution


@dataclass(frozen=True)
class Kernels:
    """shares: of ops of both halves; reads of what forward did not write are replaced in `instead`: (op, tensor) -> what
    it is made of. written: what forward's kernels write. exact: results of forward that products, attention and the like in backward read; soft: others that memory-bound
    kernels do. reader: of these, who reads them first. besides: what ops do on one device because values are kept, and how often in the model; again: ops of forward that run in backward too."""

    shares: Mapping[str, Share]
    written: frozenset[str]
    instead: Mapping[tuple[str, str], tuple[Tensor, ...]]
    exact: Mapping[str, Tensor]
    soft: Mapping[str, Tensor]
    maker: Mapping[str, Op]
    reader: Mapping[str, Op]
    free: frozenset[str]
    besides: tuple[tuple[Beside, int], ...] = ()
    again: frozenset[str] = frozenset()


FUSION = ("compiled", "modules", "none")


def of(found: Found, fusion: str) -> Kernels:
    """fusion: "compiled", memory-bound neighbours share a kernel; "modules", in forward only within a module; "none", never. (Backward's modules are not
    looked at: written by hand, a norm's or an activation's backward is one kernel too, but its ops do not all bear its name.)"""
    return planned(found) if fusion == "compiled" else by_hand(found.names.symmetry.graph, found.rules, fusion)


def planned(found: Found) -> Kernels:
    """What the program answered."""
    together = found.formulated.cost.fused
    assert isinstance(found.answer, Solution) and together is not None
    f, decision = found.formulated, found.answer.decision
    graph, q = f.program.graph, f.program.q
    free = frozenset(op.name for op in graph.ops if is_view(op, found.rules[op.name]))
    shares = {op.name: f.cost.share(op, found.rules[op.name]) for op in graph.ops if op.name in together}
    reruns = {f.names.reruns[i] for i in decision.rerun}
    again = frozenset(op.name for op in graph.ops if op.direction == "forward" and (q.rep[op.name], q.segment[op.name]) in reruns)
    kept: dict[str, Tensor] = {}
    aside: list[tuple[Beside, int]] = []
    for v, policies in decision.kept.items():
        value = found.problem.values[v]
        for k in policies:
            part = list(f.wires[value.name].nodes)[value.policies[k].node].share(f.mesh)
            for name in q.members[value.name]:
                kept[name] = graph.tensors[name]
                aside += besides(f.program, f.cost, name, kept[name].nbytes * part)
    made = {t.name: op for op in graph.ops for t in op.outputs if t is not None}
    reader, heavy = _read_by(graph, free, found.rules, kept.keys(), again)
    written = (
        frozenset(t for op in graph.ops if op.direction == "forward" and op.name in shares for t in shares[op.name].writes) | kept.keys()
    )
    exact, soft = ({n: t for n, t in kept.items() if (n in heavy) == is_heavy} for is_heavy in (True, False))
    return Kernels(shares, written, {}, exact, soft, made, reader, free, tuple(aside), again)


def _read_by(
    graph: Graph, free: frozenset[str], rules: Mapping[str, Rule], kept: Set[str], again: frozenset[str]
) -> tuple[dict[str, Op], set[str]]:
    """Of what is kept: which op of backward is the first to read it, or what is made again of it; and what products and the like there read."""
    root = _roots(graph, free)
    through: dict[str, set[str]] = {}  # what runs again makes -> what is kept that it is made of
    first: dict[str, Op] = {}
    heavy: set[str] = set()

    def of(t: Tensor) -> set[str]:
        name = root.get(t.name, t).name
        return {name} if name in kept else through.get(name, set())

    for op in graph.ops:
        if op.direction == "forward" and op.name in again:
            found = {n for t in op.inputs for n in of(t)}
            through |= {t.name: found for t in op.outputs if t is not None}
        elif op.direction == "backward" and op.name not in free:
            for t in op.inputs:
                if root.get(t.name, t).name in kept and not is_fusible(op, rules[op.name]):
                    heavy.add(root.get(t.name, t).name)
                for n in of(t):
                    first.setdefault(n, op)
    return first, heavy


def by_hand(graph: Graph, rules: Mapping[str, Rule], fusion: str) -> Kernels:
    """fusion: "modules" or "none"."""
    ahead = replace(graph, ops=tuple(op for op in graph.ops if op.direction == "forward"), grads={}, buffer_updates={})
    alone = fusion == "none"
    free = frozenset(op.name for op in graph.ops if is_view(op, rules[op.name]) or base_name(op) in ("clone", "contiguous"))
    forward = _alone(ahead, rules) if alone else fused(ahead, rules, by_module=True)
    both = _alone(graph, rules) if alone else fused(graph, rules)
    group = {op.name: op.name for op in graph.ops} if alone else kernels(graph, rules)
    root = _roots(graph, free)
    made = {t.name: op for op in graph.ops for t in op.outputs if t is not None}
    written = frozenset(t for op in ahead.ops if op.name in forward for t in forward[op.name].writes)

    def sources(t: Tensor, seen: set[str]) -> dict[str, Tensor]:
        """What a memory-bound kernel of backward reads for `t`."""
        t = root.get(t.name, t)
        op = made.get(t.name)
        if t.name in seen or op is None:
            return {} if op is not None or t.name in seen else {t.name: t}
        seen.add(t.name)
        if t.name in written or not is_fusible(op, rules[op.name]):
            return {t.name: t}
        out: dict[str, Tensor] = {}
        for i in op.inputs:
            out |= sources(i, seen)
        return out

    exact: dict[str, Tensor] = {}
    reader: dict[str, Op] = {}
    soft: dict[str, Tensor] = {}
    instead: dict[tuple[str, str], tuple[Tensor, ...]] = {}
    read_by: dict[str, set[str]] = {}  # kernel -> what it reads instead of other things
    for op in graph.ops:
        if op.direction != "backward" or op.name not in both or op.name in free:
            continue
        heavy = not is_fusible(op, rules[op.name])
        here = read_by.setdefault(group[op.name], set())
        for t in op.inputs:
            source = root.get(t.name, t)
            maker = made.get(source.name)
            if maker is None or maker.direction == "backward":
                continue
            if heavy:
                exact[source.name] = source
                reader.setdefault(source.name, op)
            elif t.name in both[op.name].reads:
                found = {n: x for n, x in sources(t, set()).items() if n in made}
                soft |= found
                for n in found:
                    reader.setdefault(n, op)
                if list(found) != [source.name]:
                    # What the kernel reads already, as itself or for something else, it does not read twice.
                    fresh = tuple(x for n, x in found.items() if n not in here)
                    instead[op.name, t.name] = fresh
                here |= set(found)
    backward = {op.name: both[op.name] for op in graph.ops if op.direction == "backward" and op.name in both}
    return Kernels({**forward, **backward}, written, instead, exact, soft, made, reader, free)


def _alone(graph: Graph, rules: Mapping[str, Rule]) -> dict[str, Share]:
    """Every op a kernel of its own."""
    return {
        op.name: Share(frozenset(t.name for t in reads(op)), frozenset(t.name for t in writes(op)), True)
        for op in graph.ops
        if not is_view(op, rules[op.name])
    }


def _roots(graph: Graph, free: frozenset[str]) -> dict[str, Tensor]:
    """What a free op makes -> the tensor whose memory it is."""
    out: dict[str, Tensor] = {}
    for op in graph.ops:
        if op.name in free and op.inputs:
            source = out.get(op.inputs[0].name, op.inputs[0])
            out |= {t.name: source for t in op.outputs if t is not None}
    return out
