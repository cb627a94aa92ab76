"""At which positions memory may be largest, and what rows of such positions have in common. On numbers, before any row is written: of a program of many layers
most rows say no more than others do.

peaks        not where all that changes until the next position, or since the one before, is for the more there
corners      of layers that do the same, not those whose position is covered by a mean of the same position in others
undominated  not what another position covers, variable by variable
split        what is equal at all positions of a layer is added up once, and its rows are differences from that
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autopar.planner.formulation.live_bytes import Columns, Spans
from autopar.solver.problem import Key

CRUMB = 1e-2  # bytes: sums that differ by less are equal
HALVINGS = 4  # of a group of alike positions
ROUNDS = 6  # of pairs that are compared
SAMPLE = 64  # variables by which pairs are chosen

At = tuple[str, int]  # which spans, and a column


class LargestPositions:
    """spans: what lives, by name."""

    def __init__(self, columns: Columns, spans: Mapping[str, Spans]) -> None:
        self.columns, self.spans = columns, spans

    def stretches(self, of: Sequence[At]) -> Iterator[tuple[int, np.ndarray]]:
        """As `Columns.stretches`, of columns of several spans."""
        mine = {said: [at for which, at in of if which == said] for said in self.spans}
        rows = {said: [i for i, (which, _) in enumerate(of) if which == said] for said in self.spans}
        chunk = self.columns.chunk(len(of))
        parts = {said: self.columns.stretches(self.spans[said], found, chunk) for said, found in mine.items() if found}
        if len(parts) == 1:
            yield from next(iter(parts.values()))
            return
        for found in zip(*parts.values(), strict=True):
            live = np.empty((len(of), found[0][1].shape[1]))
            for said, (_, part) in zip(parts, found, strict=True):
                live[rows[said]] = part
            yield found[0][0], live

    # ---- neighbours --------------------------------------------------------------------------------------------------

    def peaks(self, said: str, columns: Sequence[int]) -> list[int]:
        """Of columns. From one position to the next little changes; so this takes time by how often something is made or let go."""
        c = self.columns
        first = sorted(at for at in columns if at < c.life.end)
        second = sorted((at for at in columns if at in c.positions), key=c.first_of)
        return [at for mine in (first, second) for at in self._tops(self.spans[said], mine)]

    def _tops(self, spans: Spans, of: Sequence[int]) -> list[int]:
        """Of columns in the order of their positions."""
        columns, positions = np.array(of, dtype=np.int64), np.array([self.columns.first_of(at) for at in of], dtype=np.int64)
        if len(of) < 2:
            return list(of)
        variable, index, size = _changes(spans, columns, positions)
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

    # ---- layers that do the same -------------------------------------------------------------------------------------

    def corners(self, groups: Sequence[Sequence[At]]) -> list[At]:
        """Of groups in the order of time, those that no mean of their group's first and last covers, nor of two that are kept between these. One layer after
        the other, what is kept grows evenly, and gradients do: where neither end is the largest, none between is."""
        kept = {at for group in groups for at in (group[0], group[-1])}
        groups = [group for group in groups if len(group) > 2]
        for _ in range(HALVINGS):
            if not groups:
                break
            above = self._above_means(groups)
            halves: list[Sequence[At]] = []
            for group in groups:
                left = [at for at in group[1:-1] if at in above]
                if left:
                    middle = len(left) // 2
                    kept.add(left[middle])
                    ways = [group[0], *left[: middle + 1]], [*left[middle:], group[-1]]
                    halves += [half for half in ways if len(half) > 2]
            groups = halves
        return [*sorted(kept), *(at for group in groups for at in group[1:-1])]

    def _above_means(self, groups: Sequence[Sequence[At]]) -> set[At]:
        """Those that no mean of the first and the last of their group covers."""
        every = list(dict.fromkeys(at for group in groups for at in group))
        place = {at: i for i, at in enumerate(every)}
        inner = [np.array([place[at] for at in group[1:-1]]) for group in groups]
        least, most = [np.zeros(len(mine)) for mine in inner], [np.ones(len(mine)) for mine in inner]
        for _, live in self.stretches(every):
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
        return {group[1 + int(i)] for g, group in enumerate(groups) for i in np.flatnonzero(least[g] > most[g])}

    # ---- any two -----------------------------------------------------------------------------------------------------

    def undominated(self, of: Sequence[At], given: Sequence[At] = ()) -> list[At]:
        """Of `of`, what no other of them, nor any of `given`, covers variable by variable; of equal ones the first.

        A few variables say for most pairs that they do not; the others are compared, one for each position at a time."""
        every = [*given, *of]
        n, fixed = len(every), len(given)
        may = np.ones((n, n), dtype=bool)  # [i, j]: i may cover j
        may[:, :fixed] = False
        np.fill_diagonal(may, False)
        for column in self._sample(every):
            may &= column[:, None] >= column[None, :] - CRUMB
        dropped = np.zeros(n, dtype=bool)
        for _ in range(ROUNDS):
            may[dropped] = False  # what covers it covers what it covers
            may[:, dropped] = False
            below = np.flatnonzero(may.any(axis=0))
            if not len(below):
                break
            above = may[:, below].argmax(axis=0)
            least, most = np.full(len(below), np.inf), np.full(len(below), -np.inf)
            for _, live in self.stretches(every):
                more = live[above] - live[below]
                np.minimum(least, more.min(axis=1), out=least)
                np.maximum(most, more.max(axis=1), out=most)
            may[above, below] = False
            covered = least >= -CRUMB
            equal = covered & (most <= CRUMB)
            dropped[below[covered & ~(equal & (above > below))]] = True
        return [at for at, out in zip(every[fixed:], dropped[fixed:], strict=True) if not out]

    def _sample(self, of: Sequence[At]) -> Iterator[np.ndarray]:
        """Bytes by position, of some variables, those first that tell most positions apart."""
        found: list[tuple[float, np.ndarray]] = []
        for _, live in self.stretches(of):
            spread = live.std(axis=0) / (np.abs(live.mean(axis=0)) + 1.0)  # changes of bytes may be below nought
            found += [(float(spread[k]), live[:, k].copy()) for k in np.argsort(-spread, kind="stable")[:SAMPLE]]
        found.sort(key=lambda x: -x[0])
        yield from (column for _, column in found[:: max(1, len(found) // SAMPLE)])

    # ---- as rows -----------------------------------------------------------------------------------------------------

    def split(self, groups: Sequence[Sequence[At]]) -> list[tuple[dict[Key, float], list[dict[Key, float]]]]:
        """By group: bytes by variable that all of its positions have, and what each has besides. All of a value's policies are on one side."""
        every = [at for group in groups for at in group]
        ends = np.cumsum([0, *map(len, groups)])
        keys = list(self.columns.index)
        found: list[tuple[dict[Key, float], list[dict[Key, float]]]] = [({}, [{} for _ in group]) for group in groups]
        for start, live in self.stretches(every):
            for g, (common, own) in enumerate(found):
                part = live[ends[g] : ends[g + 1]]
                low = part.min(axis=0)
                same = (low > 0) & (part.max(axis=0) == low) & (len(part) > 1)
                which = np.flatnonzero(same)
                common.update(zip([keys[start + k] for k in which], low[which].tolist(), strict=True))
                for mine, row in zip(own, part, strict=True):
                    which = np.flatnonzero(~same & (row != 0))
                    mine.update(zip([keys[start + k] for k in which], row[which].tolist(), strict=True))
        for common, own in found:
            apart = {key[1] for mine in own for key in mine if key[0] == "y"}
            for key in [key for key in common if key[0] == "y" and key[1] in apart]:
                nbytes = common.pop(key)
                for mine in own:
                    mine[key] = nbytes
        return found


def _changes(spans: Spans, columns: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
