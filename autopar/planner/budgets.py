"""One step under many budgets: the fastest, the one of least memory, and the best that is found within any budget between.

The program is formulated once; under another budget only the right-hand sides of its memory rows change. Its relaxation takes a second, bounds what any plan
can do, and names strategies (`solver.frontier`): a few sets of them serve all budgets. At a set, only policies are left to decide. There the
relaxation says in what share of the layers something is kept, and a program with the layers cut at that share has an answer next to it.

On three axes and more, strategies are those of programs with axes merged, and the bound is that of `autopar.planner.formulation.lower_bound`, as in `autopar.planner.stages`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.graph.mesh import Mesh
from autopar.planner.best_cut import WORTH
from autopar.planner.collecting import without_garbage_collection
from autopar.planner.formulation.lower_bound import lower_bound_problem
from autopar.planner.formulation.problem import Formulator
from autopar.planner.found import Found
from autopar.planner.low_memory import low_memory_strategies
from autopar.planner.merged_axes import merged
from autopar.planner.segments import shares, two
from autopar.planner.stages import WHOLE_AXES, Stages
from autopar.solver.frontier import Answer, Floor, Relaxation, Relaxed, pareto, trace
from autopar.solver.model import Program
from autopar.solver.problem import Decision, Problem
from autopar.solver.solve import Infeasible, Limits, NoAnswer, Solution, smallest, whole
from autopar.text.sizes import format_bytes

SETS = 2  # sets of strategies whose policies are decided at one budget
SLACK = 2e-3  # relative: a relaxation that cannot raise the bound by more is not solved
LARGE_GAP = 0.02  # relative: an answer so far above the bound that other strategies are looked for
QUESTIONS = 6  # about the smallest peak, each of which may take its part of the time that is left
NODES = 10  # of a program of policies: the first few find what there is
STEP = 0.01  # of the memory: answers nearer than this are one
SAME = 1e-5  # of the time
TURNS = 4  # relaxations to find where the bound begins to rise
GRACE = 1e-6  # of a budget that is known to suffice: the solver's tolerance
Segments = Mapping[str, tuple[int, ...]]
Make = Callable[[Problem, Solution], Found]


@dataclass
class _Set:
    """One strategy per choice. f, problem: with one segment, and lines under its times; cut: with others, as far as they were wanted."""

    mesh: Mesh
    strategies: tuple[int, ...]
    f: Formulator
    problem: Problem
    floor: Floor = field(default_factory=Floor)
    smallest: tuple[float, Decision | None] | None = None  # peak, once it is known, and what has it
    relaxation: Relaxation = field(init=False)
    cut: dict[tuple[tuple[str, tuple[int, ...]], ...], tuple[Problem, Make]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.relaxation = Relaxation(self.problem)


class Budgets:
    def __init__(self, stages: Stages) -> None:
        self.stages, self.v = stages, stages.view()
        self.copies = {s.name: n for s, n in zip(stages.folded.stacks, stages.folded.copies, strict=True)}
        self.all_axes = sum(n > 1 for n in stages.mesh.parents.values()) <= WHOLE_AXES
        meshes = [stages.mesh] if self.all_axes else list(merged(stages.mesh))
        wholes = [(mesh, *stages.formulated(self.v, mesh)) for mesh in meshes]
        self.wholes = [(mesh, f, Relaxation(problem.relaxed)) for mesh, f, problem in wholes]
        self.done: dict[tuple[int, float], Relaxed | None] = {}
        self.sets: dict[bytes, _Set] = {}
        self.known: dict[tuple[Mesh, tuple[int, ...]], bytes] = {}
        self.floor = Floor()
        self.end_bytes = math.inf  # the smallest peak that is known
        self.first = False  # which way round the last cut lay that had the best answer
        _, f, self.bounding = self.wholes[0]
        if not self.all_axes:
            whole_mesh = Formulator(self.v.q, self.v.rules, stages.mesh, self.v.cost, stages.training)
            self.bounding = Relaxation(lower_bound_problem(f.formulated(), wholes[0][2], whole_mesh))

    # ---- ends and between ------------------------------------------------------------------------------------------

    def frontier(self, count: int, most_bytes: float = math.inf, known: Sequence[Found] = ()) -> list[Answer[Found]] | Infeasible:
        """At most `count` answers, the fastest first: of the budgets from the least memory to the most. known: answers that others found."""
        start = time.perf_counter()
        self.stages.begin("fastest")
        for i in range(len(self.wholes)):
            self.relaxed(i, most_bytes)
        ends = [*map(_answer, known), *self.ask(most_bytes)]
        self.floor.levels += [(found.problem.budget_bytes, found.answer.bound_s) for found in known if isinstance(found.answer, Solution)]
        self.stages.on_progress("fastest", time.perf_counter() - start)
        start = time.perf_counter()
        self.stages.begin("least memory")
        smallest = self.least()
        self.end_bytes = _answer(smallest).peak_bytes
        ends = [a for a in (*ends, _answer(smallest)) if a.peak_bytes <= most_bytes]
        if not ends:
            return over(smallest, most_bytes)
        self.stages.on_progress("least memory", time.perf_counter() - start)
        start = time.perf_counter()
        self.stages.begin("between")
        ends += self.no_slower(pareto(ends)[0])
        found = trace(ends, self.ask_in_time, count, lambda: not self.late, STEP, SAME)
        found = [self.bounded(a) for a in found]
        self.stages.on_progress("between", time.perf_counter() - start)
        return found

    @property
    def some(self) -> Limits:
        """For one of several questions about the smallest peak: it is for what lies between that the time is."""
        left = self.stages.left
        return replace(left, seconds=left.seconds / QUESTIONS)

    def no_slower(self, fastest: Answer[Found]) -> list[Answer[Found]]:
        """What is as fast as the fastest and needs less: asked for where the bound begins to exceed its time (it is convex: a few relaxations find that);
        and the smallest of the best cut found so."""
        budget = self.floor.reach(fastest.time_s * (1 + SAME))
        for _ in range(TURNS):
            if self.needs_bound(budget):
                self.add_bound(budget, self.bounding.at(budget, self.stages.left))
            if (budget := self.floor.reach(fastest.time_s * (1 + SAME))) <= 0:
                break
        found = self.ask_in_time(budget * (1 + STEP)) if 0 < budget * (1 + STEP) < fastest.peak_bytes * (1 - STEP) else []
        best = pareto([fastest, *found], SAME)[0]
        least = smallest(best.item.problem, self.stages.left, WORTH, best.time_s * (1 + SAME))
        if least is not None and least[0] < best.peak_bytes * (1 - STEP):
            problem = replace(best.item.problem, budget_bytes=least[0] * (1 + GRACE))
            answer = whole(problem, replace(self.stages.left, gap=SAME, nodes=NODES), least[1])
            found += [_answer(replace(best.item, problem=problem, answer=answer))] if answer is not None else []
        return found

    def least(self) -> Found:
        """The fastest of the smallest peak that is found."""
        best: tuple[float, Decision, _Set, Segments] | None = None
        for i, (mesh, f, _) in enumerate(self.wholes):
            strategies = low_memory_strategies(f, partial(self.relaxed, i, part=True), partial(self.smallest_on, mesh))
            if strategies is None:
                continue
            mine = self.set_of(mesh, strategies)
            for segments in self.ends_alone():
                one = smallest(self.formulated(mine, segments)[0], self.stages.left, WORTH)
                if one is not None and (best is None or one[0] < best[0] * (1 - WORTH)):
                    best = *one, mine, segments
        if best is None:
            raise NoAnswer("no answer in time" if self.stages.is_late else "no answer, whatever the budget", -math.inf)
        peak, known, mine, segments = best
        if self.needs_bound(peak):
            self.add_bound(peak, self.bounding.at(peak, self.stages.left))
        found = self.solved(mine, segments, peak * (1 + GRACE), known)
        if found is None:
            raise NoAnswer("no answer at the smallest peak", -math.inf)
        return self.bounded(_answer(found)).item

    def ask_in_time(self, budget_bytes: float) -> list[Answer[Found]]:
        """What is found within a budget; where that brought strategies with a smaller peak than any before, also that."""
        found: list[Answer[Found]] = []
        try:
            found = self.ask(budget_bytes)
            leanest = min(self.sets.values(), key=self.smallest_of)
            if leanest.smallest is not None and leanest.smallest[0] < self.end_bytes * (1 - STEP):
                self.end_bytes, known = leanest.smallest
                answer = self.solved(leanest, self.uncut, self.end_bytes * (1 + GRACE), known)
                found += [_answer(answer)] if answer is not None else []
        except TimeoutError:
            pass
        return found

    def ask(self, budget_bytes: float) -> list[Answer[Found]]:
        """The answers that are found within a budget, at the sets of strategies that promise most."""
        with ThreadPoolExecutor(1) as beside:  # the solver runs beside Python
            bound = beside.submit(self.bounding.at, budget_bytes, self.stages.left) if self.needs_bound(budget_bytes) else None
            known = dict(self.sets)
            found = self.best_of(known, budget_bytes, [])
            if bound is not None:
                self.add_bound(budget_bytes, bound.result())
        if bound is None and min((a.time_s for a in found), default=math.inf) > self.floor.bound_s(budget_bytes) * (1 + LARGE_GAP):
            self.add_bound(budget_bytes, self.bounding.at(budget_bytes, self.stages.left))  # there may be better strategies
        return self.best_of({c: s for c, s in self.sets.items() if c not in known}, budget_bytes, found)

    def best_of(self, sets: Mapping[bytes, _Set], budget_bytes: float, found: list[Answer[Found]]) -> list[Answer[Found]]:
        """`found`, and what sets of strategies have that may be better."""
        best, tried = min((a.time_s for a in found), default=math.inf), 0
        relaxed_at: dict[int, Relaxed | None] = {}

        def relaxed_of(mine: _Set) -> Relaxed | None:
            if id(mine) not in relaxed_at:
                relaxed_at[id(mine)] = mine.relaxation.at(budget_bytes, self.stages.left)
                mine.floor.add(budget_bytes, relaxed_at[id(mine)])
            return relaxed_at[id(mine)]

        for mine in sets.values():
            if not mine.floor.lines:
                relaxed_of(mine)
        # Lines that are known say which sets cannot be better: those are not even relaxed.
        for mine in sorted(sets.values(), key=lambda s: s.floor.bound_s(budget_bytes)):
            if mine.floor.bound_s(budget_bytes) >= best * (1 - WORTH) or tried == SETS or (self.late and found):
                break
            relaxed = relaxed_of(mine)
            if relaxed is None or relaxed.tangent.at_s >= best * (1 - WORTH):
                continue
            tried += 1
            for first, segments in [*self.cuts(mine, relaxed), (self.first, self.uncut)]:
                if segments == self.uncut and best < math.inf:
                    continue
                problem, _ = self.formulated(mine, segments)
                least = Relaxation(problem).at(budget_bytes, self.stages.left) if best < math.inf else relaxed
                if least is None or least.tangent.at_s >= best * (1 - WORTH):
                    continue  # soon known, where the answer itself may take seconds
                answer = self.solved(mine, segments, budget_bytes)
                if answer is not None:
                    found = [*found, _answer(answer)]
                    if found[-1].time_s < best:
                        best, self.first = found[-1].time_s, first
                if best <= relaxed.tangent.at_s * (1 + WORTH) or self.late:
                    break
        return found

    def bounded(self, a: Answer[Found]) -> Answer[Found]:
        """With the bound of what has such a peak, as far as it is known now."""
        assert isinstance(a.item.answer, Solution)
        bound_s = min(a.time_s, self.floor.bound_s(a.peak_bytes))
        answer = replace(a.item.answer, bound_s=bound_s)
        stopped = "gap" if answer.gap <= self.stages.limits.gap else "time" if self.late else "cuts" if self.all_axes else "axes"
        return Answer(a.peak_bytes, a.time_s, bound_s, replace(a.item, answer=replace(answer, stopped_by=stopped)))

    @property
    def late(self) -> bool:
        return time.perf_counter() - self.stages.start > self.stages.limits.seconds

    # ---- relaxations -----------------------------------------------------------------------------------------------

    def needs_bound(self, budget_bytes: float) -> bool:
        """Whether a relaxation at this budget could say more than those that are known."""
        return budget_bytes > self.floor.least_bytes and self.floor.slack(budget_bytes) > SLACK

    def add_bound(self, budget_bytes: float, found: Relaxed | None) -> None:
        """From the relaxation that bounds: the bound, and strategies, if it is of a program that has some."""
        self.floor.add(budget_bytes, found)
        mesh, f, _ = self.wholes[0]
        if self.all_axes and found is not None:
            self.set_of(mesh, f.all_strategies(found.strategies))

    def relaxed(self, i: int, budget_bytes: float, part: bool = False) -> Relaxed | None:
        """Of the i-th program; its strategies become a set."""
        if (i, budget_bytes) not in self.done:
            mesh, f, relaxation = self.wholes[i]
            found = self.done[i, budget_bytes] = relaxation.at(budget_bytes, self.some if part else self.stages.left)
            if self.all_axes:
                self.add_bound(budget_bytes, found)
            elif found is not None:
                self.set_of(mesh, f.all_strategies(found.strategies))
        return self.done[i, budget_bytes]

    # ---- sets of strategies ----------------------------------------------------------------------------------------

    def set_of(self, mesh: Mesh, strategies: tuple[int, ...]) -> _Set:
        """Strategies whose programs are the same to the last coefficient (dims of parameters' storage, mostly) are one set."""
        if (mesh, strategies) not in self.known:
            f, problem = self.stages.formulated(self.v, mesh, only=strategies)
            content = Program(replace(problem, budget_bytes=0.0)).proto().SerializeToString(deterministic=True)
            if content not in self.sets:
                self.sets[content] = _Set(mesh, strategies, f, problem)
            self.known[mesh, strategies] = content
        return self.sets[self.known[mesh, strategies]]

    def smallest_of(self, mine: _Set) -> float:
        if mine.smallest is None:
            mine.smallest = smallest(mine.problem, self.stages.left) or (math.inf, None)
        return mine.smallest[0]

    def smallest_on(self, mesh: Mesh, strategies: tuple[int, ...]) -> float:
        return self.smallest_of(self.set_of(mesh, strategies))

    def formulated(self, mine: _Set, segments: Segments) -> tuple[Problem, Make]:
        """The program of a set with the layers cut, and what makes a `Found` of an answer to it."""
        key = tuple(sorted(segments.items()))
        if key not in mine.cut:
            v, f, problem = self.v, mine.f, mine.problem
            if any(len(n) > 1 for n in segments.values()):
                v = self.stages.view({name: n for name, n in segments.items() if len(n) > 1})
                f, problem = self.stages.formulated(v, mine.mesh, only=mine.strategies)
            mine.cut[key] = (
                problem,
                lambda p, answer: Found(mine.mesh, p, f.names, v.shrunk, v.rules, answer, f.formulated(), tuple(mine.strategies)),
            )
        return mine.cut[key]

    def solved(self, mine: _Set, segments: Segments, budget_bytes: float, known: Decision | None = None) -> Found | None:
        """The nearer the bound is to what the strategies allow, the nearer to that the answer. known: something within the budget."""
        problem, found = self.formulated(mine, segments)
        problem = replace(problem, budget_bytes=budget_bytes)
        limits = self.stages.left
        allowed = mine.floor.bound_s(budget_bytes)
        apart = 1 - self.floor.bound_s(budget_bytes) / allowed if 0 < allowed < math.inf else 0.0
        try:
            answer = whole(problem, replace(limits, gap=min(limits.gap, max(WORTH, apart / 5)), nodes=min(limits.nodes, NODES)), known)
        except NoAnswer:
            return None
        return None if answer is None else found(problem, answer)

    def cuts(self, mine: _Set, relaxed: Relaxed) -> list[tuple[bool, Segments]]:
        """Where the layers are cut into two segments: at the share of layers that keep most of what only some of them keep.

        Either the first layers or the last are so many: what the last ones keep, backward frees first. The way that was better last comes first."""
        at = {name: (ks or [0])[0] for name, ks in shares(mine.f.formulated(), mine.problem, relaxed, self.copies).items()}
        ways = [(first, {n: two(self.copies[n], k, first) for n, k in at.items()}) for first in (self.first, not self.first)]
        return [way for way in ways if way[1] != self.uncut]

    @property
    def uncut(self) -> Segments:
        return {name: (n,) for name, n in self.copies.items()}

    def ends_alone(self) -> Iterator[Segments]:
        """One segment; the first layer by itself; the last."""
        yield self.uncut
        if any(n > 1 for n in self.copies.values()):
            for first in (True, False):
                yield {name: two(n, 1, first) for name, n in self.copies.items()}


def _answer(found: Found) -> Answer[Found]:
    assert isinstance(found.answer, Solution)
    return Answer(max(found.answer.price.row_bytes, default=0.0), found.answer.objective_s, found.answer.bound_s, found)


def within_budget(stages: Stages) -> Found:
    """What `Stages.run` is for, found as a frontier's plans are: little above the smallest peak that leads to an answer where the program of the budget has none in time.
    Raises NoAnswer, also where the smallest peak that is found is too much, and no bound says that every one is."""
    stages.start = time.perf_counter()
    budget_bytes = stages.training.budget_bytes
    found: list[Answer[Found]] = []
    with without_garbage_collection():
        budgets = Budgets(stages)
        with contextlib.suppress(TimeoutError):
            found = budgets.ask(budget_bytes)
        if not found:
            smallest = least(stages)
            if isinstance(smallest.answer, Infeasible) and budgets.bounding.at(budget_bytes, stages.left) is not None:
                raise NoAnswer(f"of what was found in time, {format_bytes(smallest.answer.least_bytes)} a device is the least", -math.inf)
            return smallest
        best = budgets.bounded(min(found, key=lambda a: a.time_s)).item
    stages.on_progress("within the budget", time.perf_counter() - stages.start)
    assert isinstance(best.answer, Solution)
    return replace(best, answer=replace(best.answer, seconds=time.perf_counter() - stages.start))


def least(stages: Stages) -> Found:
    """The fastest answer of the smallest peak that is found; how much it is over the budget, if it is."""
    stages.start = time.perf_counter()
    with without_garbage_collection():
        found = Budgets(stages).least()
    stages.on_progress("least memory", time.perf_counter() - stages.start)
    assert isinstance(found.answer, Solution)
    if max(found.answer.price.row_bytes, default=0.0) > stages.training.budget_bytes:
        return replace(found, answer=over(found, stages.training.budget_bytes))
    return replace(found, answer=replace(found.answer, seconds=time.perf_counter() - stages.start))


def over(found: Found, budget_bytes: float) -> Infeasible:
    """By how much the budget is short for it."""
    assert isinstance(found.answer, Solution)
    rows = found.answer.price.row_bytes
    worst = max(range(len(rows)), key=rows.__getitem__)
    return Infeasible(rows[worst] - budget_bytes, rows[worst], found.problem.rows[worst].name)
