"""The frontier of peak memory and step time: answers of which none is as small and as fast as another.

Let t(b) be the best time under a budget of b bytes. It falls as b grows; the frontier is where it falls. `trace` asks for answers at one budget after the
other: each in the middle of the gap between two answers in which most may be hidden (by memory, on a logarithmic scale, times seconds). An answer
that is not new says that nothing lies between it and the budget, so what is left of the gap is just under the next answer.

Bounds without asking. With every variable continuous the program is linear and b stands only on the right of its memory rows, so its optimum r(b) is
convex, and what the rows are worth at b0 is the slope of a line that lies under it:

    t(b) >= r(b) >= r(b0) + (b - b0) x sum of the memory rows' dual values at b0                              for every b

A few relaxations so bound all budgets (`Tangent`). Between two of them r is under their chord: where chord and tangents meet, none is missing.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ortools.math_opt.python import mathopt

from autopar.solver.highs import highs
from autopar.solver.model import Options, Program
from autopar.solver.problem import Key, Problem
from autopar.solver.solve import Limits, Solution, below, smallest, whole

T = TypeVar("T")
EXACT = 1e-6  # of the memory: two budgets nearer than this are one, for the solver too


@dataclass(frozen=True)
class Answer(Generic[T]):
    """item: what has this peak and this time. bound_s: nothing with such a peak is faster."""

    peak_bytes: float
    time_s: float
    bound_s: float
    item: T


def pareto(answers: Sequence[Answer[T]], tolerance: float = 0.0) -> list[Answer[T]]:
    """Those that are not dominated, the fastest first. tolerance: relative; what is faster by less is not faster."""
    front: list[Answer[T]] = []
    for a in sorted(answers, key=lambda a: (a.peak_bytes, a.time_s)):
        if not front or a.time_s < front[-1].time_s * (1 - tolerance):
            front.append(a)
    return front[::-1]


def trace(
    known: Sequence[Answer[T]],
    ask: Callable[[float], Sequence[Answer[T]]],
    count: int,
    go_on: Callable[[], bool] = lambda: True,
    step: float = EXACT,
    tolerance: float = 0.0,
) -> list[Answer[T]]:
    """At most `count` answers of the frontier, the fastest first.

    known: the fastest and the smallest among them. ask: answers within a budget, the best it knows of. step: relative difference of memory that is
    worth another answer; tolerance: of time.
    """
    front = pareto(known, tolerance)
    asked: dict[float, bool] = {}  # budget -> whether it brought anything
    while go_on():
        budget = _widest(front, asked, step) if len(_apart(front, step)) < count else None
        if budget is None:
            break
        before = front
        front = pareto([*front, *ask(budget)], tolerance)
        asked[budget] = front != before
    return _thinned(_apart(front, step), max(2, count))


def _widest(front: Sequence[Answer[T]], asked: Mapping[float, bool], step: float) -> float | None:
    """The next budget to ask at; None where no gap is left."""
    widest, budget = -1.0, None
    for fast, slow in itertools.pairwise(front):
        inside = [b for b in asked if slow.peak_bytes <= b < fast.peak_bytes]
        low = max([slow.peak_bytes, *inside])  # up to there nothing is faster than the slow one
        top = fast.peak_bytes * (1 - step)
        if low >= top:
            continue
        size = _area(front, slow.time_s - fast.time_s, low, fast.peak_bytes)
        if size > widest:
            middle = math.sqrt(max(1.0, low) * fast.peak_bytes)
            widest, budget = size, min(top, middle) if all(asked[b] for b in inside) else top
    return budget


def _area(front: Sequence[Answer[T]], seconds: float, low: float, high: float) -> float:
    """Of the rectangle in which an unknown part of the frontier may lie; from end to end of the frontier, memory and time each change by one."""
    fast, slow = front[0], front[-1]
    memory = math.log(max(1.0, high) / max(1.0, low)) / (math.log(max(1.0, fast.peak_bytes) / max(1.0, slow.peak_bytes)) or 1.0)
    return memory * seconds / ((slow.time_s - fast.time_s) or 1.0)


def _apart(front: Sequence[Answer[T]], step: float) -> list[Answer[T]]:
    """Without those that need hardly less memory than one that is faster; the ends stay."""
    out: list[Answer[T]] = []
    for a in front:
        if not out or a.peak_bytes <= out[-1].peak_bytes * (1 - step):
            out.append(a)
    if front and out[-1] is not front[-1]:
        out[len(out) - 1 if len(out) > 1 else 1 :] = [front[-1]]
    return out


def _thinned(front: list[Answer[T]], count: int) -> list[Answer[T]]:
    """Without those between neighbours that leave the least hidden; the ends stay."""
    front = list(front)
    while len(front) > count:
        gaps = [
            _area(front, after.time_s - before.time_s, after.peak_bytes, before.peak_bytes)
            for before, after in zip(front, front[2:], strict=False)
        ]
        del front[1 + min(range(len(gaps)), key=gaps.__getitem__)]
    return front


def frontier(problem: Problem, count: int = 20, limits: Limits | None = None, step: float = EXACT) -> list[Answer[Solution]]:
    """The frontier of one program, whose budget is not looked at; empty where its demands cannot be met at all."""
    limits = limits or Limits()

    def ask(budget_bytes: float) -> list[Answer[Solution]]:
        found = whole(replace(problem, budget_bytes=budget_bytes), limits)
        return [] if found is None else [Answer(max(found.price.row_bytes, default=0.0), found.objective_s, found.bound_s, found)]

    least = smallest(problem, limits, limits.gap)
    if least is None:
        return []
    return trace([*ask(math.inf), *ask(least[0] * (1 + EXACT))], ask, count, step=step)


# ---- relaxations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tangent:
    """A line under r(b). at_s: r at `budget_bytes`; slope: seconds a byte, never positive."""

    budget_bytes: float
    at_s: float
    slope: float

    def bound_s(self, budget_bytes: float) -> float:
        return self.at_s + (self.slope * (budget_bytes - self.budget_bytes) if self.slope else 0.0)


@dataclass(frozen=True)
class Relaxed:
    """An optimum with every variable continuous. shares: of every policy; strategies: of every choice the one with the largest share; dearer_s: by choice
    and strategy, what an answer with that strategy takes more than this optimum, at least."""

    tangent: Tangent
    shares: dict[Key, float]
    strategies: tuple[int, ...]
    dearer_s: dict[tuple[int, int], float]


class Relaxation:
    """A problem with every variable continuous, to be solved under one budget after the other. below_s: only what takes less is an answer."""

    def __init__(self, problem: Problem, below_s: float = math.inf) -> None:
        self.problem = problem
        self.program = below(Program(problem, Options(every_row=True)), below_s)
        self.program.integer = [False] * len(self.program.integer)
        self.model = mathopt.Model.from_model_proto(self.program.proto())
        kinds = zip(self.model.linear_constraints(), self.program.row_kind, strict=True)
        self.rows = [row for row, kind in kinds if kind == "memory"]

    def at(self, budget_bytes: float, limits: Limits | None = None) -> Relaxed | None:
        """None where not even this fits, or is fast enough: then nothing is. Raises TimeoutError."""
        limits, program = limits or Limits(), self.program
        for constraint, row in zip(self.rows, self.problem.rows, strict=True):
            constraint.upper_bound = (budget_bytes - row.constant) / 1e9
        params = mathopt.SolveParameters(time_limit=datetime.timedelta(seconds=limits.seconds))
        result = highs(self.model, params)
        reason = result.termination.reason
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return None
        if reason != mathopt.TerminationReason.OPTIMAL:
            raise TimeoutError(f"no relaxation within {limits.seconds:.0f} s ({reason.name.lower()})")
        prices, found = result.dual_values(), result.variable_values()
        slope = min(0.0, program.true_bound(sum(prices[row] for row in self.rows)) / 1e12)  # milliseconds a gigabyte
        at_s = program.true_bound(result.termination.objective_bounds.dual_bound) / 1e3 + self.problem.constant_s
        values = [found[v] for v in self.model.variables()]
        shares = {key: values[i] for key, i in program.variable.items() if key[0] == "y"}
        reduced = result.reduced_costs()
        costs = [reduced[v] for v in self.model.variables()]
        dearer_s = {(key[1], key[2]): max(0.0, program.true_bound(costs[i]) / 1e3) for key, i in program.variable.items() if key[0] == "x"}
        return Relaxed(Tangent(budget_bytes, at_s, slope), shares, program.decision(values)[0].strategies, dearer_s)


class Floor:
    """Lines under the best time at any budget, as relaxations bring them."""

    def __init__(self) -> None:
        self.lines: list[Tangent] = []
        self.levels: list[tuple[float, float]] = []  # a budget, and seconds that no smaller one allows
        self.least_bytes = 0.0  # the largest budget that is known to suffice for nothing

    def add(self, budget_bytes: float, found: Relaxed | None) -> None:
        if found is None:
            self.least_bytes = max(self.least_bytes, budget_bytes)
        else:
            self.lines.append(found.tangent)

    def bound_s(self, budget_bytes: float) -> float:
        if budget_bytes <= self.least_bytes:
            return math.inf
        levels = (bound_s for b, bound_s in self.levels if budget_bytes <= b)
        return max((*(line.bound_s(budget_bytes) for line in self.lines), *levels), default=0.0)

    def reach(self, time_s: float) -> float:
        """The smallest budget for which the lines allow this time."""
        crossings = (x.budget_bytes + (time_s - x.at_s) / x.slope for x in self.lines if x.slope)
        return max(crossings, default=0.0)

    def slack(self, budget_bytes: float) -> float:
        """By how much, relative, a relaxation at this budget could raise the bound."""
        above = min((x for x in self.lines if x.budget_bytes >= budget_bytes), key=lambda x: x.budget_bytes, default=None)
        below = max((x for x in self.lines if x.budget_bytes <= budget_bytes), key=lambda x: x.budget_bytes, default=None)
        now = self.bound_s(budget_bytes)
        if below is None or above is None or now <= 0:
            return math.inf
        if above is below:
            return 0.0
        share = 0.0 if math.isinf(above.budget_bytes) else (budget_bytes - below.budget_bytes) / (above.budget_bytes - below.budget_bytes)
        return max(0.0, (below.at_s + share * (above.at_s - below.at_s)) / now - 1)
