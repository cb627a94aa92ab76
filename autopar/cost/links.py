"""Collectives over the links: latency + bytes / bandwidth (the alpha-beta model), with the two kinds of link of a cluster of nodes.

Ranks are laid out node by node. Let a group have W members, m of them on a node, and each rank send V bytes:

    all on one node            intra link:  V / NVLink
    rings across nodes         V enters and leaves a node once for every one of the m rings that share the work, each by a card of its own,
                               and is passed on m - 1 times inside:     max( V / (m NIC),  V (m - 1) / m / NVLink )
    all-to-all across nodes    of W - 1 partners m - 1 are near:        max( V (W - m) / (W - 1) / NIC,  V (m - 1) / (W - 1) / NVLink )

with what is reached of NVLink and of a device's card. Where nodes cut groups unequally, m is the fewest members any group has on a node: the others
wait for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from autopar.cluster import Cluster
from autopar.mesh import Mesh

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice")


@dataclass(frozen=True)
class CollectiveCost:
    """link: the one that is busy, "intra" or "inter" a node; seconds: in all, of which `latency_s` whatever the size."""

    link: str
    seconds: float
    latency_s: float


@lru_cache(maxsize=4096)
def members_on_node(mesh: Mesh, axes: frozenset[str], per_node: int) -> int:
    """The fewest members that any group over `axes` has on a node it touches; the group's size if all groups stay inside nodes."""
    inside, stride = 1, 1
    for a in reversed(mesh.axes):
        if stride == per_node:
            break
        inside *= a.size if a.name in axes else 1
        stride *= a.size
    if stride == per_node or mesh.size <= per_node:
        return inside
    # No axis ends where a node ends: count.
    counts: Counter[tuple[tuple[int, ...], int]] = Counter()
    for rank in range(mesh.size):
        where = mesh.coordinates(rank)
        counts[tuple(c for a, c in where.items() if a not in axes), rank // per_node] += 1
    return min(counts.values())


def collective(cluster: Cluster, mesh: Mesh, kind: str, axes: tuple[str, ...], wire_bytes: float) -> CollectiveCost:
    """wire_bytes: what a rank sends, as `redistribution.Step.wire_bytes` says."""
    assert kind in KINDS, kind
    w = mesh.sizes_product(axes)
    if kind == "slice" or w == 1:
        return CollectiveCost("intra", 0.0, 0.0)
    near, far = cluster.intra, cluster.inter
    m = members_on_node(mesh, frozenset(axes), cluster.devices_per_node)
    if m == w:
        return CollectiveCost("intra", near.latency_s + wire_bytes / near.reached_Bps, near.latency_s)
    if kind == "all_to_all":
        across, inside = wire_bytes * (w - m) / (w - 1), wire_bytes * (m - 1) / (w - 1)
    else:
        across, inside = wire_bytes / m, wire_bytes * (m - 1) / m
    seconds = max(across / far.reached_Bps, inside / near.reached_Bps)
    return CollectiveCost("inter", far.latency_s + seconds, far.latency_s)
