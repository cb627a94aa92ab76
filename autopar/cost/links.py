"""Collectives over the links, by algorithm, with the two kinds of link of a cluster of nodes.

Ranks are laid out node by node. Let a group have W members, m of them on a node, n = W / m nodes, and each rank send V bytes. Seconds are a latency, the
steps of the algorithm and the bytes over the busiest link:

    all on one node            intra link:  V / NVLink
    rings across nodes         V enters and leaves a node once for every one of the m rings that share the work, each by a device's share of the
                               cards, and is passed on m - 1 times inside:     max( V / (m NIC),  V (m - 1) / m / NVLink )
    all-to-all across nodes    of W - 1 partners m - 1 are near:               max( V (W - m) / (W - 1) / NIC,  V (m - 1) / (W - 1) / NVLink )
    send, to the next stage    the slowest hop:                                V / NIC, or V / NVLink where no hop leaves a node
    jump, past neighbours      as if all of a node sent out of it

    steps      a ring passes W - 1 times, n - 1 of them between nodes; an all-reduce goes round twice; all-to-all has a message for every partner
    scatters   where the library's reduce-scatter is an all-reduce inside (`Cluster.scatters_whole`) it is priced as one: twice the bytes, twice the steps
    trees      an all-reduce of little goes up and down binary trees instead: 2 (log2 m + log2 n) steps, and all of the tensor in each direction

NVLink and NIC are what is reached of a device's share; only where fewer devices of a node send at a time than share its cards does one get more. Where
nodes cut groups unequally, m is the fewest members any group has on a node: the others wait for it. In a fat tree the uplinks of a leaf carry what
its ranks send out of it: a ring crosses once for every group, all-to-all with the share of partners that are elsewhere.

Where a cluster has measured curves of a kind, those are its price: between two measured sizes of group log-interpolated, beyond the largest with the
further steps. All is monotone in V, and in W at fixed m: of the same tensor, where curves are the price.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache

from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.hardware.parts import CollectiveCurve

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice", "send", "ring", "jump")


@dataclass(frozen=True)
class CollectiveCost:
    """link: the one that is busy, "intra" or "inter" a node; seconds: in all, of which `latency_s` whatever the size."""

    link: str
    seconds: float
    latency_s: float


FREE = CollectiveCost("intra", 0.0, 0.0)


def collective(cluster: Cluster, mesh: Mesh, kind: str, axes: tuple[str, ...], wire_bytes: float) -> CollectiveCost:
    """wire_bytes: what a rank sends, as `redistribution.Step.wire_bytes` says. "send": to the next rank along `axes`, the last one to none;
    "ring": the last one to the first, which leaves a node no more often; "jump": to a rank further on."""
    assert kind in KINDS, kind
    w = mesh.sizes_product(axes)
    if kind == "slice" or w == 1:
        return FREE
    if kind in ("send", "ring", "jump"):
        return _send(cluster, mesh, axes, wire_bytes, kind == "jump")
    m = members_on_node(mesh, frozenset(axes), cluster.devices_per_node)
    link = "intra" if m == w else "inter"
    if cluster.curves and (curves := _of_kind(cluster, kind, w, m)):
        extra_s = _steps_s(cluster, kind, w, m) - _steps_s(cluster, kind, curves[-1].ranks, m) if w > curves[-1].ranks else 0.0
        return CollectiveCost(link, _measured(curves, w, wire_bytes) + extra_s, _measured(curves, w, 0.0) + extra_s)
    if kind == "reduce_scatter" and cluster.scatters_whole:
        kind, wire_bytes = "all_reduce", 2 * wire_bytes
    latency_s = cluster.intra.latency_s if m == w else cluster.inter.latency_s
    seconds = _steps_s(cluster, kind, w, m) + _bytes_s(cluster, mesh, kind, axes, w, m, wire_bytes)
    if kind == "all_reduce" and (cluster.intra.step_s or cluster.inter.step_s):
        tree_s = _tree_steps_s(cluster, w, m) + _bytes_s(cluster, mesh, kind, axes, w, m, wire_bytes * w / (w - 1))
        seconds = min(seconds, tree_s)
    return CollectiveCost(link, latency_s + seconds, latency_s)


def _bytes_s(cluster: Cluster, mesh: Mesh, kind: str, axes: tuple[str, ...], w: int, m: int, wire_bytes: float) -> float:
    near, far = cluster.intra, cluster.inter
    if m == w:
        return wire_bytes / near.reached_Bps
    if kind == "all_to_all":
        across, inside = wire_bytes * (w - m) / (w - 1), wire_bytes * (m - 1) / (w - 1)
    else:
        across, inside = wire_bytes / m, wire_bytes * (m - 1) / m
    if far.tree is not None:
        devices = far.tree.leaf_nodes * cluster.devices_per_node
        groups, parted = crossings(mesh, frozenset(axes), devices)
        out = parted if kind == "all_to_all" else float(groups)
        across = max(across, wire_bytes * out * far.tree.oversubscription / devices)
    return max(across / far.reached_Bps, inside / near.reached_Bps)


def _steps_s(cluster: Cluster, kind: str, w: int, m: int) -> float:
    """Of a ring, or of messages to every partner."""
    nodes = -(-w // m)
    far = w - m if kind == "all_to_all" else nodes - 1
    once = far * cluster.inter.step_s + (w - 1 - far) * cluster.intra.step_s
    return 2 * once if kind == "all_reduce" else once


def _tree_steps_s(cluster: Cluster, w: int, m: int) -> float:
    nodes = -(-w // m)
    return 2 * (math.ceil(math.log2(m)) * cluster.intra.step_s + math.ceil(math.log2(nodes)) * cluster.inter.step_s)


def _send(cluster: Cluster, mesh: Mesh, axes: tuple[str, ...], nbytes: float, is_jump: bool) -> CollectiveCost:
    near, far, per_node = cluster.intra, cluster.inter, cluster.devices_per_node
    senders = per_node if is_jump and _leaving(mesh, axes, per_node) else _leaving(mesh, axes, per_node)
    if not senders:
        curves = [c for c in cluster.curves if c.kind == "send" and c.nodes == 1]
        seconds = _measured(curves, 2, nbytes) if curves else near.latency_s + nbytes / near.reached_Bps
        return CollectiveCost("intra", seconds, near.latency_s)
    rate = far.share_Bps(per_node, senders)
    if far.tree is not None:
        devices = far.tree.leaf_nodes * per_node
        uplinks = devices * far.reached_Bps / far.tree.oversubscription
        leaving = _leaving(mesh, axes, devices)
        rate = min(rate, uplinks / max(1, devices if is_jump and leaving else leaving))
    return CollectiveCost("inter", far.latency_s + nbytes / rate, far.latency_s)


# ---- measured ------------------------------------------------------------------------------------------------------


def _of_kind(cluster: Cluster, kind: str, w: int, m: int) -> list[CollectiveCurve]:
    """The cluster's curves of such groups, by size: inside a node, or with as many members on each."""
    found = [c for c in cluster.curves if c.kind == kind and (c.nodes == 1 if m == w else c.nodes > 1 and c.ranks == m * c.nodes)]
    return sorted(found, key=lambda c: c.ranks)


def _measured(curves: list[CollectiveCurve], w: int, wire_bytes: float) -> float:
    """Of a group of `w`: with a tensor, no larger group was quicker, whatever noise said. (With what a rank sends it may be: of the same tensor, more ranks send more.)"""

    def same_tensor(c: CollectiveCurve) -> float:
        return c.at(wire_bytes * (1 - 1 / c.ranks) / (1 - 1 / w))

    below = [c for c in curves if c.ranks <= w]
    above = next((c for c in curves if c.ranks > w), None)
    if not below:
        return same_tensor(curves[0])
    low = max(map(same_tensor, below))
    if above is None:  # among more, a rank's bytes take what they took
        return max(low, below[-1].at(wire_bytes))
    smaller = below[-1].ranks
    high = max(low, same_tensor(above))
    return float(low * (high / low) ** (math.log(w / smaller) / math.log(above.ranks / smaller)))


# ---- where ranks are -----------------------------------------------------------------------------------------------


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


@lru_cache(maxsize=1024)
def crossings(mesh: Mesh, axes: frozenset[str], leaf: int) -> tuple[int, float]:
    """What the busiest leaf of `leaf` devices sends out of it, for every byte that a rank sends: (groups whose rings cross, ranks in all-to-all)."""
    members: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for rank in range(mesh.size):
        where = mesh.coordinates(rank)
        members[tuple(c for a, c in where.items() if a not in axes)][rank // leaf] += 1
    groups: Counter[int] = Counter()
    parted: dict[int, float] = defaultdict(float)
    for on in members.values():
        w = sum(on.values())
        for where_, here in on.items():
            groups[where_] += len(on) > 1
            parted[where_] += here * (w - here) / max(w - 1, 1)
    return max(groups.values(), default=0), max(parted.values(), default=0.0)


@lru_cache(maxsize=1024)
def _leaving(mesh: Mesh, axes: tuple[str, ...], per_unit: int) -> int:
    """How many ranks of the busiest unit (node or leaf) have the next rank along `axes` on another one."""
    if mesh.size <= per_unit:
        return 0
    ordered = [a for a in mesh.axes if a.name in axes]
    strides, stride = {}, 1
    for a in reversed(mesh.axes):
        strides[a.name] = stride
        stride *= a.size
    out: Counter[int] = Counter()
    for rank in range(mesh.size):
        where, target = mesh.coordinates(rank), rank
        for a in reversed(ordered):  # adds one, with carries
            if where[a.name] + 1 < a.size:
                target += strides[a.name]
                break
            target -= where[a.name] * strides[a.name]
        else:
            continue
        out[rank // per_unit] += rank // per_unit != target // per_unit
    return max(out.values(), default=0)
