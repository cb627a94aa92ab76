"""Plans between the fastest and the one of least memory, and what changes from one to the next: `plan.frontier()`.

How they are found is in `autopar.planner.budgets`; here is what people see of them.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.graph.graph import Graph, Op
from autopar.hardware.cluster import Cluster
from autopar.plan.decisions import OFFLOAD
from autopar.plan.diff import parameters
from autopar.plan.plan import Plan
from autopar.plan.text import HEAVY, LAYER, strategy
from autopar.planner.budgets import Budgets
from autopar.planner.collecting import without_garbage_collection
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.found import Found
from autopar.planner.layout import Layout
from autopar.planner.planning import Step, does_not_fit, plan_of
from autopar.rules import lookup
from autopar.solver.fold import Folded
from autopar.solver.problem import DEVICE
from autopar.solver.solve import Infeasible, Limits, Solution
from autopar.text.sizes import format_bytes
from autopar.text.times import format_time

SAVE, RECOMPUTE, UNUSED = "save", "recompute", "not needed"
SHOWN = 8  # changes from one point to the next, in the text


@dataclass(frozen=True)
class Point:
    """A plan of the frontier. bound_s: no plan of this peak is faster. changes: what the next point, which is slower, does otherwise."""

    peak_memory_bytes: float
    step_time_s: float
    bound_s: float
    plan: Plan
    changes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        return max(0.0, 1 - self.bound_s / self.step_time_s)


@dataclass(frozen=True)
class Frontier:
    """points: the fastest first; each needs less memory and more time than the one before. usable_bytes: what the device has, less its reserve. seconds: that
    the search took; complete: whether it ended by itself, with as many points as were wanted or with all there are."""

    points: tuple[Point, ...]
    usable_bytes: float
    where: str
    seconds: float
    complete: bool = True

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """A line for every point, and under it what changes on the way to the next."""
        first = self.points[0].step_time_s
        many = f"{len(self.points)} plans" if len(self.points) > 1 else "1 plan"
        lines = [
            f"{many} between the fastest and least memory, {self.where}" + ("" if self.complete else " (the time limit ended the search)")
        ]
        lines.append(f"{'peak memory':>12}  {'step time':>15}  {'slower':>8}  {'within':>7}  of the bound for this memory")
        for p in self.points:
            fits = "" if p.peak_memory_bytes <= self.usable_bytes else f"  more than the {format_bytes(self.usable_bytes)} of a device"
            slower = f"{p.step_time_s / first - 1:.2%}"
            lines.append(f"{format_bytes(p.peak_memory_bytes):>12}  {format_time(p.step_time_s):>15}  {slower:>8}  {p.gap:>7.2%}{fits}")
            lines += [f"    {change}" for change in p.changes[:SHOWN]]
            lines += [f"    and {len(p.changes) - SHOWN} more changes"] if len(p.changes) > SHOWN else []
        return "\n".join(lines)

    def to_json(self) -> str:
        """All of it but the plans."""
        points = [
            {
                "peak_memory_bytes": p.peak_memory_bytes,
                "step_time_s": p.step_time_s,
                "bound_s": p.bound_s,
                "gap": p.gap,
                "changes": p.changes,
            }
            for p in self.points
        ]
        about = {"where": self.where, "usable_bytes": self.usable_bytes, "seconds": self.seconds, "complete": self.complete}
        return json.dumps({**about, "points": points}, indent=1)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws it into an HTML file that needs no network; what changes is shown under the pointer."""
        try:
            import plotly.graph_objects as go
        except ImportError as e:
            raise AutoparError("a plot needs plotly, which is not installed", fix='pip install "autopar[report]"') from e
        x = [p.peak_memory_bytes / 1e9 for p in self.points]
        said = [
            "<br>".join(
                [
                    f"{a:.2f} GB, {format_time(p.step_time_s)}, within {p.gap:.2%}",
                    *(p.changes[:SHOWN] and ("to the next:", *p.changes[:SHOWN])),
                ]
            )
            for a, p in zip(x, self.points, strict=True)
        ]
        figure = go.Figure()
        figure.add_scatter(
            x=x,
            y=[p.step_time_s * 1e3 for p in self.points],
            text=said,
            hoverinfo="text",
            mode="lines+markers",
            name="plans",
            line_shape="vh",
        )
        figure.add_scatter(
            x=x, y=[p.bound_s * 1e3 for p in self.points], hoverinfo="skip", mode="lines", name="no plan is faster", line_dash="dot"
        )
        if x[-1] <= self.usable_bytes / 1e9 <= x[0]:
            figure.add_vline(self.usable_bytes / 1e9, annotation_text="a device has", line_dash="dash")
        figure.update_layout(title=self.where, xaxis_title="peak memory of a device, GB", yaxis_title="step time, ms", xaxis_type="log")
        try:
            Path(path).write_text(figure.to_html(include_plotlyjs=True), encoding="utf-8")
        except OSError as e:
            raise AutoparError(f"the plot cannot be written: {e}", fix="name a file in a folder that exists and can be written") from e


def frontier_graph(
    graph: Graph | Folded,
    mesh_axes: Mapping[str, int],
    cluster: Cluster,
    training: TrainingConfig,
    points: int = 20,
    limits: Limits | None = None,
    progress: Callable[[str, float], None] | None = None,
    layout: str | Layout | None = None,
    most_bytes: float = math.inf,
    known: Sequence[Found] = (),
    finish: Callable[[Plan], Plan] = lambda plan: plan,
) -> Frontier:
    """The frontier of a step; its budget is not looked at. The other arguments are as of `plan_graph`.

    points: at most so many. most_bytes: no plan that needs more. known: answers that were found before. finish: what makes plans of the folded step plans
    of the program. The solver's seconds are for all points. Raises InfeasibleError where no plan keeps to `most_bytes`.
    """
    if isinstance(points, bool) or not isinstance(points, int) or points < 2:
        raise AutoparError(
            f"a frontier of {points!r} points cannot be", fix="ask for at least 2: the fastest plan and the one of least memory"
        )
    start = time.perf_counter()
    step = Step.of(graph, mesh_axes, cluster, training, limits, progress, layout)
    step.stages.start = start
    with step.in_time(), without_garbage_collection():
        budgets = Budgets(step.stages)
        answers = budgets.frontier(points, most_bytes, known)
    if isinstance(answers, Infeasible):
        raise does_not_fit(answers, step)
    late = budgets.late
    plans = [finish(plan_of(step, a.item, a.peak_bytes)) for a in answers]
    kept = [policies(a.item) for a in answers]
    out = []
    for i, (a, plan) in enumerate(zip(answers, plans, strict=True)):
        changes = [*moved(kept[i], kept[i + 1]), *resharded(plan, plans[i + 1])] if i + 1 < len(answers) else []
        out.append(Point(a.peak_bytes, a.time_s, a.bound_s, plan, tuple(changes)))
    where = f"{cluster.name}, mesh {' x '.join(f'{n}={s}' for n, s in mesh_axes.items())}"
    return Frontier(tuple(out), cluster.device.usable_bytes, where, time.perf_counter() - start, len(out) >= points or not late)


# ---- what changes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyCounts:
    """Of the tensors of a class: how many of the program have which policy. module: its path, layers starred; size: bytes of them all."""

    module: str
    what: str
    heavy: bool
    size: float
    counts: Counter[str]


def policies(found: Found) -> dict[str, PolicyCounts]:
    """What of forward backward needs, by class of tensors."""
    assert isinstance(found.answer, Solution)
    problem, decision, q = found.problem, found.answer.decision, found.names.symmetry
    recompute = {found.names.reruns[i] for i in decision.rerun}
    out: dict[str, PolicyCounts] = {}
    for op in q.graph.ops:
        for t in op.outputs if op.direction == "forward" else ():
            v = found.names.value_of.get(q.group[t.name]) if t is not None else None
            if t is None or v is None or not problem.values[v].policies:
                continue
            if kept := decision.kept.get(v):
                medium = problem.values[v].policies[min(kept)].medium
                policy = SAVE if medium == DEVICE else f"{OFFLOAD}{medium}"
            else:
                policy = RECOMPUTE if (q.rep[op.name], q.segment[op.name]) in recompute else UNUSED
            rep = q.tensor_rep[t.name]
            if rep not in out:
                out[rep] = PolicyCounts(*_named(op), lookup(op).kind in HEAVY, float(t.nbytes), Counter())
            out[rep].counts[policy] += q.tensor_times[t.name]
    return out


def _named(op: Op) -> tuple[str, str]:
    return LAYER.sub("*", op.module), op.target.split(".")[1]


def moved(a: Mapping[str, PolicyCounts], b: Mapping[str, PolicyCounts]) -> list[str]:
    """What `b` keeps, moves away or makes again where `a` does not, the largest first. What is made again only because something else is, is told of heavy operators."""
    found: dict[tuple[str, int, str], list[tuple[float, str]]] = {}
    for rep in {**a, **b}:
        mine = a.get(rep) or b[rep]
        before, after = (side[rep].counts if rep in side else Counter[str]() for side in (a, b))
        less, more = before - after, after - before
        while less and more:
            (x, n), (y, m) = less.most_common(1)[0], more.most_common(1)[0]
            n = min(n, m)
            less, more = less - Counter({x: n}), more - Counter({y: n})
            if mine.heavy or not {x, y} <= {RECOMPUTE, UNUSED}:
                found.setdefault((mine.module, n, f"{x} -> {y}"), []).append((mine.size * n, mine.what))
    ranked = sorted(found.items(), key=lambda row: (-sum(size for size, _ in row[1]), row[0]))
    return [f"{_who(module, [what for _, what in of])}{f' x {n} layers' if n > 1 else ''}: {change}" for (module, n, change), of in ranked]


def _who(module: str, whats: list[str]) -> str:
    return " ".join(x for x in (module, whats[0] if len(whats) == 1 else f"({len(whats)} tensors)") if x)


def resharded(a: Plan, b: Plan) -> list[str]:
    """Heavy operators that `b` splits otherwise than `a`, and parameters that it stores or reads otherwise."""
    lines: dict[str, Any] = {}
    for op, module in a.modules.items():
        x, y = a.ops.get(op), b.ops.get(op)
        if x is not None and y is not None and x.kind in HEAVY and x != y:
            target = a.targets.get(op, op).rsplit(".", 1)[0]
            before, after = strategy(a, target, x), strategy(b, target, y)
            if before != after:
                lines[f"{LAYER.sub('*', module)} {target.split('.')[-1]}: {before} -> {after}"] = None
    return [*lines, *(f"parameter {line}" for line in parameters(a, b))]
