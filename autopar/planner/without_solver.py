"""A plan where the solver has no answer in time: by descent (`autopar.solver.descent`), from hand layouts and from what each operator would take by itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence

from autopar.planner.formulation.problem import Formulator
from autopar.planner.found import Found
from autopar.solver.descent import Descent, descend
from autopar.solver.evaluate import evaluate
from autopar.solver.problem import Problem
from autopar.solver.solve import Solution

SECONDS = 4.0
TRIED = 3  # sets of strategies that were found, at most, for which the solver is asked what to keep


def by_descent(
    f: Formulator,
    problem: Problem,
    hands: Iterable[Problem],
    formulated: Callable[[Sequence[int]], tuple[Formulator, Problem]],
    cut: Callable[[Sequence[int], Found | None], Found | None],
    found: Callable[[Formulator, Problem, Solution], Found],
) -> Found | None:
    """The best that is found; None where nothing fits. hands: `problem` kept to hand layouts; formulated: at strategies, with nothing else to choose; cut: the best of what is given and
    of cuts of the layers at strategies, by the solver, which is asked only where what descent keeps does not fit; found: a solution, without a bound."""
    end = time.perf_counter() + SECONDS
    starts = [descend(kept, late=lambda: time.perf_counter() > end)[0] for kept in hands]
    ways = [f.all_strategies(x) for x in descend(problem, starts, lambda: time.perf_counter() > end)]
    for strategies in ways:
        narrow, only = formulated(strategies)
        if (kept := all_kept(only)) is not None:
            return found(narrow, only, kept)
    best: Found | None = None
    for strategies in ways[:TRIED]:
        with contextlib.suppress(TimeoutError):
            best = cut(strategies, best)
    return best


def all_kept(only: Problem) -> Solution | None:
    """All that backward reads is kept; None where that does not fit. only: at strategies, with nothing else to choose."""
    decision = Descent(only).decision((0,) * len(only.choices))
    price = evaluate(only, decision)
    return Solution(decision, price, 0.0, 0.0, "time", 0, 0) if price.feasible else None
