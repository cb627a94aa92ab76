"""How many bytes of collectives are worth one: where joining ends, and what is too large to be copied for it.

A collective of B bytes takes alpha + B / beta. Two that are joined take one alpha, and copies: their operands are laid side by side, and of a gather each result is
copied out (a reduction's are views). So

    full     a bucket is full where alpha is `LATENCY` of its time or less:     B >= (1 / LATENCY - 1) alpha / beta,     9 alpha / beta for a tenth
    alone    what takes longer to copy than alpha is not joined

alpha and beta are those of the cluster for the group and kind; where it has measured curves these are asked. Bytes are of the whole tensor: what is gathered, or what is
to be reduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.cost.links import CollectiveCost
from autopar.cost.model import Cost

LATENCY = 0.1
JOINED = ("all_gather", "reduce_scatter", "all_reduce")
_LARGEST = 2.0**50  # bytes: what no link is asked to carry


@dataclass(frozen=True)
class Limit:
    """full_bytes: of a bucket that takes no more; alone_bytes: more than these are not joined; alpha_s: what each that is joined saves of its link."""

    full_bytes: float
    alone_bytes: float
    alpha_s: float


def limit(cost: Cost, kind: str, axes: tuple[str, ...]) -> Limit:
    """kind: one of `JOINED`; axes: of the group."""
    width = cost.mesh.sizes_product(axes)
    per_byte = (width - 1) / width * (2 if kind == "all_reduce" else 1)  # what a rank sends of a tensor, `calls.wire_bytes`

    def seconds(nbytes: float) -> float:
        return cost.collective(kind, axes, per_byte * nbytes).seconds

    def copies_s(nbytes: float) -> float:
        moved = 2 * nbytes * (1 + 1 / width if kind == "all_gather" else 1)
        return cost.kernel_s("cheap", "float32", 0.0, moved, 1)

    alpha_s = seconds(0.0)
    if not alpha_s:
        return Limit(0.0, 0.0, 0.0)
    return Limit(_least(lambda n: LATENCY * seconds(n) >= alpha_s), _least(lambda n: copies_s(n) > alpha_s), alpha_s)


class Shared:
    """What collectives take that may be joined with others of their stretch."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self._limits: dict[tuple[str, tuple[str, ...]], Limit] = {}

    def collective(self, kind: str, axes: tuple[str, ...], wire_bytes: float, share: float) -> CollectiveCost:
        """As `Cost.collective`. share: of the bytes of its stretch, what this one has; 1: it is alone. Of B bytes, in a bucket of L, it pays alpha B / L of the latency, where
        L is what makes a bucket full, or all of the stretch."""
        c = self.cost.collective(kind, axes, wire_bytes)
        if kind not in JOINED or share >= 1:
            return c
        within = self.limit(kind, axes)
        width = self.cost.mesh.sizes_product(axes)
        nbytes = wire_bytes * width / (width - 1) / (2 if kind == "all_reduce" else 1) if width > 1 else 0.0
        bucket = min(within.full_bytes, nbytes / share)
        if nbytes > within.alone_bytes or bucket <= nbytes:
            return c
        saved_s = within.alpha_s * (1 - nbytes / bucket)
        return CollectiveCost(c.link, c.seconds - saved_s, max(0.0, c.latency_s - saved_s))

    def limit(self, kind: str, axes: tuple[str, ...]) -> Limit:
        if (kind, axes) not in self._limits:
            self._limits[kind, axes] = limit(self.cost, kind, axes)
        return self._limits[kind, axes]


def joined(nbytes: Sequence[float], within: Limit) -> list[list[int]]:
    """Which of several collectives, in order, are one: every index in one list. nbytes: of each.

    Those that are not alone fill buckets in order. A rest of less than half a bucket goes into the one before."""
    out: list[list[int]] = []
    last: list[int] | None = None  # the bucket before
    bucket: list[int] = []
    for i, n in enumerate(nbytes):
        if n > within.alone_bytes:
            out.append([i])
            continue
        bucket.append(i)
        if sum(nbytes[j] for j in bucket) >= within.full_bytes:
            last = bucket
            out.append(bucket)
            bucket = []
    if bucket and last is not None and 2 * sum(nbytes[j] for j in bucket) < within.full_bytes:
        last += bucket
    elif bucket:
        out.append(bucket)
    return out


def _least(holds: Callable[[float], bool]) -> float:
    """The least number of bytes, to a thousandth, from which `holds` holds; infinite where it does for none."""
    low, high = 1.0, _LARGEST
    if holds(low):
        return low
    if not holds(high):
        return math.inf
    while high > low * 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
