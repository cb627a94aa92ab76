"""What moves when groups change: every device of the new ones gets what it has to hold and does not.

Optimizer state (a copy to step and moments) of a model is a square: its layers by the stages of a pipeline one way, each layer's elements by tensor ranks and then by ZeRO's
shards the other way. A rank holds a rectangle of it. A group that is as before moves nothing. Devices of the others, and idle ones, take the places of new groups,
the pairs that overlap most first; what a device lacks of its new rectangle is sent to it, from another group's copy or from a partner's. Compute copies are made of what
is stepped. That pairing is not the best there is, so real moves may be less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.planner.layout import Layout

Rectangles = NDArray[np.float64]  # rows of (from, to) of layers, (from, to) of elements


def places(layout: Layout, devices: int) -> Rectangles:
    """Of each rank of a group; shares of the whole."""
    dp = layout.replicas(devices)
    ways = dp * layout.cp if layout.zero else 1
    if layout.zero and layout.shard_ways:
        ways = layout.shard_ways
    rows = []
    for p in range(layout.pp):
        for d in range(dp * layout.cp):
            for t in range(layout.tp):
                at = t / layout.tp + (d % ways) / ways / layout.tp
                rows.append((p / layout.pp, (p + 1) / layout.pp, at, at + 1 / ways / layout.tp))
    return np.array(rows)


def moved(before: Sequence[Rectangles], after: Sequence[Rectangles], lost: int) -> tuple[float, float]:
    """Shares of the whole state: (in all, to the device that gets the most). before, after: the groups' ranks; lost: so many devices, the last ones of the first
    group of `before`, are gone."""
    old = [r if i else r[: len(r) - lost] for i, r in enumerate(before)]
    left = Counter(r.tobytes() for r in old)
    new = []
    for r in after:
        if left[r.tobytes()]:
            left[r.tobytes()] -= 1
        else:
            new.append(r)
    if not new:
        return 0.0, 0.0
    pool = []
    for r in old:
        if left[r.tobytes()]:
            left[r.tobytes()] -= 1
            pool.append(r)
    want = np.concatenate(new)
    have = np.concatenate(pool) if pool else np.zeros((0, 4))
    size = (want[:, 1] - want[:, 0]) * (want[:, 3] - want[:, 2])
    wide = np.minimum(want[:, None, 1], have[None, :, 1]) - np.maximum(want[:, None, 0], have[None, :, 0])
    high = np.minimum(want[:, None, 3], have[None, :, 3]) - np.maximum(want[:, None, 2], have[None, :, 2])
    both = np.clip(wide, 0, None) * np.clip(high, 0, None)
    lacks = size.copy()
    taken_new, taken_old = np.zeros(len(want), bool), np.zeros(len(have), bool)
    for flat in np.argsort(-both, axis=None, kind="stable"):
        i, j = divmod(int(flat), len(have))
        if both[i, j] <= 0:
            break
        if not taken_new[i] and not taken_old[j]:
            taken_new[i] = taken_old[j] = True
            lacks[i] -= both[i, j]
    return float(lacks.sum()), float(lacks.max())


def worst(before: Sequence[Rectangles], after: Sequence[Rectangles], lost: int) -> tuple[float, float]:
    """As `moved`, whichever group loses the devices."""
    found, seen = [(0.0, 0.0)], set()
    for i, r in enumerate(before):
        if r.tobytes() not in seen and len(r) >= lost:
            seen.add(r.tobytes())
            found.append(moved([r, *before[:i], *before[i + 1 :]], after, lost))
    return max(found)
