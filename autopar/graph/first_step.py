"""The first collective from one placement to another (`autopar.graph.redistribution`), on what matters of the two: where each axis is.

Planning asks for every pair of placements of every value, hundreds of thousands, so this is on plain tuples; and as what is left after the first
step is a pair too, most of a pair's steps are known when it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

# Where an axis is: (dim, stride) of the digit it owns, a reduction's name, or None when replicated. A placement is one for each axis of the mesh.
At = tuple[int, int] | str | None
Digit = tuple[int, int, int]  # axis, stride, width


class Taken(NamedTuple):
    """kind: as `redistribution.Step.kind`; axes: indices, in mesh order; after: where all axes are then.

    width: ranks that take part; parts: in how many the tensor is split then.
    """

    kind: str
    axes: tuple[int, ...]
    reduce: str
    after: tuple[At, ...]
    width: int
    parts: int


@lru_cache(maxsize=1 << 15)
def taken(cur: tuple[At, ...], dst: tuple[At, ...], shape: tuple[int, ...], widths: tuple[int, ...]) -> tuple[Taken, ...]:
    """The steps from `cur` to `dst`, of a tensor of `shape` on a mesh with axes of `widths`."""
    if cur == dst:
        return ()
    first = _first(cur, dst, shape, widths)
    return (first, *taken(first.after, dst, shape, widths))


def _first(cur: tuple[At, ...], dst: tuple[At, ...], shape: tuple[int, ...], widths: tuple[int, ...]) -> Taken:
    wrong = [i for i, at in enumerate(cur) if at != dst[i]]
    assert not any(isinstance(dst[i], str) for i in wrong), f"cannot make a Partial: {cur} -> {dst}"
    digits = [i for i in wrong if dst[i] is not None]
    free = _feasible(cur, dst, [i for i in digits if cur[i] is None], shape, widths)
    if free:
        return _taken("slice", widths, free, cur, dst)
    summed = [i for i in digits if isinstance(cur[i], str)]
    for r in sorted({str(cur[i]) for i in summed}):
        done = _feasible(cur, dst, [i for i in summed if cur[i] == r], shape, widths)
        if done:
            return _taken("reduce_scatter", widths, done, cur, dst, r)
    moving = [i for i in digits if isinstance(cur[i], tuple)]
    done = _feasible(cur, dst, moving, shape, widths, keep=True)
    if done:
        return _taken("all_to_all", widths, done, cur, dst)
    whole = [i for i in wrong if isinstance(cur[i], str) and dst[i] is None]
    if whole:
        r = str(cur[whole[0]])
        return _taken("all_reduce", widths, [i for i in whole if cur[i] == r], cur, None, r)
    gathered = [i for i in wrong if isinstance(cur[i], tuple) and dst[i] is None] or moving
    if gathered:
        return _taken("all_gather", widths, gathered, cur, None)
    # A Partial that must become a shard, with nothing in its way: reduced, then sliced.
    return _taken("all_reduce", widths, summed[:1], cur, None, str(cur[summed[0]]))


def _taken(kind: str, widths: tuple[int, ...], axes: list[int], cur: tuple[At, ...], dst: tuple[At, ...] | None, reduce: str = "") -> Taken:
    """dst: where the axes go; None: they are replicated."""
    after = list(cur)
    for i in axes:
        after[i] = dst[i] if dst is not None else None
    parts = math.prod([w for w, at in zip(widths, after, strict=True) if at.__class__ is tuple])
    return Taken(kind, tuple(axes), reduce, tuple(after), math.prod([widths[i] for i in axes]), parts)


def _feasible(
    cur: tuple[At, ...], dst: tuple[At, ...], axes: Sequence[int], shape: tuple[int, ...], widths: tuple[int, ...], keep: bool = False
) -> list[int]:
    """The axes of those that go to a digit in `dst` which can go there now, one after the other.

    keep: the digit they leave must not overlap the new one either (an all-to-all exposes both).
    """
    if not axes:
        return []
    here: dict[int, list[Digit]] = {}  # by dim
    for j, x in enumerate(cur):
        if isinstance(x, tuple):
            here.setdefault(x[0], []).append((j, x[1], widths[j]))
    exposed = {d: list(found) for d, found in here.items()} if keep else {}
    done = []
    for i in axes:
        at, width = dst[i], widths[i]
        assert isinstance(at, tuple)
        dim, stride = at
        if stride < 1 or shape[dim] % (stride * width):
            continue
        if dim in here and _is_taken(here[dim], i, stride, width):
            continue
        if keep:
            if dim in exposed and _is_taken(exposed[dim], -1, stride, width):
                continue
            exposed.setdefault(dim, []).append((i, stride, width))
            for digits in here.values():
                digits[:] = [x for x in digits if x[0] != i]
        here.setdefault(dim, []).append((i, stride, width))
        done.append(i)
    return done


def _is_taken(digits: list[Digit], i: int, stride: int, width: int) -> bool:
    """Whether one of `digits`, but axis i's, is not beside this one."""
    for j, s, w in digits:  # noqa: SIM110 (asked too often for a generator)
        if j != i and (s % (stride * width) if s > stride or (s == stride and w > width) else stride % (s * w)):
            return True
    return False
