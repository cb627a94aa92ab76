"""The exhaustive oracle: every strategy, every kept node, every set of reruns, every least set of arcs. For tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

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
    policies = [[None, *range(len(value.policies))] for value in problem.values]
    for x in itertools.product(*(range(len(c.labels)) for c in problem.choices)):
        for chosen in itertools.product(*policies):
            kept = {v: frozenset({k}) for v, k in enumerate(chosen) if k is not None}
            for rerun in _subsets(range(len(problem.reruns))):
                bare = Decision(x, kept, frozenset(rerun))
                for arcs in itertools.product(*(_arcs(problem, bare, v) for v in range(len(problem.values)))):
                    yield Decision(x, kept, frozenset(rerun), {k: a for both in arcs for k, a in both.items() if a})


def _arcs(problem: Problem, bare: Decision, v: int) -> list[dict[tuple[int, int], frozenset[int]]]:
    """Of one value, in both directions: what stays of forward is there in backward."""
    value, out = problem.values[v], list[dict[tuple[int, int], frozenset[int]]]()
    for ahead in _least(problem, bare, v, FORWARD, value.forward):
        found = {(v, FORWARD): ahead}
        if value.backward is None:
            out.append(found)
        else:
            known = replace(bare, arcs=found)
            out += [{**found, (v, BACKWARD): back} for back in _least(problem, known, v, BACKWARD, value.backward)]
    return out


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
