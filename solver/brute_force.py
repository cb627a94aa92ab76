"""The exhaustive oracle: every strategy, every kept node, every set of reruns, every least set of arcs. For tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from autopar.solver.evaluate import evaluate, reach, supplied_nodes, wanted_nodes
from autopar.solver.problem import BACKWARD, FORWARD, Decision, Flow, Problem


def brute_force(problem: Problem) -> tuple[float, Decision | None]:
    """The best objective and a decision that has it; (inf, None) when nothing is feasible."""
    best, answer = float("inf"), None
    for decision in decisions(problem):
        price = evaluate(problem, decision)
        if price.feasible and price.objective_s < best - 1e-12:
            best, answer = price.objective_s, decision
    return best, answer


def decisions(problem: Problem) -> Iterator[Decision]:
    """Every decision that meets its demands with no arc to spare (prices and bytes are never negative: a spare arc does not help)."""
    flows = [
        (v, d, f)
        for v, value in enumerate(problem.values)
        for d, f in ((FORWARD, value.forward), (BACKWARD, value.backward))
        if f is not None
    ]
    policies = [[None, *range(len(value.policies))] for value in problem.values]
    for x in itertools.product(*(range(len(c.labels)) for c in problem.choices)):
        for chosen in itertools.product(*policies):
            kept = {v: frozenset({k}) for v, k in enumerate(chosen) if k is not None}
            for rerun in _subsets(range(len(problem.reruns))):
                bare = Decision(x, kept, frozenset(rerun))
                sets = [[((v, d), a) for a in _least(problem, bare, v, d, f)] for v, d, f in flows]
                for arcs in itertools.product(*sets):
                    yield Decision(x, kept, frozenset(rerun), {k: a for k, a in arcs if a})


def _least(problem: Problem, bare: Decision, v: int, direction: int, flow: Flow) -> list[frozenset[int]]:
    """The sets of arcs that bring every wanted node and contain no smaller such set. An arc to a node that nobody wants is in none."""
    wanted = wanted_nodes(problem, bare, v, direction, flow)
    have = supplied_nodes(problem, bare, v, direction, flow)
    out: list[frozenset[int]] = []
    for some in _subsets([a for a, arc in enumerate(flow.arcs) if arc.dst in wanted - have]):
        arcs = frozenset(some)
        if not any(smaller <= arcs for smaller in out) and wanted <= reach(have, wanted, flow, arcs):
            out.append(arcs)
    return out


def _subsets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for k in range(len(items) + 1):
        yield from itertools.combinations(items, k)
