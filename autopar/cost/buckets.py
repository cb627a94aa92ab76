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
from functools import lru_cache

from autopar.cost.links import CollectiveCost
from autopar.cost.model import Cost
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster

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
    return _limit(cost.cluster, cost.mesh, kind, axes)


@lru_cache(maxsize=1024)
def _limit(cluster: Cluster, mesh: Mesh, kind: str, axes: tuple[str, ...]) -> Limit:
    cost, width = Cost(cluster, mesh), mesh.sizes_product(axes)

    def seconds(nbytes: float) -> float:
        return cost.collective(kind, axes, _sent(kind, width) * nbytes).seconds

    def copies_s(nbytes: float) -> float:
        moved = 2 * nbytes * (1 + 1 / width if kind == "all_gather" else 1)
        return cost.kernel_s("cheap", "float32", 0.0, moved, 1)

    alpha_s = seconds(0.0)
    if not alpha_s:
        return Limit(0.0, 0.0, 0.0)
    return Limit(_least(lambda n: LATENCY * seconds(n) >= alpha_s), _least(lambda n: copies_s(n) > alpha_s), alpha_s)


def _sent(kind: str, width: int) -> float:
    """Of a tensor, what a rank sends (`calls.wire_bytes`)."""
    return (width - 1) / width * (2 if kind == "all_reduce" else 1)


def whole_bytes(kind: str, wire_bytes: float, width: int) -> float:
    """Of the tensor that is gathered or reduced among `width` ranks, where each sends so much."""
    return wire_bytes / _sent(kind, width) if width > 1 else 0.0


@dataclass(frozen=True)
class Company:
    """What one tensor may be joined with. nbytes: of it; stretch: of every tensor of its stretch, its own among them. All whole; what is sharded otherwise too is sent in parts,
    which are as large to one another."""

    nbytes: float
    stretch: tuple[float, ...]

    def share(self, nbytes: float, within: Limit) -> float:
        """Of a bucket's latency, what this tensor pays, where `nbytes` are sent of it. Of B bytes in a bucket of L, it is B / L, where L is what makes a bucket full, or all of the
        stretch that is not alone."""
        scale = nbytes / self.nbytes if self.nbytes else 1.0
        together = scale * sum(n for n in self.stretch if n * scale <= within.alone_bytes)
        return 1.0 if nbytes > within.alone_bytes else nbytes / max(nbytes, min(within.full_bytes, together)) if nbytes else 1.0


def shared(cost: Cost, kind: str, axes: tuple[str, ...], wire_bytes: float, companies: Sequence[Company]) -> CollectiveCost:
    """As `Cost.collective`, of what may be joined with others of its stretch: on average of `companies`; none: it is alone."""
    c = cost.collective(kind, axes, wire_bytes)
    if kind not in JOINED or not companies:
        return c
    within, nbytes = limit(cost, kind, axes), whole_bytes(kind, wire_bytes, cost.mesh.sizes_product(axes))
    saved_s = within.alpha_s * (1 - sum(company.share(nbytes, within) for company in companies) / len(companies))
    return CollectiveCost(c.link, c.seconds - saved_s, max(0.0, c.latency_s - saved_s))


def latencies(sizes: Sequence[tuple[float, float]], stretches: float, within: Limit) -> float:
    """How often alpha is paid for tensors of so many stretches. sizes: bytes, and how many there are of them."""
    together = sum(nbytes * n for nbytes, n in sizes if nbytes <= within.alone_bytes)
    alone = sum(n for nbytes, n in sizes if nbytes > within.alone_bytes)
    return alone + (max(stretches, together / within.full_bytes) if together else 0.0)


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
