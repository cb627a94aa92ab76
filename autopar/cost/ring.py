"""What attention whose keys go round (`autopar.kernels.ring`) sends, and what it computes beside that. Of n ranks with S keys each, of as many key/value heads as there are:

    forward    n - 1 hops of k and v, each beside one n-th of what is computed
    backward   as many, each beside what one n-th is of backward, and with it go the sums of dk and dv that are here, in float32 at least; these make one more hop, at the end
    merging    a block's results into those of blocks before: out is read, and read and written in float32, n times; backward does so with dq, dk and dv

    memory     the block that is computed with and the one that arrives; out in float32; backward: dq in float32, sums that are made, sent and arriving

A hop waits for the slowest link between neighbours (`links.py`, "ring"): as long as it takes more than its n-th of the compute, the device waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from autopar.graph.graph import DTYPE_BYTES, Op
from autopar.graph.mesh import Mesh
from autopar.rules.grammar import Rule
from autopar.rules.strategy import Strategy


class Within(NamedTuple):
    """A collective inside an operator. sent: bytes of a rank; beside: the share of what its operator computes that runs meanwhile."""

    kind: str
    axes: tuple[str, ...]
    sent: float
    beside: float = 0.0


def ring_axes(rule: Rule, strategy: Strategy, mesh: Mesh) -> tuple[str, ...]:
    """The axes that a ring is over; none where keys do not go round."""
    return tuple(a.name for a in mesh.axes if a.size > 1 and strategy.get(a.name, ("", 0))[0] in rule.alongside)


def hops(op: Op, rule: Rule, strategy: Strategy, n: Mapping[str, int], mesh: Mesh) -> tuple[Within, ...]:
    """n: local sizes of the rule's loops."""
    axes = ring_axes(rule, strategy, mesh)
    if not axes:
        return ()
    ranks, values = mesh.sizes_product(axes), n["b"] * n["g"] * n["s"] * (n["e"] + n["d"])
    size, backward = DTYPE_BYTES.get(op.inputs[0].dtype, 4), "_backward" in op.target
    sums = values * max(size, 4) if backward else 0
    on = (Within("ring", axes, float(values * size + sums), 1 / ranks),) * (ranks - 1)
    return (*on, Within("ring", axes, float(sums))) if backward else on


def merging(op: Op, rule: Rule, strategy: Strategy, n: Mapping[str, int], mesh: Mesh) -> tuple[float, float]:
    """Bytes that merging moves, and kernels that it takes."""
    axes = ring_axes(rule, strategy, mesh)
    if not axes:
        return 0.0, 0.0
    ranks, size = mesh.sizes_product(axes), DTYPE_BYTES.get(op.inputs[0].dtype, 4)
    heads = n["b"] * n["g"] * n["r"] * n["q"]
    here = heads * n["e"] + n["b"] * n["g"] * n["s"] * (n["e"] + n["d"]) if "_backward" in op.target else heads * n["d"]
    reach = max(strategy[a][1] * mesh.axis_size(a) for a in axes)  # of one block, all ranks together
    blocks = math.ceil(rule.factors["q"].size / reach)
    return float(ranks * here * (size + 2 * max(size, 4))), float(2 * ranks * blocks)


def workspace_bytes(op: Op, rule: Rule, strategy: Strategy, n: Mapping[str, int], mesh: Mesh) -> float:
    """What is there while it runs, besides operands and results."""
    if not ring_axes(rule, strategy, mesh):
        return 0.0
    size = DTYPE_BYTES.get(op.inputs[0].dtype, 4)
    block, heads = n["b"] * n["g"] * n["s"] * (n["e"] + n["d"]), n["b"] * n["g"] * n["r"] * n["q"]
    if "_backward" in op.target:
        return float(2 * block * size + (3 * block + heads * n["e"]) * max(size, 4))
    return float(2 * block * size + heads * n["d"] * max(size, 4))
