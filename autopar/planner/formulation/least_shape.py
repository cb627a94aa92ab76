"""Placements of one tensor, of the smallest tensor that moves between them in the same way.

The collectives from one placement to another (`autopar.graph.redistribution`) depend on which digits of a dim are split and on what divides what, not on what all
of them divide: a hidden size of 16,384 and one of 53,248, each split in 8 or in 64, have the same. So tensors of many shapes share what is known of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.graph.placement import Placement, Split


def least_shape(places: Sequence[Placement]) -> tuple[list[Placement], float]:
    """`places`, which are of one shape, at the least shape; and how many elements stand behind one of its."""
    shape = places[0].shape if places else (0,)
    if not all(shape) or any(p.shape != shape for p in places):  # of no elements, or padded storage
        return list(places), 1.0
    strides: dict[int, set[int]] = {}
    for p in places:
        for s in p.splits:
            strides.setdefault(s.dim, set()).add(s.stride)
    unit = {d: math.gcd(shape[d], *found) for d, found in sorted(strides.items())}
    at = {d: i for i, d in enumerate(unit)}
    least = tuple(shape[d] // u for d, u in unit.items())
    small = [Placement(least, tuple(Split(at[s.dim], s.stride // unit[s.dim], s.axis) for s in p.splits), p.partial) for p in places]
    return small, math.prod(shape) / math.prod(least)
