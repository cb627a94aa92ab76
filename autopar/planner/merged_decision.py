"""One decision about a program whose layers are cut into segments, of decisions about the same program without cuts: each segment does as one of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autopar.planner.formulation.formulated import Formulated
from autopar.solver.problem import Decision, Problem
from autopar.solver.shrink import CLONE

CLONES = re.compile(rf"{CLONE}\d+")


class Merged:
    """f, problem: without cuts, which `decisions` are about; g, cut: with them, at the same strategies."""

    def __init__(
        self,
        f: Formulated,
        problem: Problem,
        decisions: Sequence[Decision],
        g: Formulated,
        cut: Problem,
        of_segment: Mapping[str, Sequence[int]],
        ends: tuple[int, int],
    ) -> None:
        """of_segment: by stack, which decision each segment has; ends: which what is of no stack has, in front of all of them and behind the first."""
        self.f, self.problem, self.decisions, self.g, self.cut, self.of_segment, self.ends = f, problem, decisions, g, cut, of_segment, ends
        self.names = [s.name for s in g.program.q.stacks]
        self.place = {op.name: i for i, op in enumerate(g.program.graph.ops)}
        inside = [self.place[n] for n in g.program.stack_of]
        self.first, self.last = min(inside, default=0), max(inside, default=0)

    def run(self) -> Decision | None:
        kept: dict[int, frozenset[int]] = {}
        arcs: dict[tuple[int, int], frozenset[int]] = {}
        for v, value in enumerate(self.cut.values):
            tensor = self.g.program.q.members[value.name][0]
            decision, u = self.decision_of(tensor), self.value_of(tensor)
            if decision is None or u is None:
                return None
            for k in decision.kept.get(u, ()):
                same = self.policy(v, u, k)
                if same is None:
                    return None
                kept[v] = frozenset({same})
            for direction in (0, 1):
                found = self.arcs(v, u, direction, decision.arcs.get((u, direction), frozenset()))
                if found is None:
                    return None
                if found:
                    arcs[v, direction] = found
        known = {key: i for i, key in enumerate(self.f.names.reruns)}
        rerun = set()
        for i, (op, segment) in enumerate(self.g.names.reruns):
            copies = [c.name for c in self.g.program.copies[op] if self.g.program.q.segment[c.name] == segment]
            decision, j = self.decision_of(copies[0]), known.get((CLONES.sub("", op), 0))
            if decision is None or j is None:
                return None
            if j in decision.rerun:
                rerun.add(i)
        return Decision((0,) * len(self.cut.choices), kept, frozenset(rerun), arcs)

    def decision_of(self, name: str) -> Decision | None:
        """That of an operator's or a tensor's segment."""
        op = name.split(".")[0]
        stack = self.g.program.stack_of.get(op, -1)
        if stack >= 0:
            mine = self.of_segment.get(self.names[stack])
            return self.decisions[mine[self.g.program.q.segment[op]]] if mine else None
        at = self.place.get(op, 0)
        return self.decisions[self.ends[0 if at < self.first or at > self.last else 1]]

    def value_of(self, tensor: str) -> int | None:
        """In the program without cuts."""
        group = self.f.program.q.group.get(CLONES.sub("", tensor))
        return None if group is None else self.f.names.value_of.get(group)

    def policy(self, v: int, u: int, k: int) -> int | None:
        there = self.problem.values[u].policies[k]
        at = self.f.names.nodes[u][there.node]
        for i, p in enumerate(self.cut.values[v].policies):
            if p.medium == there.medium and self.g.names.nodes[v][p.node] == at:
                return i
        return None

    def arcs(self, v: int, u: int, direction: int, used: frozenset[int]) -> frozenset[int] | None:
        mine, theirs = (p.forward if direction == 0 else p.backward for p in (self.cut.values[v], self.problem.values[u]))
        if not used or theirs is None:
            return frozenset()
        if mine is None:
            return None
        known = {(self.g.names.nodes[v][a.src], self.g.names.nodes[v][a.dst], a.way, a.stays): i for i, a in enumerate(mine.arcs)}
        found = set()
        for a in used:
            arc = theirs.arcs[a]
            key = self.f.names.nodes[u][arc.src], self.f.names.nodes[u][arc.dst], arc.way, arc.stays
            if key in known:
                found.add(known[key])
        return frozenset(found)
