"""Tokens sent to experts on several nodes in two levels, one copy for each node: what DeepEP does for DeepSeek-V3 (arXiv 2412.19437, section 3.2.2).

Of w ranks that experts are split over, m lie on each of n nodes. A token goes to K of E experts. All at once, every one of its K rows crosses on its own. In two levels
a copy goes to each node that has some of its experts, and is handed on inside; results are summed inside of a node before they come back, so all directions send as much:

    none of a node's experts chosen    q = C(E - E / n, K) / C(E, K)                     where all are chosen as often
    nodes besides its own              (n - 1) (1 - q)
    between nodes, of a rank           t D b (n - 1) (1 - q)                              t tokens of D values of b bytes
    inside of a node                   t K D b (m - 1) / m
    seconds                            max( between / NIC, inside / NVLink ), and a message to every other node and to every neighbour

Routers that send a token to few nodes at most (DeepSeek-V3: four) send less than this. It is the price only of software that does so (`Runtime.two_level`), and where it is less.
"""

from __future__ import annotations

import math

from autopar.cost.links import members_on_node
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster


def other_nodes(chosen: int, experts: int, nodes: int) -> float:
    """Besides its own, how many of `nodes` have some of a token's `chosen` of `experts`, in the mean. experts: a multiple of nodes."""
    elsewhere = experts - experts // nodes
    return (nodes - 1) * (1 - math.comb(elsewhere, chosen) / math.comb(experts, chosen))


def seconds(cluster: Cluster, mesh: Mesh, axes: tuple[str, ...], wire_bytes: float, chosen: int, experts: int) -> float:
    """wire_bytes: what a rank sends of all its rows where each goes on its own, (w - 1) / w of them. Infinite where one node has all ranks, or nodes have no equal part."""
    w = mesh.sizes_product(axes)
    m = members_on_node(mesh, frozenset(axes), cluster.devices_per_node)
    nodes = w // m
    if nodes == 1 or w % m or experts % nodes:
        return math.inf
    near, far = cluster.intra, cluster.inter
    rows = wire_bytes * w / (w - 1)
    across, inside = rows / chosen * other_nodes(chosen, experts, nodes), rows * (m - 1) / m
    steps_s = (nodes - 1) * far.step_s + (m - 1) * near.step_s
    return far.latency_s + steps_s + max(across / far.reached_Bps, inside / near.reached_Bps)
