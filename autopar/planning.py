"""From a captured graph to a plan: formulate, solve, apply. Needs no process group and no weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.formulate.apply import apply, blocking
from autopar.formulate.layouts import by_role, forbidden
from autopar.formulate.problem import Names, Setting
from autopar.graph import Graph
from autopar.infeasible import InfeasibleError
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.refit import modules_of
from autopar.rules.grammar import Rule
from autopar.solver.fold import Folded, fold
from autopar.solver.problem import Problem
from autopar.solver.solve import Infeasible, Limits, Solution
from autopar.staged import Stages


@dataclass(frozen=True)
class Planned:
    plan: Plan
    solution: Solution


def plan_graph(
    graph: Graph | Folded,
    mesh_axes: Mapping[str, int],
    cluster: Cluster,
    setting: Setting,
    limits: Limits | None = None,
    progress: Callable[[str, float], None] | None = None,
    layout: str | Layout | None = None,
) -> Planned:
    """The best plan for `graph` on a mesh of `cluster`'s devices, under `setting.budget_bytes`.

    graph: as captured, or folded already (from shallow captures of a deep program: `autopar.tile`). layout: the best plan that is this hand
    layout (`autopar.formulate.layouts` says what that leaves to choose).

    Raises InfeasibleError naming the position of the step that does not fit, by how much, and what would help; LayoutError when the model
    or the mesh does not allow the layout.
    """
    mesh = Mesh.of(dict(mesh_axes))
    tell = progress or (lambda stage, seconds: None)
    start = time.perf_counter()
    folded = fold(graph) if isinstance(graph, Graph) else graph
    tell("fold", time.perf_counter() - start)
    hand = None if layout is None else Layout.of(layout, mesh)

    def restrict(problem: Problem, names: Names, rules: Mapping[str, Rule], on: Mesh) -> Problem:
        return problem if hand is None else replace(problem, forbidden=problem.forbidden | forbidden(hand, problem, names, rules, on, mesh))

    try:
        done = Stages(folded, mesh if hand is None else by_role(hand, mesh), cluster, setting, limits, tell, restrict).run()
    except TimeoutError as e:
        raise AutoparError(
            f"The solver found no plan: {e}",
            where=f"{len(folded.count)} kinds of operators on {' x '.join(map(str, mesh.parents.values()))} devices",
            fix="give it more time (--time-limit), fewer layers (--layers) or a mesh with fewer axes",
        ) from e
    found = done.answer
    if isinstance(found, Infeasible):
        raise InfeasibleError(
            constraint=f"memory, {found.position}",
            shortfall_bytes=int(found.shortfall_bytes),
            remedy=f"{found.least_bytes / 1e9:.2f} GB a device would do; or more devices, a smaller batch or shorter sequences",
        )
    plan = apply(folded, done.shrunk, done.rules, mesh, setting, done.problem, done.names, found.decision)
    stages = dict(zip((f"{s}_s" for s in done.problem.stages), found.price.stage_s, strict=True))
    everyone = {op.name: op for op in (*done.shrunk.graph.ops, *folded.graph.ops)}
    again = {t.name: "recompute" for n in plan.ops if n in plan.recompute for t in everyone[n].outputs if t is not None}
    plan = replace(
        plan,
        layout=plan.layout if hand is None else hand.name,
        cluster=cluster.name,
        modules=modules_of(folded.graph),
        activations={**again, **dict.fromkeys(plan.kept, "save")},
        predicted={
            "step_time_s": found.objective_s,
            **stages,
            "peak_memory_bytes": max(found.price.row_bytes),
            "blocking_collectives": blocking(done.problem, done.names, found.decision),
            "budget_bytes": min(setting.budget_bytes, cluster.device.memory_bytes),
        },
        solver={
            "objective_s": found.objective_s,
            "bound_s": found.bound_s,
            "gap": found.gap,
            "stopped_by": found.stopped_by,
            "seconds": found.seconds,
            "variables": found.variables,
            "rows": found.rows,
        },
    )
    return Planned(plan, found)
