"""What no plan of a program's other form takes less than, from the programs that the plan of the first was found with."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace

from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.planner.formulation.instead import Instead
from autopar.planner.formulation.lower_bound import not_of_parameters
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.stages import Stages
from autopar.solver.fold import Folded
from autopar.solver.frontier import Relaxation
from autopar.solver.problem import Problem

SECONDS = 10.0  # for one relaxation: what it may save is to plan the other form


def instead_of(graph: Folded, other: Folded, mesh_axes: Mapping[str, int], cluster: Cluster, training: TrainingConfig) -> Instead:
    """What `other`, a program in another form, has that `graph` does not have, in place of what only that has."""
    v = Stages(other, Mesh.of(dict(mesh_axes)), cluster, training).view()
    took = {"forward": 0.0, "backward": 0.0}
    for op in not_of_parameters(v.shrunk.graph):
        if op.name not in graph.rep:
            took[op.direction] += v.shrunk.times[op.name] * v.cost.least_s(op, v.rules[op.name])
    first = Stages(graph, Mesh.of(dict(mesh_axes)), cluster, training).view()
    least_s = {
        op.name: first.shrunk.times[op.name] * first.cost.least_s(op, first.rules[op.name]) for op in not_of_parameters(first.shrunk.graph)
    }
    return Instead(frozenset(graph.rep) - frozenset(other.rep), took["forward"], took["backward"], least_s)


def bound_instead(stages: Stages, instead: Instead) -> float:
    """Seconds that no plan of the other form takes less than; 0 where the first form's plan was found without a program that says it, or this takes too long.

    stages: that the first form was planned by."""
    graph, bound_s = stages.view().shrunk.graph, 0.0

    def least_s(problem: Problem) -> float:
        found = Relaxation(problem).at(stages.training.budget_bytes, replace(stages.left, seconds=SECONDS))
        return math.inf if found is None else found.tangent.at_s

    with stages.timed("bound of the other form"), contextlib.suppress(TimeoutError):
        if stages.coarse is not None:
            bound_s = least_s(stages.coarse_problem(instead))
        if (b := stages.bounding) is not None:
            # What was left out is slower by the coarse bound; of the other form, by as much less as that is less.
            bound_s = max(bound_s, b.with_left_out(least_s(instead.problem(b.problem, b.names, graph)), bound_s))
    return bound_s if math.isfinite(bound_s) else 0.0
