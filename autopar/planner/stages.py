"""Solves a step on a mesh, in as few programs as give an answer and a bound.

One and two axes. First the program with the relaxed memory rows (`autopar.planner.formulation.memory_rows`), which hold whatever policy each layer has: this bounds all plans; where
its answer fits the other rows too, it is the answer. Else, at its strategies, the layers are cut into segments with policies of their own; and if
the gap is still too large, strategies are chosen under all rows.

Three axes and more. An operator has tens of strategies there and a tensor as many placements, and redistributions between all of them: hundreds
of thousands of variables. But few good plans use every axis for something else. So axes are merged: first all into one, then into two;
each is the same problem with fewer strategies, at the same prices, and its answer is an answer of the whole. How good it is is said
against a bound of the whole (`autopar.planner.formulation.lower_bound`). Where that leaves a gap, the whole program is solved without what cannot be in an answer better than
the best so far (`solver.prune`): a few percent of it. All ends as soon as the gap is reached. So are two axes whose program has no answer in time, or which have little of it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import replace

from autopar.graph.mesh import Mesh
from autopar.planner.attempt import Attempt
from autopar.planner.best_cut import best_cut
from autopar.planner.collecting import without_garbage_collection
from autopar.planner.formulation.layouts import by_hand
from autopar.planner.formulation.lower_bound import at_the_step, least_s
from autopar.planner.formulation.more_often import Bounding
from autopar.planner.formulation.problem import Formulator
from autopar.planner.found import Found, arcs_of, better, is_recomputed, is_within
from autopar.planner.low_memory import low_memory_strategies
from autopar.planner.merged_axes import axes_said, merged
from autopar.planner.views import View
from autopar.planner.without_solver import all_kept, by_descent
from autopar.solver.frontier import EXACT, Relaxation
from autopar.solver.problem import Problem
from autopar.solver.prune import prune
from autopar.solver.solve import NoAnswer, NoneFaster, Solution, explain, least, smallest, solve, solve_relaxed
from autopar.solver.watch import watching

WHOLE_AXES = 2  # up to so many axes the whole program is solved
NEAR = 0.08  # a gap, relative, from which the whole program is tried without what cannot be better
FAR = 0.3  # a gap, relative, with which too little could be left out
# Of the gap that may stay, so much for the solver of the program that gives the bound: at first, and if that is too much.
SHARES = (0.25, 0.02)
LARGE = 400  # kinds of operators: on two axes, too, the whole of so many is solved without what cannot be better than with axes merged
TOO_MANY = 150_000  # arcs: more do not fit the time nor the memory that planning may take
SOON_S = 4.0  # left: then axes are merged first, which gives an answer soon
EFFORT_S, EFFORT = 6.0, 500.0  # in proportion: so many seconds, and so many times what a step takes at least
ARCS = 6000  # that the solver gets through in a second


class _Far(Exception):
    """No answer of a program is as good as asked for. bound_s: what none takes less than."""

    def __init__(self, bound_s: float) -> None:
        super().__init__()
        self.bound_s = bound_s


class Stages(Attempt):
    """A step on a mesh, solved."""

    def run(self, merge: bool = True) -> Found:
        """merge: whether axes may be merged where the program of all of them is too large, or has no answer in time. What they have then is the answer, or what
        is found without a solver. Raises TimeoutError where even that has none, NoneFaster where nothing was found below `Limits.below_s`."""
        if not self.is_started:
            self.start = time.perf_counter()
        with without_garbage_collection(), watching(most_bytes=self.limits.memory_bytes):
            v = self.view()
            if self.limits.in_proportion and merge:
                seconds = EFFORT_S + EFFORT * least_s(v.shrunk, v.rules, v.cost)
                self.limits, self.start = replace(self.limits, seconds=min(self.limits.seconds, seconds)), time.perf_counter()
            axes = sum(n > 1 for n in self.mesh.parents.values())
            is_soon = self.until - time.perf_counter() < SOON_S
            is_large = len(v.q.classes.ops) > LARGE
            # A layout's axes have one role each: merged ones would have two.
            may_merge = merge and self.restrict is None
            bound_s = -1.0
            if not (may_merge and (axes > WHOLE_AXES or (axes > 1 and (is_soon or is_large)))):
                try:
                    self.is_first = may_merge
                    with watching(until=self.until if merge else math.inf):
                        return self.on(v, self.mesh)
                except TimeoutError as e:
                    if not merge:
                        raise
                    bound_s = e.bound_s if isinstance(e, NoAnswer) else bound_s
                self.is_first = False
            if may_merge and axes > 1:
                with contextlib.suppress(TimeoutError):
                    return self.by_merging(v, bound_s)
            if self.limits.may_fail:
                raise NoAnswer("it was out of time", bound_s)
            return self.by_descent(v, bound_s)

    def by_descent(self, v: View, bound_s: float) -> Found:
        """What is found without a solver, of the program that was formulated last."""
        self.begin("descent")
        began, bound_s = time.perf_counter(), max(bound_s, least_s(v.shrunk, v.rules, v.cost))
        with watching(until=math.inf):
            if self.last is None:
                self.formulated(v, self.mesh if self.restrict is not None else next(merged(self.mesh)))
            assert self.last is not None
            mesh, f, problem = self.last
            best = by_descent(
                f, problem, () if self.restrict is not None else by_hand(problem, f.names, v.rules, mesh, self.mesh),
                lambda strategies: self.formulated(v, mesh, only=strategies),
                lambda strategies, best: self.cut(mesh, strategies, bound_s, best, True),
                lambda f, problem, answer: Found(mesh, problem, f.names, v.shrunk, v.rules, answer, f.formulated(), f.of_all(answer.decision.strategies)),
            )  # fmt: skip
        self.on_progress("descent", time.perf_counter() - began)
        if best is None or not isinstance(best.answer, Solution):
            raise NoAnswer("of what was found in time, nothing fits", bound_s)
        self.has_answer, bound_s = True, min(bound_s, best.answer.objective_s)
        self.so_far(self.mesh, bound_s, best)
        return replace(best, answer=replace(best.answer, bound_s=bound_s, seconds=time.perf_counter() - self.start, stopped_by="time"))

    # ---- one program -----------------------------------------------------------------------------------------------

    def on(
        self, v: View, mesh: Mesh, coarse: bool = False, made: tuple[Formulator, Problem] | None = None, far_s: float = math.inf
    ) -> Found:
        """coarse: an answer will do that is not the best cut of the layers. made: the formulation, if there is one already. Raises _Far where no answer
        takes less than `far_s`."""
        start = time.perf_counter()
        f, problem = made or self.formulated(v, mesh)
        if self.is_first and arcs_of(problem) > ARCS * (self.until - time.perf_counter()):
            raise NoAnswer("the program is too large for the time", -1.0)
        self.begin(f"solve {axes_said(mesh)}")
        seen = solve_relaxed(problem.relaxed, problem, self.left, self.on_progress)
        if mesh is self.mesh:
            self.bounding = self.bounding_more = Bounding(lambda: problem.relaxed, f.names, f.wires)
        if seen is None and self.limits.below_s < math.inf:
            raise NoneFaster(self.limits.below_s)
        if seen is None:
            return self.with_low_memory_strategies(v, mesh, f, problem, -1.0, None)
        if seen.bound_s > far_s:
            raise _Far(seen.bound_s)
        # Memory of what runs again is known only at the strategies chosen.
        if seen.price is not None and seen.price.feasible and not (self.training.counts and is_recomputed(problem, seen.decision)):
            spent = time.perf_counter() - start
            answer = Solution(seen.decision, seen.price, seen.bound_s, spent, seen.stopped_by, seen.variables, seen.rows)
            done = Found(mesh, problem, f.names, v.shrunk, v.rules, answer, f.formulated(), f.of_all(answer.decision.strategies))
            self.so_far(mesh, seen.bound_s, done)
            return done
        bound_s = seen.bound_s
        self.so_far(mesh, bound_s, None)
        try:
            best = self.cut(mesh, seen.decision.strategies, bound_s, None, coarse)
        except TimeoutError:
            best = self.all_kept(v, mesh, seen.decision.strategies, bound_s)
            if best is None:
                raise NoAnswer("at the strategies that were found, nothing fits that is found without a solver", bound_s) from None
            return best
        if not coarse and not is_within(best, self.limits.gap) and 2 * (time.perf_counter() - self.start) < self.limits.seconds:
            # What is missing may be the bound's: its program was allowed the whole gap.
            bound_s, best = self.nearer(mesh, problem, seen.decision.strategies, bound_s, best)
        if best is None or not isinstance(best.answer, Solution) or not (coarse or is_within(best, self.limits.gap)):
            best = self.tight(v, mesh, f, problem, bound_s, best)
        if isinstance(best.answer, Solution):
            spent = time.perf_counter() - start
            stopped = "cuts" if best.answer.gap > self.limits.gap and best.answer.stopped_by == "gap" else best.answer.stopped_by
            best = replace(best, answer=replace(best.answer, seconds=spent, stopped_by=stopped, variables=seen.variables, rows=seen.rows))
        return best

    def all_kept(self, v: View, mesh: Mesh, strategies: Sequence[int], bound_s: float) -> Found | None:
        """At these strategies, where there is no time for cuts: everything kept that backward reads, if that fits."""
        with watching(until=math.inf):
            narrow, only = self.formulated(v, mesh, only=strategies)
            answer = all_kept(only)
        if answer is None:
            return None
        self.has_answer = True
        answer = replace(answer, bound_s=min(bound_s, answer.objective_s), seconds=time.perf_counter() - self.start)
        found = Found(mesh, only, narrow.names, v.shrunk, v.rules, answer, narrow.formulated(), tuple(strategies))
        self.so_far(mesh, bound_s, found)
        return found

    def nearer(
        self, mesh: Mesh, problem: Problem, strategies: Sequence[int], bound_s: float, best: Found | None
    ) -> tuple[float, Found | None]:
        """A better bound, and what the strategies that have it allow."""
        try:
            seen = solve_relaxed(problem.relaxed, problem, replace(self.left, gap=self.limits.gap * SHARES[0]), self.on_progress)
        except NoAnswer as e:
            seen, bound_s = None, max(bound_s, e.bound_s)
        bound_s = max(bound_s, seen.bound_s) if seen else bound_s
        if best is not None and isinstance(best.answer, Solution):
            best = replace(best, answer=replace(best.answer, bound_s=min(bound_s, best.answer.objective_s)))
        if seen and tuple(seen.decision.strategies) != tuple(strategies) and not is_within(best, self.limits.gap):
            best = self.cut(mesh, seen.decision.strategies, bound_s, best, False)
        return bound_s, best

    def tight(self, v: View, mesh: Mesh, f: Formulator, problem: Problem, bound_s: float, best: Found | None) -> Found:
        """Strategies chosen under all rows, as if layers shared their policies; then the layers cut at these strategies."""
        try:
            answer = solve(problem, self.left, progress=self.on_progress)
        except NoneFaster:
            if best is None:
                raise NoneFaster(bound_s) from None  # layers that do not share their policies may be
            return best
        except TimeoutError:
            if best is None:
                raise
            return best
        if isinstance(answer, Solution):
            best = self.cut(mesh, f.all_strategies(answer.decision.strategies), bound_s, best, False)
            # With strategies fixed, nothing is brought from where only other strategies have it; but memory of what runs again is known only then.
            mine = replace(answer, bound_s=min(bound_s, answer.objective_s))
            if not is_recomputed(problem, answer.decision) and (best is None or better(mine, best.answer)):
                best = Found(mesh, problem, f.names, v.shrunk, v.rules, mine, f.formulated(), f.of_all(mine.decision.strategies))
        if best is None and self.limits.below_s < math.inf:
            raise NoneFaster(bound_s)
        return best or self.with_low_memory_strategies(v, mesh, f, problem, bound_s, None)

    def with_low_memory_strategies(self, v: View, mesh: Mesh, f: Formulator, problem: Problem, bound_s: float, best: Found | None) -> Found:
        """At the strategies that need the least memory: an answer, or by how much the budget is short."""
        # What stays gathered takes memory, and would be one more thing to choose.
        again = replace(self.training, keeps_gathered=False)
        if again != self.training:
            f, problem = self.formulated(v, mesh, training=again)
        relaxation = Relaxation(problem.relaxed)

        def peak(strategies: Sequence[int]) -> float:
            found = smallest(self.formulated(v, mesh, only=strategies, training=again)[1], self.left)
            return math.inf if found is None else found[0]

        strategies = low_memory_strategies(f, lambda budget: relaxation.at(budget, self.left), peak)
        strategies = strategies or explain(replace(problem, budget_bytes=0.0), self.left).strategies
        found = self.cut(mesh, strategies, bound_s, best, False) if bound_s >= 0 else None
        if found is not None:
            return found
        narrow, only = self.formulated(v, mesh, only=strategies)
        return Found(mesh, only, narrow.names, v.shrunk, v.rules, explain(only, self.left), narrow.formulated())

    def cut(self, mesh: Mesh, strategies: Sequence[int], bound_s: float, best: Found | None, coarse: bool) -> Found | None:
        """The best of `best` and cuts of the stacks into segments, at these strategies; coarse: only where a relaxation says (`autopar.planner.best_cut`)."""
        return best_cut(self, mesh, strategies, bound_s, best, coarse)

    # ---- many axes -------------------------------------------------------------------------------------------------

    def by_merging(self, v: View, bound_s: float = -1.0) -> Found:
        """bound_s: what is known of the whole already."""
        coarse_bound_s = bound = -1.0
        best: Found | None = None
        near, has_none, is_pruned = max(self.limits.gap, NEAR), False, False
        # What they have is not near to the bound: looked for only if the others have nothing better, the one that may be fastest first.
        far: list[tuple[float, Mesh, tuple[Formulator, Problem]]] = []

        def take(smaller: Mesh, made: tuple[Formulator, Problem], far_s: float) -> None:
            nonlocal best, has_none
            try:
                found = self.on(v, smaller, True, made, far_s)
            except NoneFaster:
                has_none = True
                return
            if isinstance(found.answer, Solution):
                found = replace(found, answer=replace(found.answer, bound_s=min(bound, found.answer.objective_s)))
            self.has_answer |= isinstance(found.answer, Solution)
            if best is None or better(found.answer, best.answer):
                best = found
                self.so_far(self.mesh, bound, best)
                if isinstance(best.answer, Solution):
                    self.limits = replace(self.limits, below_s=min(self.limits.below_s, best.answer.objective_s))

        for smaller in merged(self.mesh):
            late, is_begun = self.is_late, best is not None or has_none or bool(far)
            if is_within(best, near) or (is_begun and (late or smaller.parents == self.mesh.parents)):
                break
            try:
                with watching(until=self.until if best is not None else math.inf):
                    made = self.formulated(v, smaller)
            except TimeoutError:
                break
            if coarse_bound_s < 0:
                coarse_bound_s = self.coarse_bound(v, *made)
                bound = max(bound_s, coarse_bound_s)
                if bound >= self.limits.below_s:
                    raise NoneFaster(bound)
                is_pruned = 1 - bound / self.limits.below_s <= FAR
                if is_pruned:  # there is a plan already: most often, nothing is better
                    with watching(until=self.until), contextlib.suppress(TimeoutError):
                        best = self.pruned(v, None, bound, coarse_bound_s)
                    if is_within(best, near):
                        break
            try:
                with watching(until=self.until if best is not None else math.inf):
                    take(smaller, made, bound / (1 - near))
            except _Far as e:
                far.append((e.bound_s, smaller, made))
            except TimeoutError:
                if best is None and not has_none and not far:
                    raise
                break
        far.sort(key=lambda x: x[0])
        while far and not is_within(best, near):
            least_s, smaller, made = far.pop(0)
            if best is not None and isinstance(best.answer, Solution) and least_s >= best.answer.objective_s:
                break
            try:
                take(smaller, made, math.inf)
            except TimeoutError:
                if best is None and not has_none and not far:
                    raise
        late = time.perf_counter() - self.start > self.limits.seconds / 2
        known_s = self.limits.below_s if best is None else best.answer.objective_s if isinstance(best.answer, Solution) else -math.inf
        if bound > 0 and self.limits.gap < 1 - bound / known_s <= FAR and not late and not is_pruned:
            with watching(until=self.until), contextlib.suppress(TimeoutError):
                best = self.pruned(v, best, bound, coarse_bound_s)
        if best is None:
            raise NoneFaster(bound)
        if isinstance(best.answer, Solution):
            best = replace(best, answer=replace(best.answer, seconds=time.perf_counter() - self.start))
        if isinstance(best.answer, Solution) and best.answer.gap > self.limits.gap:
            best = replace(best, answer=replace(best.answer, stopped_by="time" if self.is_late else "axes"))
        return best

    def coarse_bound(self, v: View, f: Formulator, problem: Problem) -> float:
        """A bound of the whole. f, problem: of its mesh with axes merged."""
        if self.until - time.perf_counter() < SOON_S:
            return least_s(v.shrunk, v.rules, v.cost)
        try:
            with self.timed("bound"), watching(until=self.until):
                whole = Formulator(v.q, v.rules, self.mesh, v.cost, self.training)
                self.coarse = f.formulated(), problem, whole
                bound_s = least(self.coarse_problem(), self.left)
        except TimeoutError:
            self.coarse = None
            bound_s = least_s(v.shrunk, v.rules, v.cost)
        return bound_s

    def coarse_bound_at_the_step(self) -> float:
        """The coarse bound, if activations needed no memory."""
        assert self.coarse is not None
        return least(at_the_step(self.coarse_problem(), self.coarse[0].names), self.left) * (1 - EXACT)  # no more than any solver finds

    def pruned(self, v: View, best: Found | None, bound_s: float, coarse_bound_s: float) -> Found | None:
        """The whole program without what no answer better than `best`, or than what is asked for, has: a better answer or a better bound, where time allows.

        coarse_bound_s: a bound that counts neither redistributions nor what strategies take more than the fastest (`autopar.planner.formulation.lower_bound`)."""
        known = self.limits.below_s if best is None else _seconds(best)

        def told(bound_s: float) -> Found | None:
            """With what is known of the whole."""
            if best is None:
                if bound_s >= self.limits.below_s:
                    raise NoneFaster(bound_s)
                return None
            assert isinstance(best.answer, Solution)
            return replace(best, answer=replace(best.answer, bound_s=min(bound_s, best.answer.objective_s)))

        # The same, but for what no answer of more micro-batches that is better has either (`autopar.planner.more_micro_batches`).
        more_s = min(coarse_bound_s, self.coarse_bound_at_the_step()) if self.bounds_more and self.coarse is not None else coarse_bound_s
        larger: list[Problem] = []

        def trim(problem: Problem) -> Problem:
            larger.append(prune(problem, more_s, known))
            return prune(larger[0], coarse_bound_s, known) if more_s < coarse_bound_s else larger[0]

        f, problem = self.formulated(v, self.mesh, room_s=known - more_s, trim=trim)
        if arcs_of(problem) > TOO_MANY:
            return best
        try:
            with self.timed(f"relaxation on {axes_said(self.mesh)}"):
                relaxed = Relaxation(problem.relaxed, known).at(problem.budget_bytes, self.left)
        except TimeoutError:
            return best  # nor would other bounds be found of it in time
        smaller = problem
        self.bounding = self.bounding_more = Bounding(lambda: smaller.relaxed, f.names, f.wires, known, coarse_bound_s)
        if more_s < coarse_bound_s:
            fits = arcs_of(larger[0]) <= TOO_MANY
            self.bounding_more = Bounding(lambda: f.at_the_step(larger[0]).relaxed, f.names, f.wires, known, more_s) if fits else None
        self.begin(f"solve {axes_said(self.mesh)}, without what cannot be better")
        if relaxed is None:  # nothing is better
            return told(known)
        bound_s = max(bound_s, min(known, relaxed.tangent.at_s))
        best = told(bound_s)
        if is_within(best, self.limits.gap):
            return best
        worse = {which for which, dearer_s in relaxed.dearer_s.items() if relaxed.tangent.at_s + dearer_s > known * (1 + EXACT)}
        problem = replace(problem, forbidden=problem.forbidden | worse)
        for share in SHARES:
            began = time.perf_counter()
            try:
                seen = solve_relaxed(problem.relaxed, problem, replace(self.left, gap=self.limits.gap * share), self.on_progress)
            except NoAnswer as e:
                return told(max(bound_s, min(known, e.bound_s)))
            known = known if best is None else _seconds(best)
            if seen is None:  # nothing is better
                return told(known)
            took = time.perf_counter() - began
            bound_s = max(bound_s, min(known, seen.bound_s))
            best = told(bound_s)
            self.so_far(self.mesh, bound_s, best)
            if seen.price is not None and seen.price.feasible and seen.price.objective_s < known:
                answer = Solution(seen.decision, seen.price, bound_s, 0.0, seen.stopped_by, seen.variables, seen.rows)
                best = Found(self.mesh, problem, f.names, v.shrunk, v.rules, answer, f.formulated(), f.of_all(answer.decision.strategies))
            else:
                best = self.cut(self.mesh, f.all_strategies(seen.decision.strategies), bound_s, best, False) or best
            if best is not None and isinstance(best.answer, Solution):
                best = replace(best, answer=replace(best.answer, variables=seen.variables, rows=seen.rows))
            if is_within(best, self.limits.gap) or self.left.seconds < 2 * took:  # what is to be nearer takes longer
                break
        return best


def _seconds(found: Found) -> float:
    assert isinstance(found.answer, Solution)
    return found.answer.objective_s
