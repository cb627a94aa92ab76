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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.planner.collecting import without_garbage_collection
from autopar.planner.formulation.formulated import Formulated
from autopar.planner.formulation.layouts import by_hand
from autopar.planner.formulation.lower_bound import least_s, lower_bound_problem
from autopar.planner.formulation.names import Names
from autopar.planner.formulation.problem import Formulator
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.found import Found, arcs_of, better, is_recomputed, is_within
from autopar.planner.low_memory import low_memory_strategies
from autopar.planner.merged_axes import axes_said, merged
from autopar.planner.segments import Segments, at_share, suggested
from autopar.planner.views import View, view
from autopar.planner.without_solver import all_kept, by_descent
from autopar.rules.grammar import Rule
from autopar.solver.fold import Folded
from autopar.solver.frontier import EXACT, Relaxation
from autopar.solver.problem import Problem
from autopar.solver.prune import prune
from autopar.solver.solve import Limits, NoAnswer, Solution, explain, least, smallest, solve, solve_relaxed
from autopar.solver.watch import watching
from autopar.text.stages import Begun, Note
from autopar.text.times import format_time

WHOLE_AXES = 2  # up to so many axes the whole program is solved
WORTH = 1e-3  # a gap, relative, that cutting the layers into segments is tried for
PATIENCE = 4  # cuts in a row that bring nothing: no more are tried where the gap is what was asked for
FIRST = (0.0, 0.5, 0.25, 0.75)  # shares of the layers at which a cut is first looked for
NEAR = 0.08  # a gap, relative, from which the whole program is tried without what cannot be better
FAR = 0.3  # a gap, relative, with which too little could be left out
# Of the gap that may stay, so much for the solver of the program that gives the bound: at first, and if that is too much.
SHARES = (0.25, 0.02)
LARGE = 400  # kinds of operators: on two axes, too, the whole of so many is solved without what cannot be better than with axes merged
TOO_MANY = 150_000  # arcs: more do not fit the time nor the memory that planning may take
FIRST_S = 2.0  # of the solver, for a first answer, whatever the time
SOON_S = 4.0  # left: then axes are merged first, which gives an answer soon
LAST = 0.75  # of the time: then the whole program is given up for one that has an answer soon
EFFORT_S, EFFORT = 6.0, 500.0  # in proportion: so many seconds, and so many times what a step takes at least
ARCS = 6000  # that the solver gets through in a second
OnProgress = Callable[[str, float], None]
Restrict = Callable[[Problem, Names, Mapping[str, Rule], Mesh], Problem]


class _Far(Exception):
    """No answer of a program is as good as asked for."""


class Stages:
    """One folded step on one mesh. restrict: takes strategies away (a layout). since: when planning began (`time.perf_counter`), if before."""

    def __init__(
        self,
        folded: Folded,
        mesh: Mesh,
        cluster: Cluster,
        training: TrainingConfig,
        limits: Limits | None = None,
        on_progress: OnProgress | None = None,
        restrict: Restrict | None = None,
        since: float | None = None,
    ) -> None:
        self.folded, self.mesh, self.cluster, self.training = folded, mesh, cluster, training
        self.limits, self.on_progress, self.restrict = limits or Limits(), on_progress or (lambda stage, seconds: None), restrict
        self.start = time.perf_counter() if since is None else since
        self.is_started = since is not None
        self.has_answer = self.is_first = False
        self.last: tuple[Mesh, Formulator, Problem] | None = None  # what was formulated last, of all that may be decided
        # Programs whose relaxations bound all plans: of all axes; what the coarse bound is made of; of what is faster than so many seconds.
        self.bounding: tuple[Problem, Names] | None = None
        self.coarse: tuple[Formulated, Problem, Formulator] | None = None
        self.bounding_faster: tuple[Problem, Names, float] | None = None

    def view(self, segments: Mapping[str, Sequence[int]] | None = None) -> View:
        """Of the graph with its layers cut so; without, the same one each time."""
        return view(self.folded, self.mesh, self.cluster, self.training.fuses, segments)

    def formulated(
        self,
        v: View,
        mesh: Mesh,
        only: Sequence[int] | None = None,
        room_s: float = math.inf,
        trim: Callable[[Problem], Problem] = lambda p: p,
        training: TrainingConfig | None = None,
    ) -> tuple[Formulator, Problem]:
        began = time.perf_counter()
        if only is None:
            self.begin(f"formulate {axes_said(mesh)}")
        f = Formulator(v.q, v.rules, mesh, v.cost, training or self.training, only)
        problem, names = f.run(room_s, trim)
        if self.restrict is not None and only is None:
            problem = self.restrict(problem, names, v.rules, mesh)
        if only is None:
            if room_s == math.inf and training is None:
                self.last = mesh, f, problem
            self.on_progress(f"formulate {axes_said(mesh)}", time.perf_counter() - began)
        return f, problem

    def begin(self, stage: str) -> None:
        self.on_progress(Begun(stage), 0.0)

    def so_far(self, mesh: Mesh, bound_s: float, best: Found | None) -> None:
        """Tells what is known of the step on `mesh`, whose axes may be merged: no plan takes less than the one, the other is the best that was found."""
        on = "" if mesh.parents == self.mesh.parents else f"on {axes_said(mesh)} "
        bound = f"{on}no plan takes less than {format_time(bound_s)}" if math.isfinite(bound_s) and bound_s > 0 else "no bound yet"
        if best is None or not isinstance(best.answer, Solution):
            self.on_progress(Note(f"{bound}; none was found yet"), 0.0)
        else:
            gap = max(0.0, 1 - bound_s / best.answer.objective_s) if bound_s > 0 else 1.0
            self.on_progress(Note(f"{bound}; the best so far {format_time(best.answer.objective_s)}, within {gap:.2%}"), 0.0)

    @property
    def left(self) -> Limits:
        """For a call of the solver. Until there is an answer, some time in any case."""
        return replace(self.limits, seconds=max(0.0 if self.has_answer else FIRST_S, self.until - time.perf_counter()))

    @property
    def until(self) -> float:
        """What is tried first leaves some time for what is soon found."""
        return self.start + self.limits.seconds * (LAST if self.is_first and not self.has_answer else 1.0)

    @property
    def is_late(self) -> bool:
        return time.perf_counter() > self.until

    def run(self, merge: bool = True) -> Found:
        """merge: whether axes may be merged where the program of all of them is too large, or has no answer in time. What they have then is the answer, or what
        is found without a solver. Raises TimeoutError where even that has none."""
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
                lambda f, problem, answer: Found(mesh, problem, f.names, v.shrunk, v.rules, answer, f.formulated()),
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
            self.bounding = problem.relaxed, f.names
        if seen is None:
            return self.with_low_memory_strategies(v, mesh, f, problem, -1.0, None)
        if seen.bound_s > far_s:
            raise _Far
        # Memory of what runs again is known only at the strategies chosen.
        if seen.price is not None and seen.price.feasible and not (self.training.counts and is_recomputed(problem, seen.decision)):
            spent = time.perf_counter() - start
            answer = Solution(seen.decision, seen.price, seen.bound_s, spent, seen.stopped_by, seen.variables, seen.rows)
            done = Found(mesh, problem, f.names, v.shrunk, v.rules, answer, f.formulated())
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
        found = Found(mesh, only, narrow.names, v.shrunk, v.rules, answer, narrow.formulated())
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
        except TimeoutError:
            if best is None:
                raise
            return best
        if isinstance(answer, Solution):
            best = self.cut(mesh, f.all_strategies(answer.decision.strategies), bound_s, best, False)
            # With strategies fixed, nothing is brought from where only other strategies have it; but memory of what runs again is known only then.
            mine = replace(answer, bound_s=min(bound_s, answer.objective_s))
            if not is_recomputed(problem, answer.decision) and (best is None or better(mine, best.answer)):
                best = Found(mesh, problem, f.names, v.shrunk, v.rules, mine, f.formulated())
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

    # ---- segments --------------------------------------------------------------------------------------------------

    def cut(self, mesh: Mesh, strategies: Sequence[int], bound_s: float, best: Found | None, coarse: bool) -> Found | None:
        """The best of `best` and cuts of the stacks into segments, at these strategies.

        None; then where a relaxation says (`autopar.planner.segments`), from either end, with the last layer by itself as well, and in three; then two segments
        at every quarter of the layers, and nearer to the best, unless the answer is already what the relaxation allows. Where the gap is what was asked for,
        only as long as that brings something. coarse: only what it says."""
        began = time.perf_counter()
        self.begin("segments")
        looked: dict[tuple[tuple[int, ...], ...], float] = {}
        n_of = {s.name: n for s, n in zip(self.folded.stacks, self.folded.copies, strict=True)}
        whole = self.view()
        uncut = (whole, *self.formulated(whole, mesh, only=strategies))

        def at(segments: Segments) -> float:
            """Seconds of the best answer with the layers cut so."""
            nonlocal best
            key = tuple(segments.values())
            if key in looked or (best is not None and self.is_late):
                return looked.get(key, math.inf)
            v, f, problem = uncut
            try:
                if any(len(cut) > 1 for cut in segments.values()):
                    v = self.view({name: cut for name, cut in segments.items() if len(cut) > 1})
                    f, problem = self.formulated(v, mesh, only=strategies)
                found = solve(problem, self.left)
            except TimeoutError:
                if best is None and not any(math.isfinite(x) for x in looked.values()):
                    raise
                looked[key] = math.inf
                return math.inf
            looked[key] = found.objective_s if isinstance(found, Solution) else math.inf
            if isinstance(found, Solution):
                found = replace(found, bound_s=min(bound_s, found.objective_s))
                self.has_answer = True
                if best is None or not isinstance(best.answer, Solution) or found.objective_s < best.answer.objective_s * (1 - 1e-6):
                    best = Found(mesh, problem, f.names, v.shrunk, v.rules, found, f.formulated())
                    self.so_far(mesh, bound_s, best)
            return looked[key]

        def good() -> bool:
            seconds = list(looked.values())
            idle = len(seconds) > PATIENCE and min(seconds[-PATIENCE:]) >= min(seconds[:-PATIENCE]) * (1 - WORTH)
            if idle and is_within(best, self.limits.gap):
                return True
            late = time.perf_counter() - self.start > self.limits.seconds / 2
            return is_within(best, max(WORTH, self.limits.gap) if late else WORTH)

        f, problem = uncut[1:]
        try:
            relaxed = Relaxation(problem).at(self.training.budget_bytes, self.left)
        except TimeoutError:
            relaxed = None
        cuts = suggested(f.formulated(), problem, relaxed, n_of)
        limit_s = relaxed.tangent.at_s if relaxed else 0.0  # which more cuts can hardly go below
        for segments in cuts:
            if not good():
                at(segments)
        if coarse or min(looked.values(), default=math.inf) <= limit_s * (1 + WORTH):
            self.on_progress("segments", time.perf_counter() - began)
            return best
        tried: dict[tuple[float, bool], float] = {}
        for alone in (False, True):
            for share in FIRST:
                if not good():
                    tried[share, alone] = at({name: at_share(n, share, alone) for name, n in n_of.items()})
        deepest = max(n_of.values(), default=1)
        step = 0.25
        while step > 0.5 / deepest and not good() and tried:
            center, alone = min(tried, key=lambda k: (tried[k], k))
            step /= 2
            for share in (center - step, center + step):
                if 0 < share < 1:
                    tried[share, alone] = at({name: at_share(n, share, alone) for name, n in n_of.items()})
        self.on_progress("segments", time.perf_counter() - began)
        return best

    # ---- many axes -------------------------------------------------------------------------------------------------

    def by_merging(self, v: View, bound_s: float = -1.0) -> Found:
        """bound_s: what is known of the whole already."""
        coarse_bound_s = bound = -1.0
        best: Found | None = None
        near = max(self.limits.gap, NEAR)
        # What they have is not near to the bound: looked for only if the others have nothing better.
        far: list[tuple[Mesh, tuple[Formulator, Problem]]] = []

        def take(smaller: Mesh, made: tuple[Formulator, Problem], far_s: float) -> None:
            nonlocal best
            found = self.on(v, smaller, True, made, far_s)
            if isinstance(found.answer, Solution):
                found = replace(found, answer=replace(found.answer, bound_s=min(bound, found.answer.objective_s)))
            self.has_answer |= isinstance(found.answer, Solution)
            if best is None or better(found.answer, best.answer):
                best = found
                self.so_far(self.mesh, bound, best)

        for smaller in merged(self.mesh):
            late = self.is_late
            if is_within(best, near) or ((best is not None or far) and (late or smaller.parents == self.mesh.parents)):
                break
            try:
                with watching(until=self.until if best is not None else math.inf):
                    made = self.formulated(v, smaller)
            except TimeoutError:
                break
            if coarse_bound_s < 0:
                coarse_bound_s = self.coarse_bound(v, *made)
                bound = max(bound_s, coarse_bound_s)
            try:
                with watching(until=self.until if best is not None else math.inf):
                    take(smaller, made, bound / (1 - near))
            except _Far:
                far.append((smaller, made))
            except TimeoutError:
                if best is None and not far:
                    raise
                break
        while far and not is_within(best, near):
            try:
                take(*far.pop(), math.inf)
            except TimeoutError:
                if best is None and not far:
                    raise
        assert best is not None
        late = time.perf_counter() - self.start > self.limits.seconds / 2
        if isinstance(best.answer, Solution) and self.limits.gap < best.answer.gap <= FAR and not late:
            with watching(until=self.until), contextlib.suppress(TimeoutError):
                best = self.pruned(v, best, bound, coarse_bound_s)
        if isinstance(best.answer, Solution):
            best = replace(best, answer=replace(best.answer, seconds=time.perf_counter() - self.start))
        if isinstance(best.answer, Solution) and best.answer.gap > self.limits.gap:
            best = replace(best, answer=replace(best.answer, stopped_by="time" if self.is_late else "axes"))
        return best

    def coarse_bound(self, v: View, f: Formulator, problem: Problem) -> float:
        """A bound of the whole. f, problem: of its mesh with axes merged."""
        if self.until - time.perf_counter() < SOON_S:
            return least_s(v.shrunk, v.rules, v.cost)
        began = time.perf_counter()
        self.begin("bound")
        try:
            with watching(until=self.until):
                whole = Formulator(v.q, v.rules, self.mesh, v.cost, self.training)
                bound_s = least(lower_bound_problem(f.formulated(), problem, whole), self.left)
                self.coarse = f.formulated(), problem, whole
        except TimeoutError:
            bound_s = least_s(v.shrunk, v.rules, v.cost)
        self.on_progress("bound", time.perf_counter() - began)
        return bound_s

    def pruned(self, v: View, best: Found, bound_s: float, coarse_bound_s: float) -> Found:
        """The whole program without what no answer better than `best` has: a better answer or a better bound, where time allows.

        coarse_bound_s: a bound that counts neither redistributions nor what strategies take more than the fastest (`autopar.planner.formulation.lower_bound`)."""
        assert isinstance(best.answer, Solution)
        known = best.answer.objective_s
        f, problem = self.formulated(v, self.mesh, room_s=known - coarse_bound_s, trim=lambda p: prune(p, coarse_bound_s, known))
        if arcs_of(problem) > TOO_MANY:
            return best
        self.begin(f"solve {axes_said(self.mesh)}, without what cannot be better")
        try:
            relaxed = Relaxation(problem.relaxed).at(problem.budget_bytes, self.left)
        except TimeoutError:
            return best
        if relaxed is None:  # nothing is better
            return replace(best, answer=replace(best.answer, bound_s=known))
        self.bounding_faster = problem.relaxed, f.names, known
        bound_s = max(bound_s, min(known, relaxed.tangent.at_s))
        known_better = replace(best.answer, bound_s=bound_s)
        best = replace(best, answer=known_better)
        if known_better.gap <= self.limits.gap:
            return best
        worse = {which for which, more_s in relaxed.dearer_s.items() if relaxed.tangent.at_s + more_s > known * (1 + EXACT)}
        problem = replace(problem, forbidden=problem.forbidden | worse)
        for share in SHARES:
            began = time.perf_counter()
            try:
                seen = solve_relaxed(problem.relaxed, problem, replace(self.left, gap=self.limits.gap * share), self.on_progress)
            except NoAnswer as e:
                assert isinstance(best.answer, Solution)
                return replace(best, answer=replace(best.answer, bound_s=max(bound_s, min(best.answer.objective_s, e.bound_s))))
            assert isinstance(best.answer, Solution)
            known = best.answer.objective_s
            if seen is None:  # nothing is better
                return replace(best, answer=replace(best.answer, bound_s=known))
            took = time.perf_counter() - began
            bound_s = max(bound_s, min(known, seen.bound_s))
            best = replace(best, answer=replace(best.answer, bound_s=bound_s))
            self.so_far(self.mesh, bound_s, best)
            if seen.price is not None and seen.price.feasible and seen.price.objective_s < known:
                answer = Solution(seen.decision, seen.price, bound_s, 0.0, seen.stopped_by, seen.variables, seen.rows)
                best = Found(self.mesh, problem, f.names, v.shrunk, v.rules, answer, f.formulated())
            else:
                best = self.cut(self.mesh, f.all_strategies(seen.decision.strategies), bound_s, best, False) or best
            assert isinstance(best.answer, Solution)
            answer = replace(best.answer, variables=seen.variables, rows=seen.rows)
            best = replace(best, answer=answer)
            if answer.gap <= self.limits.gap or self.left.seconds < 2 * took:  # what is to be nearer takes longer
                break
        return best
