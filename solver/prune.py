"""Leaves out of a Problem what no answer as good as a known one can have.

Given a bound that counts neither redistributions nor what a strategy takes more than the fastest of its choice, every answer takes at
least that bound, plus the excess of each of its strategies, plus the blocking time of each of its arcs, all on the account that every stage's work
occupies. So a strategy or an arc that alone brings the bound above the known answer is in no better one. What a strategy cannot do without
counts with it: for each value that it reads, the cheapest way there from where any remaining strategy supplies it. Repeated until nothing changes.

This is consistency by costs, as in weighted constraint satisfaction; it is exact: an optimum below `upper_s` is an optimum of what is left.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from autopar.solver.problem import NONE, End, Flow, Problem, Times, Value


def prune(problem: Problem, lower_s: float, upper_s: float, resource: str = "compute") -> Problem:
    """`problem` with strategies forbidden and arcs left out. lower_s: a bound as said above; upper_s: a known answer's time."""
    room = upper_s - lower_s
    busy = {i for i, a in enumerate(problem.accounts) if a.resource == resource}

    def blocking(times: Times) -> float:
        return sum(t for a, t in times.items() if a in busy)

    allowed = [{s for s in range(len(c.labels)) if (i, s) not in problem.forbidden} for i, c in enumerate(problem.choices)]
    excess = []
    for c, choice in enumerate(problem.choices):
        times = [blocking(t) for t in choice.times]
        least = min(times)
        excess.append([t - least for t in times])
        allowed[c] = {s for s in allowed[c] if excess[c][s] <= room}
    flows = [_Flow(v, d, value, problem) for v, value in enumerate(problem.values) for d in (0, 1) if value.backward is not None or d == 0]
    for f in flows:
        f.arcs = [(arc.src, arc.dst, t) for arc in f.flow.arcs if (t := blocking(arc.times)) <= room]
    changed = True
    while changed:
        changed = False
        # What a strategy must pay to read: over the values it reads, the cheapest way there. A value that a choice reads in several ways counts once.
        must: list[dict[int, float]] = [defaultdict(float) for _ in problem.choices]
        for f in flows:
            ways = f.ways(allowed)
            for c, ends in f.demands.items():
                for s in allowed[c]:
                    must[c][s] += max((ways.get(end.nodes[s], float("inf")) for end in ends if end.nodes[s] != NONE), default=0.0)
        for c in range(len(problem.choices)):
            out = {s for s in allowed[c] if excess[c][s] + must[c][s] > room}
            if out:
                allowed[c] -= out
                changed = True
    forbidden = frozenset((c, s) for c, choice in enumerate(problem.choices) for s in range(len(choice.labels)) if s not in allowed[c])
    values = list(problem.values)
    for f in flows:
        have, want = f.supplied(allowed), f.wanted(allowed)
        kept = tuple(arc for arc in f.flow.arcs if arc.src in have | want and arc.dst in want and blocking(arc.times) <= room)
        flow, value = replace(f.flow, arcs=kept), values[f.v]
        values[f.v] = replace(value, backward=flow) if f.direction else replace(value, forward=flow)
    return replace(problem, values=tuple(values), forbidden=forbidden)


class _Flow:
    arcs: list[tuple[int, int, float]]

    def __init__(self, v: int, direction: int, value: Value, problem: Problem) -> None:
        self.v, self.direction, self.value = v, direction, value
        flow = value.backward if direction else value.forward
        assert flow is not None
        self.flow: Flow = flow
        self.demands: dict[int, list[End]] = defaultdict(list)
        for end in flow.demands:
            self.demands[end.choice].append(end)
        self.remade = [(r.choice, nodes) for r in problem.reruns for w, nodes in r.makes if w == v] if direction else []
        self.reread = [(r.choice, nodes) for r in problem.reruns for w, nodes in r.reads if w == v] if direction else []

    def supplied(self, allowed: list[set[int]]) -> set[int]:
        ends = [(e.choice, e.nodes) for e in self.flow.supplies] + self.remade
        out = {nodes[s] for c, nodes in ends for s in allowed[c]}
        if self.direction:
            forward = self.value.forward
            there = {e.nodes[s] for e in (*forward.supplies, *forward.demands) for s in allowed[e.choice]}
            out |= there & {policy.node for policy in self.value.policies}
            out |= {arc.dst for arc in forward.arcs if arc.stays and arc.dst in there}
        return out - {NONE}

    def wanted(self, allowed: list[set[int]]) -> set[int]:
        ends = [(e.choice, e.nodes) for e in self.flow.demands] + self.reread
        return {nodes[s] for c, nodes in ends for s in allowed[c]} - {NONE}

    def ways(self, allowed: list[set[int]]) -> dict[int, float]:
        """Node -> the least that the last arc to it takes; 0 where it is supplied. (Others may share earlier arcs; the last one is its own.)"""
        have, want = self.supplied(allowed), self.wanted(allowed)
        out = dict.fromkeys(have, 0.0)
        for src, dst, t in self.arcs:
            if src in have or src in want:
                out[dst] = min(out.get(dst, float("inf")), t)
        return out
