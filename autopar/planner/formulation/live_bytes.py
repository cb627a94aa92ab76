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

LARGEST = 4_000_000  # numbers in a stretch of variables
ROUNDS = 4  # halvings of a group of alike positions
CRUMB = 1e-2  # bytes: sums that differ by less are equal


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

    def peaks(self, spans: Spans, columns: Sequence[int]) -> list[int]:
        """Of `columns`, those at which memory may be largest: not where all that changes until the next, or since the one before, is for the more there.

        From one position to the next little changes; so this goes by the differences, and takes time by how often something is made or let go."""
        first = sorted(at for at in columns if at < self.life.end)
        second = sorted((at for at in columns if at in self.positions), key=self.first_of)
        return [at for mine in (first, second) for at in self._tops(spans, mine)]

    def _tops(self, spans: Spans, of: Sequence[int]) -> list[int]:
        """Of columns in the order of their positions."""
        columns, positions = np.array(of, dtype=np.int64), np.array([self.first_of(at) for at in of], dtype=np.int64)
        if len(of) < 2:
            return list(of)
        variable, index, size = self._changes(spans, columns, positions)
        while True:
            grows, shrinks = _signs(variable, index, size, len(columns))
            keep: list[int] = []
            for i in range(len(columns)):
                below_next = i + 1 < len(columns) and not shrinks[i + 1]
                below_last = bool(keep) and keep[-1] == i - 1 and not grows[i]
                if not (below_next or below_last):
                    keep.append(i)
            if len(keep) == len(columns):
                return [int(at) for at in columns]
            kept = np.array(keep, dtype=np.int64)
            columns, index = columns[kept], np.searchsorted(kept, index)
            inside = (index > 0) & (index < len(kept))
            variable, index, size = variable[inside], index[inside], size[inside]

    def _changes(self, spans: Spans, columns: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What changes in front of which of `columns`: variables, the columns' places in the list, and bytes."""
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        if spans.plain:
            variable, first, last, size = (np.array(x) for x in zip(*spans.plain, strict=True))
            parts += [(variable, np.searchsorted(positions, first), size), (variable, np.searchsorted(positions, last + 1), -size)]
        steps: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for k, nbytes, often in spans.copies:
            if id(often) not in steps:
                change = np.diff(often[columns])
                at = np.flatnonzero(change)
                steps[id(often)] = at + 1, change[at]
            at, change = steps[id(often)]
            parts.append((np.full(len(at), k), at, change * nbytes))
        variable, index, size = (np.concatenate(x) for x in zip(*parts, strict=True)) if parts else (np.zeros(0, dtype=np.int64),) * 3
        inside = (index > 0) & (index < len(columns))
        return variable[inside], index[inside], size[inside]

    def corners(self, spans: Spans, groups: Sequence[Sequence[int]]) -> list[int]:
        """Of groups of columns, those that are not covered by a mean of their group's first and last, nor of two that are kept between these.

        Of layers that do the same, one after the other, what is kept grows evenly, and gradients do: where neither end is the largest, none between is."""
        kept = {at for group in groups for at in (group[0], group[-1])}
        groups = [group for group in groups if len(group) > 2]
        for _ in range(ROUNDS):
            if not groups:
                break
            above = self._above_means(spans, groups)
            halves: list[Sequence[int]] = []
            for group in groups:
                left = [at for at in group[1:-1] if at in above]
                if left:
                    middle = len(left) // 2
                    kept.add(left[middle])
                    ways = [group[0], *left[: middle + 1]], [*left[middle:], group[-1]]
                    halves += [half for half in ways if len(half) > 2]
            groups = halves
        return [*kept, *(at for group in groups for at in group[1:-1])]

    def _above_means(self, spans: Spans, groups: Sequence[Sequence[int]]) -> set[int]:
        """Columns that no mean of the first and the last of their group covers."""
        columns = list(dict.fromkeys(at for group in groups for at in group))
        place = {at: i for i, at in enumerate(columns)}
        inner = [np.array([place[at] for at in group[1:-1]]) for group in groups]
        least, most = [np.zeros(len(mine)) for mine in inner], [np.ones(len(mine)) for mine in inner]
        for _, live in self.stretches(spans, columns):
            for g, group in enumerate(groups):
                last = live[place[group[-1]]]
                more = live[place[group[0]]] - last
                needs = live[inner[g]] - last - CRUMB  # at most share x more
                up, down = more > CRUMB, more < -CRUMB
                if up.any():
                    np.maximum(least[g], (needs[:, up] / more[up]).max(axis=1), out=least[g])
                if down.any():
                    np.minimum(most[g], (needs[:, down] / more[down]).min(axis=1), out=most[g])
                flat = ~(up | down)
                if flat.any():
                    most[g][needs[:, flat].max(axis=1) > CRUMB] = -1.0
        return {group[1 + i] for g, group in enumerate(groups) for i in np.flatnonzero(least[g] > most[g])}

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

    def stretches(self, spans: Spans, columns: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Bytes by column and variable, a stretch of variables at a time, with the number of its first: most of them live at few positions, so of a program
        with a hundred thousand of them all columns together would be the largest thing that planning holds."""
        places = np.array([self.first_of(at) for at in columns], dtype=np.int64)
        before = np.array([at in self.after for at in columns], dtype=bool)
        order = {late: (mine := np.flatnonzero(before == late))[np.argsort(places[mine], kind="stable")] for late in (False, True)}
        plain = sorted(spans.plain)
        variable, first, last, size = (np.array(x) for x in zip(*plain, strict=True)) if plain else (np.zeros(0, dtype=np.int64),) * 4
        reloaded = np.isin(variable, self.reloaded)
        copies = sorted(spans.copies, key=lambda c: c[0])
        often = {id(o): o[list(columns)] for _, _, o in copies}
        j, total = 0, len(self.index)
        chunk = max(64, LARGEST // max(1, len(columns)))
        for start in range(0, total, chunk):
            stop = min(total, start + chunk)
            live = np.zeros((len(columns), stop - start))
            at = slice(int(np.searchsorted(variable, start)), int(np.searchsorted(variable, stop)))
            for late, mine in order.items():
                if len(mine):
                    # In front of a position lives what was made before it; but what is brought back is on its way already.
                    begin = first[at] + (late & ~reloaded[at])
                    live[mine] = _spread(variable[at] - start, begin, last[at], size[at], places[mine], stop - start)
            while j < len(copies) and copies[j][0] < stop:
                k, nbytes, which = copies[j]
                live[:, k - start] += nbytes * often[id(which)]
                j += 1
            yield start, live

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


def _signs(variable: np.ndarray, index: np.ndarray, size: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """By place: whether some variable has more there than at the place before, and whether one has less."""
    grows, shrinks = np.zeros(width, dtype=bool), np.zeros(width, dtype=bool)
    if len(index):
        _, which = np.unique(index * (int(variable.max()) + 1) + variable, return_inverse=True)
        total = np.bincount(which, weights=size)
        place = np.zeros(len(total), dtype=np.int64)
        place[which] = index
        grows[place[total > CRUMB]] = True
        shrinks[place[total < -CRUMB]] = True
    return grows, shrinks
