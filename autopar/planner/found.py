"""An answer of the planner, and which of two is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.graph.mesh import Mesh
from autopar.planner.formulation.formulated import Formulated
from autopar.planner.formulation.names import Names
from autopar.rules.grammar import Rule
from autopar.solver.problem import Decision, Problem
from autopar.solver.shrink import Shrunk
from autopar.solver.solve import Infeasible, Solution


@dataclass(frozen=True)
class Found:
    """problem, names: of the program that was answered last; shrunk, rules: of its graph; mesh: whose axes may be merged; formulated: what `problem` was made of;
    strategies: that were chosen, of all that there are (`Formulator.of_all`), none where nothing fits."""

    mesh: Mesh
    problem: Problem
    names: Names
    shrunk: Shrunk
    rules: Mapping[str, Rule]
    answer: Solution | Infeasible
    formulated: Formulated
    strategies: tuple[int, ...] = ()


def is_within(found: Found | None, gap: float) -> bool:
    """Whether there is an answer, and it is as near to its bound as that, relatively."""
    return found is not None and isinstance(found.answer, Solution) and found.answer.gap <= gap


def better(a: Solution | Infeasible, b: Solution | Infeasible) -> bool:
    """Whether `a` is faster than `b`, or needs less memory where neither fits."""
    if isinstance(a, Solution):
        return not isinstance(b, Solution) or a.objective_s < b.objective_s
    return isinstance(b, Infeasible) and a.least_bytes < b.least_bytes


def is_recomputed(problem: Problem, decision: Decision) -> bool:
    """Whether anything that takes time does."""
    return any(t for r in decision.rerun for t in problem.reruns[r].times[decision.strategies[problem.reruns[r].choice]].values())


def arcs_of(problem: Problem) -> int:
    return sum(len(flow.arcs) for value in problem.values for flow in (value.forward, value.backward) if flow)
