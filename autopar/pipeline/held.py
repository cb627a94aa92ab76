"""How much of its activations a rank holds at once.

A micro-batch is in flight in a chunk from the start of its forward to the end of its backward. Works of a rank do not overlap, so what is held follows
from their order alone, whatever they take: a forward adds, a backward takes away, and the most is held just after some forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.pipeline.schedule import Schedule


def _changes(schedule: Schedule, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Chunk of each of the rank's works, and +1 or -1."""
    row = schedule.order(rank) // schedule.micro_batches
    stage = np.minimum(row, 2 * schedule.stages - 1 - row)
    return stage // schedule.ranks, np.where(row < schedule.stages, 1, -1)


def peak_by_chunk(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """The most micro-batches in flight in each chunk. The chunks' peaks need not come at the same time."""
    chunk, change = _changes(schedule, rank)
    return tuple(int(np.cumsum(np.where(chunk == c, change, 0)).max()) for c in range(schedule.chunks))


def peak_held(schedule: Schedule, rank: int, per_chunk: Sequence[float]) -> float:
    """The most that is held at once when a micro-batch in flight in chunk c holds per_chunk[c] (bytes, say; ones count chunks)."""
    chunk, change = _changes(schedule, rank)
    return float(np.cumsum(np.asarray(per_chunk, np.float64)[chunk] * change).max())
