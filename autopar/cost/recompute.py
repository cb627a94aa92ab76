"""What memory-bound ops of forward move where they run again in backward, in company of the kernels there.

An op that runs again reads and writes other things than it did in forward: a gate before the sum that wants it is made in that sum's kernel, of what the kernel
reads anyway, and is in no memory at all (torch's min-cut partitioner calls that free). Next to a step in which nothing is done for what
is kept (`kept.py`),

    read      what the op is made of, down to what is kept or given: unless its kernel reads that already
    written   its result, if anything else than the first kernel that uses it reads it, or that is a product; then these others read it
    spared    the first kernel's read of what forward wrote anyway, if that kernel makes it itself

What is left of it may be less than nothing; then the price is `LEAST` of the op by itself: what is as good as free is not made again for nothing. That others run again too
is not looked at: then what is read in place of a result is read in place of several.

What lies on the way, which backward itself does not read, is paid for by those that are made of it. An op has no such price if it needs something as large as what it makes that
backward does not read otherwise: a sum of a product's result and what was before (that product's result would be kept in its place). It takes what it takes by itself, and what its
result takes to be read. But in place of what forward would not have written it may well be kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autopar.cost.fusion import Share, Storages, fused, is_fusible, kernels
from autopar.cost.kept import KeptOnly, kept_only
from autopar.cost.memory import is_view, reads
from autopar.graph.graph import Graph, Op, Tensor
from autopar.rules.grammar import Rule

LEAST = 1 / 1000


class RecomputeCost(NamedTuple):
    """moved: bytes to and from memory by the bytes of its results, less what is spared; launches: whether it is a kernel of its own; stored: results that may be in
    memory, whatever else runs again."""

    moved: float
    launches: bool
    stored: frozenset[str]


@dataclass(frozen=True)
class Halves:
    """Forward and backward compiled apart. recompute: ops of forward that backward makes again."""

    kept: KeptOnly = field(default_factory=KeptOnly)
    recompute: Mapping[str, RecomputeCost] = field(default_factory=dict)


def halves(graph: Graph, rules: Mapping[str, Rule], whole: Mapping[str, Share]) -> Halves:
    """whole: `fused` of the graph."""
    kept = kept_only(graph, rules, whole)
    return Halves(kept, _RecomputeCost(graph, rules, kept).run())


class _RecomputeCost:
    def __init__(self, graph: Graph, rules: Mapping[str, Rule], kept: KeptOnly) -> None:
        self.graph, self.rules, self.ahead, self.asides = graph, rules, kept.ahead, kept.asides
        self.storages = Storages(graph, rules)
        self.backward = [op for op in graph.ops if op.direction == "backward"]
        self.tensors = {t.name: t for op in graph.ops for t in (*op.inputs, *op.outputs) if t is not None}
        self.made = {t.name: op for op in graph.ops for t in op.outputs if t is not None}
        self.params = {t.name for t in graph.params.values()}
        self.group = kernels(graph, rules)
        self.ours, self.free = set[str](), set[str]()
        # Of what backward itself reads in memory: the first to do so, and in how many kernels. By kernel, all that it reads.
        self.first: dict[str, Op] = {}
        self.readers: dict[str, set[str]] = {}
        self.at_hand: dict[str, set[str]] = {}
        for op in self.backward:
            for t in reads(op) if op.name in self.group else ():
                root = self.root(t)
                self.first.setdefault(root, op)
                self.readers.setdefault(root, set()).add(self.group[op.name])
                self.at_hand.setdefault(self.group[op.name], set()).add(root)

    def run(self) -> dict[str, RecomputeCost]:
        ours = self.possible()
        self.ours = {op.name for op in ours}
        stored = self.stored(ours) if ours else {}
        return {op.name: self.of(op, stored[op.name]) for op in ours if op.name in stored}

    def root(self, t: Tensor) -> str:
        return self.storages.root.get(t.name, t.name)

    def of(self, op: Op, stored: frozenset[str]) -> RecomputeCost:
        results = [t for t in op.outputs if t is not None]
        moved, kept, launches = 0.0, 0.0, False
        sources = self.sources(op)
        for here, fuses in {(self.group[f.name], self.fuses(f)): None for t in results if (f := self.first.get(t.name)) is not None}:
            at_hand = self.at_hand[here] if fuses else ()
            moved += sum(share * self.tensors[n].nbytes for n, share in sources.items() if n not in at_hand)
            launches |= not fuses
        for t in results:
            if (first := self.first.get(t.name)) is not None:
                here, fuses = self.group[first.name], self.fuses(first)
                others = self.readers[t.name] - {here} if op.name not in self.storages.constant else ()
                moved += t.nbytes * (not fuses or bool(others))
                if (aside := self.asides.get(t.name)) is not None:
                    moved += t.nbytes * sum(part for r, part in aside.read.items() if not fuses or self.group[r] != here)
                    kept += t.nbytes * (1 + aside.made_of + sum(aside.read.values()))
                else:
                    moved -= t.nbytes * fuses
        if moved <= kept:
            # Then it is not kept: what its kernel reads is what it is made of, and so does what is made of it.
            self.free.add(op.name)
            for t in results:
                if (first := self.first.get(t.name)) is not None and self.fuses(first):
                    at_hand = self.at_hand[self.group[first.name]]
                    at_hand.discard(t.name)
                    at_hand.update(sources)
        return RecomputeCost(moved / max(1, sum(t.nbytes for t in results)), launches, stored)

    def fuses(self, op: Op) -> bool:
        return is_fusible(op, self.rules[op.name])

    def sources(self, op: Op) -> dict[str, float]:
        """What `op` is made of, down to what is kept or given, and how much of it. (Not parameters: those that a memory-bound op reads are small.)"""
        found: dict[str, float] = {}
        todo, seen = list[tuple[float, str]](), set[str]()

        def add(tensors: Iterable[Tensor], share: float) -> None:
            for t in tensors:
                root = self.root(t)
                if root not in seen:
                    heapq.heappush(todo, (-share * min(1.0, t.numel / max(1, self.tensors[root].numel)), root))

        add(reads(op), 1.0)
        while todo:  # the largest share first, so each is looked at once, however many ways lead to it
            share, root = heapq.heappop(todo)
            share = -share
            if root in seen:
                continue
            seen.add(root)
            maker = self.made.get(root)
            if maker is not None and maker.name in self.ours and (root not in self.first or maker.name in self.free):
                add(reads(maker), share)
            elif root not in self.params:
                found[root] = share
        return found

    def possible(self) -> list[Op]:
        """Ops of forward that lead to backward through nothing but fusible ops, and are made of nothing as large as they that backward does not read; or of nothing larger,
        if forward has what they are made of in memory and not what they make."""
        needed = {t.name for op in self.backward for t in op.inputs}
        leading = set()
        for op in reversed(self.graph.ops):
            fusible = op.direction == "forward" and self.fuses(op)
            if fusible and any(t is not None and t.name in needed for t in op.outputs):
                leading.add(op.name)
                needed |= {t.name for t in op.inputs}
        found: dict[str, Op] = {}
        unread: dict[str, dict[str, float]] = {}  # by op: what it is made of that backward does not read, and how much of it
        for op in self.graph.ops:
            if op.name not in leading:
                continue
            mine: dict[str, float] = {}
            for t in op.inputs:
                root = self.root(t)
                if root in self.made and root not in self.first:
                    share = min(1.0, t.numel / max(1, self.tensors[root].numel))
                    for n, x in unread.get(self.made[root].name, {root: 1.0}).items():
                        mine[n] = max(mine.get(n, 0.0), share * x)
            results = [t for t in op.outputs if t is not None]
            size = max((t.nbytes for t in [t for t in results if t.name in self.first] or results), default=0)
            more = sum(share * self.tensors[n].nbytes for n, share in mine.items())
            in_place = more == size and op.name in self.ahead and not self.ahead[op.name].writes and all(map(self.is_written, mine))
            if is_view(op, self.rules[op.name]) or more < size or in_place:
                found[op.name], unread[op.name] = op, mine
        # What lies on the way is paid for by what is made of it: all of that has to be here.
        readers: dict[str, set[str]] = {}
        for op in self.graph.ops:
            for t in op.inputs if op.direction == "forward" else ():
                readers.setdefault(t.name, set()).add(op.name)
        for op in reversed(self.graph.ops):
            names = {t.name for t in op.outputs if t is not None}
            if op.name in found and not names & self.first.keys() and any(readers.get(n, set()) - found.keys() for n in names):
                del found[op.name]
        return list(found.values())

    def is_written(self, name: str) -> bool:
        """By forward, though nothing is kept."""
        maker = self.made[name].name
        return maker not in self.ahead or name in self.ahead[maker].writes

    def stored(self, ours: list[Op]) -> dict[str, frozenset[str]]:
        """Results that are in memory if all of `ours` run again, or that others of forward read, which may run again too, as kernels of their own."""
        ops = (*(replace(op, direction="backward") for op in ours), *self.backward)
        tensors = {t.name: t for op in ops for t in (*op.inputs, *op.outputs) if t is not None}
        shares = fused(replace(self.graph, ops=ops, outputs=(), tensors=tensors), self.rules)
        rest = (op for op in self.graph.ops if op.direction == "forward" and op.name not in self.ours)
        alone = {self.root(t) for op in rest for t in reads(op)}
        return {op.name: shares[op.name].writes | _named(op, alone) for op in ours if op.name in shares}


def _named(op: Op, names: Iterable[str]) -> frozenset[str]:
    return frozenset(t.name for t in op.outputs if t is not None).intersection(names)
