"""From a captured graph to a plan: formulate, solve, apply. Needs no process group and no weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autopar.cluster import Cluster
from autopar.cost import Cost
from autopar.cost.fusion import fused
from autopar.errors import AutoparError
from autopar.formulate.apply import apply
from autopar.formulate.problem import Setting, formulate
from autopar.formulate.quotient import quotient
from autopar.graph import Graph
from autopar.infeasible import InfeasibleError
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.rules import lookup
from autopar.solver.fold import Folded, fold
from autopar.solver.shrink import shrink
from autopar.solver.solve import Infeasible, Limits, Solution, solve


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
) -> Planned:
    """The best plan for `graph` on a mesh of `cluster`'s devices, under `setting.budget_bytes`.

    graph: as captured, or folded already (from shallow captures of a deep program: `autopar.tile`).

    Raises InfeasibleError naming the position of the step that does not fit, by how much, and what would help.
    """
    mesh = Mesh.of(dict(mesh_axes))
    tell = progress or (lambda stage, seconds: None)
    start = time.perf_counter()
    folded = fold(graph) if isinstance(graph, Graph) else graph
    tell("fold", time.perf_counter() - start)
    start = time.perf_counter()
    small = shrink(folded)
    rules = {op.name: lookup(op) for op in small.graph.ops}
    cost = Cost(cluster, mesh, fused(small.graph, rules))
    problem, names = formulate(quotient(small), rules, mesh, cost, setting)
    tell("formulate", time.perf_counter() - start)
    try:
        found = solve(problem, limits, progress=progress)
    except TimeoutError as e:
        raise AutoparError(
            f"The solver found no plan: {e}",
            where=f"{sum(len(c.labels) for c in problem.choices)} strategies of {len(problem.choices)} choices",
            fix="give it more time (--time-limit), fewer layers (--layers) or a mesh with fewer axes",
        ) from e
    if isinstance(found, Infeasible):
        raise InfeasibleError(
            constraint=f"memory, {found.position}",
            shortfall_bytes=int(found.shortfall_bytes),
            remedy=f"{found.least_bytes / 1e9:.2f} GB a device would do; or more devices, a smaller batch or shorter sequences",
        )
    plan = apply(folded, small, rules, mesh, setting, problem, names, found.decision)
    stages = dict(zip((f"{s}_s" for s in problem.stages), found.price.stage_s, strict=True))
    again = {t.name: "recompute" for op in folded.graph.ops if op.name in plan.recompute for t in op.outputs if t is not None}
    plan = replace(
        plan,
        cluster=cluster.name,
        activations={**again, **dict.fromkeys(plan.kept, "save")},
        predicted={
            "step_time_s": found.objective_s,
            **stages,
            "peak_memory_bytes": max(found.price.row_bytes),
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
