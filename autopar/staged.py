"""Solves a step on a mesh, in as few programs as give an answer and a bound.

One and two axes. First the program with the memory rows outside of the layers alone (`loose`): whatever fate each layer has, there all that they
keep is held, so this bounds all plans; where memory does not bind inside of them either, its answer is the answer. Else, at its strategies,
the layers are cut into segments with fates of their own; and if the gap is still too large, strategies are chosen under all rows.

Three axes and more. An operator has tens of strategies there and a tensor as many placements, and redistributions between all of them: the
program is too large for a user to wait for. But few good plans use every axis for something else. So axes are merged: first all into
one, then into two; each is the same problem with fewer strategies, at the same prices, and its answer is an answer of the
whole. How good it is is said against a bound of the whole (`formulate.ideal`); merging ends as soon as the gap is reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cluster import Cluster
from autopar.cost import Cost
from autopar.cost.fusion import fused
from autopar.formulate.ideal import ideal
from autopar.formulate.problem import Formulator, Names, Setting
from autopar.formulate.quotient import Quotient, quotient
from autopar.mesh import Mesh
from autopar.rules import lookup
from autopar.rules.grammar import Rule
from autopar.solver.fold import Folded
from autopar.solver.problem import Problem
from autopar.solver.shrink import Shrunk, shrink
from autopar.solver.solve import Infeasible, Limits, Solution, explain, least, look, solve

WHOLE_AXES = 2  # up to so many axes the whole program is solved
WORTH = 1e-3  # a gap, relative, that cutting the layers into segments is tried for
CUTS = 8  # so many parts of the layers a cut is first looked for at
Tell = Callable[[str, float], None]
Restrict = Callable[[Problem, Names, Mapping[str, Rule], Mesh], Problem]


@dataclass(frozen=True)
class Found:
    """problem, names: of the program that was answered last; shrunk, rules: of its graph."""

    problem: Problem
    names: Names
    shrunk: Shrunk
    rules: Mapping[str, Rule]
    answer: Solution | Infeasible


@dataclass(frozen=True)
class _View:
    shrunk: Shrunk
    q: Quotient
    rules: Mapping[str, Rule]
    cost: Cost


class Stages:
    """One folded step on one mesh. restrict: takes strategies away (a layout)."""

    def __init__(
        self,
        folded: Folded,
        mesh: Mesh,
        cluster: Cluster,
        setting: Setting,
        limits: Limits | None = None,
        tell: Tell | None = None,
        restrict: Restrict | None = None,
    ) -> None:
        self.folded, self.mesh, self.cluster, self.setting = folded, mesh, cluster, setting
        self.limits, self.tell, self.restrict = limits or Limits(), tell or (lambda stage, seconds: None), restrict
        self.start = time.perf_counter()

    def view(self, segments: Mapping[str, Sequence[int]] | None = None) -> _View:
        small = shrink(self.folded, segments)
        rules = {op.name: lookup(op) for op in small.graph.ops}
        return _View(small, quotient(small), rules, Cost(self.cluster, self.mesh, fused(small.graph, rules)))

    def formulated(self, v: _View, mesh: Mesh, only: Sequence[int] | None = None) -> tuple[Formulator, Problem]:
        began = time.perf_counter()
        f = Formulator(v.q, v.rules, mesh, v.cost, self.setting, only)
        problem, names = f.run()
        if self.restrict is not None and only is None:
            problem = self.restrict(problem, names, v.rules, mesh)
        if only is None:
            self.tell(f"formulate {_axes(mesh)}", time.perf_counter() - began)
        return f, problem

    @property
    def left(self) -> Limits:
        return replace(self.limits, seconds=max(1.0, self.limits.seconds - (time.perf_counter() - self.start)))

    def run(self) -> Found:
        """Raises TimeoutError when the clock stopped before any answer."""
        self.start = time.perf_counter()
        v = self.view()
        whole = sum(n > 1 for n in self.mesh.parents.values()) <= WHOLE_AXES
        return self.on(v, self.mesh) if whole else self.by_merging(v)

    # ---- one program -----------------------------------------------------------------------------------------------

    def on(self, v: _View, mesh: Mesh) -> Found:
        start = time.perf_counter()
        f, problem = self.formulated(v, mesh)
        seen = look(loose(problem, v.shrunk), problem, self.left, self.tell)
        if seen is None:
            return self.poor(v, mesh, f, problem, -1.0, None)
        again = {
            r for r in seen.decision.rerun if any(problem.reruns[r].times[seen.decision.strategies[problem.reruns[r].choice]].values())
        }
        if seen.price is not None and seen.price.feasible and not again:
            spent = time.perf_counter() - start
            answer = Solution(seen.decision, seen.price, seen.bound_s, spent, seen.stopped_by, seen.variables, seen.rows)
            return Found(problem, f.names, v.shrunk, v.rules, answer)
        began = time.perf_counter()
        best = self.cut(mesh, seen.decision.strategies, seen.bound_s, None)
        self.tell("segments", time.perf_counter() - began)
        if best is None or not isinstance(best.answer, Solution) or best.answer.gap > self.limits.gap:
            best = self.tight(v, mesh, f, problem, seen.bound_s, best)
        if isinstance(best.answer, Solution):
            spent = time.perf_counter() - start
            stopped = "cuts" if best.answer.gap > self.limits.gap and best.answer.stopped_by == "gap" else best.answer.stopped_by
            best = replace(best, answer=replace(best.answer, seconds=spent, stopped_by=stopped, variables=seen.variables, rows=seen.rows))
        return best

    def tight(self, v: _View, mesh: Mesh, f: Formulator, problem: Problem, bound_s: float, best: Found | None) -> Found:
        """Strategies chosen under all rows, as if layers shared their fates; then the layers cut at these strategies."""
        try:
            answer = solve(problem, self.left, progress=self.tell)
        except TimeoutError:
            if best is None:
                raise
            return best
        if isinstance(answer, Solution):
            best = self.cut(mesh, answer.decision.strategies, bound_s, best)
        return best or self.poor(v, mesh, f, problem, bound_s, None)

    def poor(self, v: _View, mesh: Mesh, f: Formulator, problem: Problem, bound_s: float, best: Found | None) -> Found:
        """At the strategies that need the least memory: an answer, or by how much the budget is short."""
        least_of_all = explain(replace(problem, budget_bytes=0.0), self.left)
        found = self.cut(mesh, least_of_all.strategies, bound_s, best) if bound_s >= 0 else None
        if found is not None:
            return found
        narrow, only = self.formulated(v, mesh, only=least_of_all.strategies)
        return Found(only, narrow.names, v.shrunk, v.rules, explain(only, self.left))

    # ---- segments --------------------------------------------------------------------------------------------------

    def cut(self, mesh: Mesh, strategies: Sequence[int], bound_s: float, best: Found | None) -> Found | None:
        """The best of `best` and cuts of the stacks into two segments, at these strategies: at every eighth of the layers, then nearer."""
        looked: dict[tuple[int, ...], float] = {}
        n_of = {s.name: n for s, n in zip(self.folded.stacks, self.folded.copies, strict=True)}

        def at_share(share: float) -> None:
            """share: of the layers, in the first segment; 0: one segment."""
            nonlocal best
            at = {name: max(1, min(n - 1, round(share * n))) if share else 0 for name, n in n_of.items()}
            key = tuple(at.values())
            if key in looked or (best is not None and time.perf_counter() - self.start > self.limits.seconds):
                return
            v = self.view({name: (k, n_of[name] - k) for name, k in at.items() if k})
            f, problem = self.formulated(v, mesh, only=strategies)
            found = solve(problem, self.left)
            looked[key] = found.objective_s if isinstance(found, Solution) else float("inf")
            if not isinstance(found, Solution):
                return
            found = replace(found, bound_s=min(bound_s, found.objective_s))
            if best is None or not isinstance(best.answer, Solution) or found.objective_s < best.answer.objective_s * (1 - 1e-6):
                best = Found(problem, f.names, v.shrunk, v.rules, found)

        def good() -> bool:
            return best is not None and isinstance(best.answer, Solution) and best.answer.gap <= WORTH

        deepest = max(self.folded.copies, default=0)
        step, center = 1.0 / CUTS, 0.5
        for share in (0.0, *sorted((k / CUTS for k in range(1, CUTS)), key=lambda x: (abs(x - 0.5), x))):
            if not good():
                at_share(share)
        while deepest > CUTS and step > 0.5 / deepest and not good() and looked:
            n = max(self.folded.copies)
            i = self.folded.copies.index(n)
            center = min(looked, key=lambda k: (looked[k], k))[i] / n
            step /= 2
            at_share(center - step)
            at_share(center + step)
        return best

    # ---- many axes -------------------------------------------------------------------------------------------------

    def by_merging(self, v: _View) -> Found:
        bound = -1.0
        best: Found | None = None
        for smaller in merged(self.mesh):
            if best is not None and time.perf_counter() - self.start > self.limits.seconds:
                break
            if bound < 0:
                began = time.perf_counter()
                f, problem = self.formulated(v, smaller)
                bound = least(ideal(f, problem, Formulator(v.q, v.rules, self.mesh, v.cost, self.setting)), self.left)
                self.tell("bound", time.perf_counter() - began)
            try:
                found = self.on(v, smaller)
            except TimeoutError:
                if best is None:
                    raise
                break
            if isinstance(found.answer, Solution):
                found = replace(found, answer=replace(found.answer, bound_s=min(bound, found.answer.objective_s)))
            if best is None or _better(found.answer, best.answer):
                best = found
            if isinstance(best.answer, Solution) and best.answer.gap <= self.limits.gap:
                break
        assert best is not None
        if isinstance(best.answer, Solution) and best.answer.gap > self.limits.gap:
            spent = time.perf_counter() - self.start > self.limits.seconds
            best = replace(best, answer=replace(best.answer, stopped_by="time" if spent else "axes"))
        return best


def _better(a: Solution | Infeasible, b: Solution | Infeasible) -> bool:
    if isinstance(a, Solution):
        return not isinstance(b, Solution) or a.objective_s < b.objective_s
    return isinstance(b, Infeasible) and a.least_bytes < b.least_bytes


def loose(problem: Problem, s: Shrunk) -> Problem:
    """`problem` with the memory rows of positions outside of the stacks alone: there every layer's kept tensors count alike, so that what holds
    for them holds for the mean of any fates."""
    inside = {n for stack in s.fold.stacks for copies in (stack.forward, stack.backward) for names in copies for n in names}
    return replace(problem, rows=tuple(r for r in problem.rows if r.name.rpartition(" ")[2] not in inside))


def merged(mesh: Mesh) -> Iterator[Mesh]:
    """`mesh` with all its axes as one, then as two: neighbours only, since storage over axes that are not lies as no DTensor does."""
    parents = [p for p, n in mesh.parents.items() if n > 1]
    yield _with_parents(mesh, [parents])
    for i in range(len(parents) - 1, 0, -1):
        yield _with_parents(mesh, [parents[:i], parents[i:]])


def _with_parents(mesh: Mesh, groups: list[list[str]]) -> Mesh:
    name = {p: "+".join(group) for group in groups for p in group}
    return Mesh(tuple(replace(a, parent=name.get(a.parent, a.parent)) for a in mesh.axes))


def _axes(mesh: Mesh) -> str:
    return " x ".join(f"{p}={n}" for p, n in mesh.parents.items() if n > 1) or "one device"
