"""Strategies of little memory, where no plan fits at those that are fastest."""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.planner.formulation.problem import Formulator
from autopar.solver.frontier import Relaxed

SHRINK = 0.8  # of the smallest peak known: the budget at which strategies with a smaller one are looked for
NARROW = 0.1  # of a budget that suffices for nothing: they are not looked for nearer to it


def low_memory_strategies(
    f: Formulator, relaxed: Callable[[float], Relaxed | None], peak: Callable[[tuple[int, ...]], float]
) -> tuple[int, ...] | None:
    """Strategies with the smallest peak found; None where none was.

    relaxed: of the relaxed program under a budget; peak: the smallest at given strategies, of a program with those alone. Only that one counts what is made
    again for something else that is made again. So the strategies that are smallest by the relaxed rows are not the smallest; those that
    are fastest under ever smaller budgets are better, until nothing fits.
    """
    peaks: dict[tuple[int, ...], float] = {}
    budget, enough, short = math.inf, math.inf, 0.0
    try:
        while budget > short * (1 + NARROW):
            found = relaxed(budget)
            if found is None:
                short = budget
            else:
                enough, strategies = budget, f.all_strategies(found.strategies)
                if strategies not in peaks:
                    peaks[strategies] = peak(strategies)
            # Down in steps while everything fits, then between what suffices for something and what for nothing.
            budget = math.sqrt(enough * short) if short else SHRINK * min(enough, *peaks.values())
            if math.isinf(budget):
                break
    except TimeoutError:
        pass
    best = min(peaks, key=peaks.__getitem__, default=None)
    return best if best is not None and math.isfinite(peaks[best]) else None
