"""Bytes that live at positions, as sums over the program's variables: spans in which a variable holds some, added up column by column.

A column is a position of the graph; the positions of backward in a middle copy have a second one, for the last of the copies that it stands for to run; and what
lives before a position runs, where something may be made again for it, has one too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.planner.formulation.lifetimes import Lifetimes
from autopar.solver.problem import Key
from autopar.solver.watch import check

LARGEST = 4_000_000  # numbers in a stretch of variables


@dataclass
class Spans:
    """plain: variable, first and last position, bytes; copies: variable, bytes and how often by column, where copies of layers hold some."""

    plain: list[tuple[int, int, int, float]] = field(default_factory=list)
    copies: list[tuple[int, float, np.ndarray]] = field(default_factory=list)

    def __add__(self, other: Spans) -> Spans:
        return Spans(self.plain + other.plain, self.copies + other.copies)


class Columns:
    """wanted: positions of backward before which something may be made again."""

    def __init__(self, life: Lifetimes, wanted: Iterable[int]) -> None:
        self.life = life
        q = life.program.q
        # Positions in copies that stand for several, forward and backward; by operator or leaf, the copy that it is in.
        self.middle: list[tuple[list[int], list[int]]] = []
        self.middle_of: dict[str, int] = {}
        for stack in q.stacks:
            for forward, backward, leaves in zip(stack.forward, stack.backward, stack.leaves, strict=True):
                if forward and q.times[forward[0]] > 1:
                    for n in (*forward, *backward, *leaves):
                        self.middle_of[n] = len(self.middle)
                    self.middle.append(([life.position[n] for n in forward], [life.position[n] for n in backward]))
        # Column i is position i; from `end` + 1 on, positions of backward in middle copies a second time, for the last of M to run.
        self.recompute = {i: life.end + 1 + k for k, i in enumerate(i for _, backward in self.middle for i in backward)}
        self.positions = {column: i for i, column in self.recompute.items()}
        # Columns of what lives before a position of backward runs, of those for which something may be made again.
        columns = [at for p in sorted(wanted) for at in self.at(p)]
        self.before = {at: life.end + 1 + len(self.recompute) + k for k, at in enumerate(columns)}
        self.after = {column: at for at, column in self.before.items()}
        self.width = life.end + 1 + len(self.recompute) + len(self.before)
        self.index: dict[Key, int] = {}
        self.known_often: dict[tuple[int, int, int, int, bool], np.ndarray] = {}
        self.reloaded: list[int] = []  # variables of what is brought back: a reload is issued before what its position makes again

    def at(self, position: int) -> tuple[int, ...]:
        """The columns of a position."""
        return (position, self.recompute[position]) if position in self.recompute else (position,)

    def of(self, key: Key) -> int:
        """The variable's number."""
        return self.index.setdefault(key, len(self.index))

    def add(self, spans: Spans, key: Key, nbytes: float, first: int, last: int, tensor: str = "", grows: bool = False) -> None:
        """To `spans`, bytes of `tensor` from position `first` to `last`.

        tensor: one of which copies further up or down hold others at the same time ("": it lives within its copy and the next);
        grows: made in backward and held to the end, else made in forward and held to its use in backward.
        """
        if last < first or not nbytes:
            return
        k, last = self.of(key), min(last, self.life.end - 1)
        times = self.life.program.q.tensor_times[tensor] if tensor else 1
        middle = self.middle_of.get(tensor.split(".")[0], self.middle_of.get(tensor)) if tensor else None
        if times == 1 or middle is None:
            spans.plain.append((k, first, last, nbytes))
        else:
            spans.copies.append((k, nbytes, self.often(middle, times, first, last, grows)))

    def live(self, spans: Spans, columns: Sequence[int]) -> dict[int, dict[Key, float]]:
        """Column -> bytes by variable."""
        out: dict[int, dict[Key, float]] = {at: {} for at in columns}
        keys = list(self.index)
        for start, live in self.stretches(spans, columns):
            for i, at in enumerate(columns):
                there = live[i]
                found = np.flatnonzero(there)
                out[at].update(zip([keys[start + k] for k in found], there[found].tolist(), strict=True))
        return out

    def stretches(self, spans: Spans, columns: Sequence[int], chunk: int = 0) -> Iterator[tuple[int, np.ndarray]]:
        """Bytes by column and variable, a stretch of variables at a time, with the number of its first: most of them live at few positions, so of a program
        with a hundred thousand of them all columns together would be the largest thing that planning holds. chunk: of so many."""
        places = np.array([self.first_of(at) for at in columns], dtype=np.int64)
        before = np.array([at in self.after for at in columns], dtype=bool)
        order = {late: (mine := np.flatnonzero(before == late))[np.argsort(places[mine], kind="stable")] for late in (False, True)}
        plain = sorted(spans.plain)
        variable, first, last, size = (np.array(x) for x in zip(*plain, strict=True)) if plain else (np.zeros(0, dtype=np.int64),) * 4
        reloaded = np.isin(variable, self.reloaded)
        copies = sorted(spans.copies, key=lambda c: c[0])
        which = np.array(columns, dtype=np.int64)
        often = {i: o[which] for i, o in {id(o): o for _, _, o in copies}.items()}
        j, total = 0, len(self.index)
        chunk = chunk or self.chunk(len(columns))
        for start in range(0, total, chunk):
            check()
            stop = min(total, start + chunk)
            live = np.zeros((len(columns), stop - start))
            at = slice(int(np.searchsorted(variable, start)), int(np.searchsorted(variable, stop)))
            for late, mine in order.items():
                if len(mine):
                    # In front of a position lives what was made before it; but what is brought back is on its way already.
                    begin = first[at] + (late & ~reloaded[at])
                    live[mine] = _spread(variable[at] - start, begin, last[at], size[at], places[mine], stop - start)
            while j < len(copies) and copies[j][0] < stop:
                k, nbytes, times = copies[j]
                live[:, k - start] += nbytes * often[id(times)]
                j += 1
            yield start, live

    @staticmethod
    def chunk(columns: int) -> int:
        return max(64, LARGEST // max(1, columns))

    def first_of(self, column: int) -> int:
        """The position that a column is of."""
        column = self.after.get(column, column)
        return column if column <= self.life.end else self.positions[column]

    def often(self, middle: int, times: int, first: int, last: int, grows: bool) -> np.ndarray:
        """By column: how many of a tensor's copies are alive."""
        what = middle, times, first, last, grows
        if what in self.known_often:
            return self.known_often[what]
        own = np.zeros(self.width)
        own[first : last + 1] = 1.0
        for i, j in self.recompute.items():
            own[j] = own[i]
        for i, j in self.before.items():
            own[j] = own[i] * (self.first_of(i) != first)
        # This one is the nearest to whatever position it is; the others of the times are there whole, or not yet, or no more.
        forward, backward = self.middle[middle]
        others = np.zeros(self.width)
        if grows:
            others[max(backward, default=first) + 1 : self.life.end] = 1.0
        else:
            others[min(forward) : max(backward, default=last) + 1] = 1.0
        for i, j in self.recompute.items():
            others[j] = others[i]
        others[[self.recompute[i] for i in backward]] = float(grows)
        for i, j in self.before.items():
            others[j] = others[i]
        found = self.known_often[what] = own + (times - 1) * others
        return found


def _spread(variable: np.ndarray, first: np.ndarray, last: np.ndarray, size: np.ndarray, places: np.ndarray, width: int) -> np.ndarray:
    """By place (in order) and variable, what spans from `first` to `last` hold there."""
    lo, hi = np.searchsorted(places, first, "left"), np.searchsorted(places, last, "right")
    some = hi > lo
    where = np.concatenate([lo[some] * width + variable[some], hi[some] * width + variable[some]])
    weights = np.concatenate([size[some], -size[some]])
    live = np.bincount(where, weights, (len(places) + 1) * width).reshape(len(places) + 1, width)[:-1]
    return np.round(np.cumsum(live, axis=0), 3)  # a sum that is over leaves no crumbs
