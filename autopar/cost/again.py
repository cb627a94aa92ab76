"""What memory-bound ops of forward read and write where they run again in backward, in company of the kernels there.

An op that runs again reads and writes other things than it did in forward: a gate before the product that wants it is made in that product's kernel, of what the
kernel reads anyway, and is in no memory at all (torch's min-cut partitioner calls that free). What it takes is the difference between two ways to compile backward:

    all is kept        backward reads what forward wrote
    all is made again  by the same ops that made it in forward, of what backward has at hand: products, attention, sums of them

    reads     what its kernel reads for it, and backward's own ops there do not
    writes    what other kernels and backward's products read of it
    spared    kernels of backward that read it when it was kept, and do not now; forward's write of it, if that was for backward alone

In a plan some of it is made again and some is kept. What is kept is then read in place of what it would have been made of; so a price between the two ends is
about right, whatever the plan. It is never less than `LEAST` of the op by itself: what is as good as free is not made again for nothing.

An op is not among these if it needs something as large as what it makes that backward does not read otherwise (a sum of a product's result and what was before: that
product's result would be kept in its place). It takes what it took in forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autopar.cost.fusion import Looks, Share, fused, is_fusible, kernels
from autopar.cost.memory import is_view, reads
from autopar.graph import Graph, Op, Tensor
from autopar.rules.grammar import Rule

LEAST = 1 / 1000


class Again(NamedTuple):
    """share: of its kernel in backward; spared: by name of an output, how often less it is read or written, in parts of its size; stored: outputs that
    may be in memory, as whatever else runs again may read them there."""

    share: Share
    spared: Mapping[str, float]
    stored: frozenset[str]


@dataclass(frozen=True)
class Halves:
    """Forward and backward compiled apart, with nothing kept but what has to be. ahead: shares of forward's ops; again: of those that backward makes again."""

    ahead: Mapping[str, Share] = field(default_factory=dict)
    again: Mapping[str, Again] = field(default_factory=dict)


def halves(graph: Graph, rules: Mapping[str, Rule], kept: Mapping[str, Share]) -> Halves:
    """kept: `fused` of the whole graph."""
    ahead = fused(replace(graph, ops=tuple(op for op in graph.ops if op.direction == "forward"), grads={}, buffer_updates={}), rules)
    return Halves(ahead, _again(graph, rules, kept, ahead))


def _again(graph: Graph, rules: Mapping[str, Rule], kept: Mapping[str, Share], ahead: Mapping[str, Share]) -> dict[str, Again]:
    """The fusible ops of forward that backward may make again of what it has at hand."""
    looks = Looks(graph, rules)
    backward = [op for op in graph.ops if op.direction == "backward"]
    ours = _at_hand(graph, rules, looks, backward)
    if not ours:
        return {}
    half = _half(graph, (*(replace(op, direction="backward") for op in ours), *backward))
    shares, group, inside = fused(half, rules), kernels(half, rules), Looks(half, rules)
    # Kernels that backward's own ops are of: what these read from other kernels, and which of them there are anyway.
    own = {(group[op.name], inside.contents(t)) for op in backward if op.name in group for t in reads(op)}
    launched = {group[op.name] for op in backward if op.name in group}
    read = {(group[n], inside.contents(half.tensors[t])): half.tensors[t] for n, s in shares.items() for t in s.reads}
    was = _times(looks, (half.tensors[t] for op in backward if op.name in kept for t in kept[op.name].reads), half)
    now = _times(looks, (t for key, t in read.items() if key in own), half)
    alone = _read_elsewhere(graph, looks, {op.name for op in ours})
    found = {}
    for op in ours:
        if op.name not in shares:
            continue
        mine = shares[op.name]
        reading = frozenset(t for t in mine.reads if (group[op.name], inside.contents(half.tensors[t])) not in own)
        spared = {}
        for t in op.outputs:
            if t is not None:
                only = t.name in kept[op.name].writes and t.name not in ahead[op.name].writes
                spared[t.name] = max(0.0, was[t.name] - now[t.name]) + only
        stored = mine.writes | {t.name for t in op.outputs if t is not None and t.name in alone}
        found[op.name] = Again(Share(reading, mine.writes, mine.launches and group[op.name] not in launched), spared, frozenset(stored))
    return found


def _at_hand(graph: Graph, rules: Mapping[str, Rule], looks: Looks, backward: list[Op]) -> list[Op]:
    """Ops of forward that lead to backward through nothing but fusible ops, and need nothing as large as what they make that backward does not read."""
    needed = {t.name for op in backward for t in op.inputs}
    has = {looks.root.get(n, n) for n in needed}
    leading = set()
    for op in reversed(graph.ops):
        if op.direction == "forward" and is_fusible(op, rules[op.name]) and any(t is not None and t.name in needed for t in op.outputs):
            leading.add(op.name)
            needed |= {t.name for t in op.inputs}
    made = {t.name: op for op in graph.ops for t in op.outputs if t is not None}
    found: dict[str, Op] = {}

    def is_there(t: Tensor) -> bool:
        root = looks.root.get(t.name, t.name)
        return root in has or root not in made or made[root].name in found

    for op in graph.ops:
        if op.name in leading:
            size = max((t.nbytes for t in op.outputs if t is not None), default=0)
            if is_view(op, rules[op.name]) or all(is_there(t) or t.nbytes < size for t in op.inputs):
                found[op.name] = op
    return list(found.values())


def _read_elsewhere(graph: Graph, looks: Looks, ours: set[str]) -> set[str]:
    """What others of forward read: where they run again too, as kernels of their own, it is in memory."""
    return {looks.root.get(t.name, t.name) for op in graph.ops if op.direction == "forward" and op.name not in ours for t in reads(op)}


def _half(graph: Graph, ops: tuple[Op, ...]) -> Graph:
    tensors = {t.name: t for op in ops for t in (*op.inputs, *op.outputs) if t is not None}
    return replace(graph, ops=ops, outputs=(), tensors=tensors)


def _times(looks: Looks, found: Iterable[Tensor], graph: Graph) -> Mapping[str, float]:
    """By tensor in memory, how often it is read, in parts of its size."""
    out: dict[str, float] = defaultdict(float)
    for t in found:
        root = looks.root.get(t.name, t.name)
        if root in graph.tensors:
            out[root] += t.numel / max(1, graph.tensors[root].numel)
    return out
