"""Runs of copies in a sequence of operators: tandem repeats, and where they are best cut (`solver.stacks`, 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar.graph.graph import Op
from autopar.solver.stacks import Copies, Program

MIN_PERIOD = 2


@dataclass(frozen=True)
class Run:
    """Operators [start, end) of a sequence equal themselves shifted by `period`, as far as their hashes say."""

    start: int
    end: int
    period: int


def longest_run(ids: Any, lo: int, hi: int, refused: set[tuple[int, int]]) -> Run | None:
    """The run in [lo, hi) whose folding saves the most operators."""
    best, best_saved = None, 0
    a = ids[lo:hi]
    for period in range(MIN_PERIOD, (hi - lo) // 2 + 1):
        equal = np.concatenate(([False], a[:-period] == a[period:], [False]))
        if np.count_nonzero(equal) <= best_saved:
            continue
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            saved = int(end - start) // period * period
            if saved > best_saved and (lo + int(start), period) not in refused:
                best, best_saved = Run(lo + int(start), lo + int(end) + period, period), saved
    return best


def cut(run: Run, numbers: Sequence[frozenset[int]], last: Sequence[int]) -> Run:
    """`run` from the place on where copies begin.

    numbers: per operator the layer numbers it shows; last: per operator the position of its last reader.
    """

    read = np.asarray(last)

    def cost(start: int) -> tuple[int, int, int, int]:
        shown = {n for ns in numbers[start : start + run.period] for n in ns}
        after = read[start : start + run.period] - start - run.period
        crossing = int(np.count_nonzero((after >= 0) & (after < run.period)))
        return len(shown), -((run.end - start) // run.period), crossing, start

    starts = range(run.start, min(run.start + run.period, run.end - 2 * run.period + 1))
    return replace(run, start=min(starts, key=cost))


def copies_of(run: Run, names: Sequence[str]) -> Copies:
    count = (run.end - run.start) // run.period
    return tuple(tuple(names[run.start + k * run.period : run.start + (k + 1) * run.period]) for k in range(count))


def last_readers(program: Program, ops: Sequence[Op]) -> list[int]:
    position = {op.name: i for i, op in enumerate(ops)}
    last = list(range(len(ops)))
    for i, op in enumerate(ops):
        for t in program.inputs[op.name]:
            maker = program.maker.get(t)
            if maker and maker[0] in position:
                last[position[maker[0]]] = i
    return last
