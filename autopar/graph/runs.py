"""Which indices of a dim the ranks of a group have, as runs of neighbours; and of attention over runs that go round, which of them queries reach.

Of n ranks, rank r has its own runs of keys at first, and those of rank r - h after h hops. Query i sees keys i - before to i + after at most; a bound below
zero is none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement

STRIP = 512  # neighbouring queries that one kernel computes where keys are bounded on both sides, at least: over fewer it is slow


def rank_by_rank(digits: Sequence[tuple[int, str | None]], size: int, axes: tuple[str, ...], mesh: Mesh) -> list[int]:
    """The global indices that each rank of the group over `axes` has along a dim of `size`, in the order of its ranks: the first axis is the major one. digits:
    of the placement (`Placement.digits`); without the minor ones, the first index of every run of neighbours."""
    out = []
    for at in itertools.product(*(range(mesh.axis_size(a)) for a in axes)):
        coordinate = dict(zip(axes, at, strict=True))
        index, stride = [0], size
        for width, axis in digits:
            stride //= width
            here = range(width) if axis is None else [coordinate[axis]]
            index = [i + d * stride for i in index for d in here]
        out += index
    return out


def runs_of(place: Placement, dim: int, axes: tuple[str, ...], mesh: Mesh) -> tuple[list[int], int]:
    """Of what each rank of the group over `axes` has along `dim`, in the order of its ranks: the global index of the first of every run of neighbours, and how
    long a run is."""
    digits = place.digits(dim, mesh)
    run = digits.pop()[0] if digits and digits[-1][1] is None else 1
    return rank_by_rank(digits, place.shape[dim], axes, mesh), run


def strip(run: int, before: int, after: int) -> int:
    """How many neighbouring queries of a run one kernel computes: where few keys are seen, about as many, so that of what it computes half is seen."""
    return run if before < 0 or after < 0 else min(run, max(STRIP, before + after + 1))


class Round(NamedTuple):
    """hop: by how many ranks the block that is visited has come; share: of the (query, key) pairs that the busiest rank computes, those of this block."""

    hop: int
    share: float


class Rounds(NamedTuple):
    """The blocks that a rank visits. pairs: (query, key) pairs that the busiest rank computes; kernels: that it does so with."""

    visits: tuple[Round, ...]
    pairs: int
    kernels: int


@lru_cache(maxsize=4096)
def visited(starts: tuple[int, ...], run: int, ranks: int, before: int, after: int) -> tuple[int, ...]:
    """Which blocks some rank sees anything of, by the hops to them: its own, 0, is among them."""
    each, size = len(starts) // ranks, run * len(starts)
    owner = {s // run: i // each for i, s in enumerate(starts)}
    found = {0}
    for i in reversed(range(len(starts))):  # the last ones see most, where all before is seen
        found |= {(i // each - owner[j]) % ranks for j in _seen(starts[i], run, run, size, before, after)}
        if len(found) == ranks:
            break
    return tuple(sorted(found))


@lru_cache(maxsize=4096)
def rounds(starts: tuple[int, ...], run: int, ranks: int, before: int, after: int) -> Rounds:
    """What is computed of each visited block, keys being cut off at the bounds. The busiest rank is one in the middle, whose queries see most on either side,
    or, where a side has no bound, the last or the first one."""
    each, size = len(starts) // ranks, run * len(starts)
    owner = {s // run: i // each for i, s in enumerate(starts)}
    hops, wide, best = visited(starts, run, ranks, before, after), strip(run, before, after), Rounds((), -1, 0)
    for r in sorted({ranks - 1, ranks // 2, 0}):
        pairs, kernels = dict.fromkeys(hops, 0), 0
        for first in starts[r * each : (r + 1) * each]:
            for at in range(first, first + run, wide):
                rows = min(wide, first + run - at)
                low, high = _bounds(at, rows, size, before, after)
                theirs: set[int] = set()
                for j in _seen(at, rows, run, size, before, after):
                    hop = (r - owner[j]) % ranks
                    pairs[hop] += rows * (min(high, (j + 1) * run) - max(low, j * run))
                    theirs.add(hop)
                kernels += len(theirs)
        total = sum(pairs.values())
        if total > best.pairs:
            best = Rounds(tuple(Round(h, n / max(total, 1)) for h, n in pairs.items()), total, kernels)
    return best


def _bounds(first: int, rows: int, size: int, before: int, after: int) -> tuple[int, int]:
    """The first key that any of `rows` neighbouring queries sees, and the one behind the last."""
    return 0 if before < 0 else max(0, first - before), size if after < 0 else min(size, first + rows + after)


def _seen(first: int, rows: int, run: int, size: int, before: int, after: int) -> range:
    """Which runs of keys, counted from the first of the sequence, some of `rows` neighbouring queries see."""
    low, high = _bounds(first, rows, size, before, after)
    return range(low // run, -(-high // run))


def strips(runs: Sequence[tuple[int, slice]], wide: int) -> Iterator[tuple[int, slice]]:
    """Runs of queries (the global index of the first, where they are), cut into pieces of at most `wide`."""
    for first, here in runs:
        for at in range(here.start, here.stop, wide):
            yield first + at - here.start, slice(at, min(at + wide, here.stop))
