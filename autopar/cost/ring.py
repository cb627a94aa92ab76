"""What attention whose keys go round (`autopar.kernels.ring`) sends, and what it computes beside that. Of n ranks with S keys each, of as many key/value heads as there are:

    forward    n - 1 hops of k and v, each beside one n-th of what is computed
    backward   as many, each beside what one n-th is of backward, and with it go the sums of dk and dv that are here, in float32 at least; these make one more hop, at the end
    merging    a block's results into those of blocks before: out is read, and read and written in float32, n times; backward does so with dq, dk and dv. That is what a
               Triton kernel moves (`autopar.kernels.triton.merge`), forward, in one launch

    memory     the block that is computed with and the one that arrives; out in float32; backward: dq in float32, sums that are made, sent and arriving

Where a mask bounds what queries see, only blocks that are seen are visited (`autopar.graph.runs`), hops that none needs are not made, and a hop is beside what
is computed of the block before it.

A hop waits for the slowest link between neighbours (`links.py`, "ring"; "jump", past some of them): as long as it takes more than the compute beside it, the
device waits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from autopar.graph.graph import DTYPE_BYTES, Op
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.graph.runs import Rounds, rounds, runs_of, strip
from autopar.rules.attention import bounds
from autopar.rules.grammar import Rule
from autopar.rules.strategy import Strategy


class Within(NamedTuple):
    """A collective inside an operator. sent: bytes of a rank; beside: the share of what its operator computes that runs meanwhile."""

    kind: str
    axes: tuple[str, ...]
    sent: float
    beside: float = 0.0


class Around(NamedTuple):
    """Where a mask bounds what queries see. rounds: what a rank does; seen: the share of its (query, key) pairs that it computes; merges: how often a query's
    results are."""

    rounds: Rounds
    seen: float
    merges: float


def ring_axes(rule: Rule, strategy: Strategy, mesh: Mesh) -> tuple[str, ...]:
    """The axes that a ring is over; none where keys do not go round."""
    return tuple(a.name for a in mesh.axes if a.size > 1 and strategy.get(a.name, ("", 0))[0] in rule.alongside)


def around(op: Op, rule: Rule, strategy: Strategy, mesh: Mesh) -> Around | None:
    """None where keys do not go round, or all of them are seen."""
    axes, (before, after) = ring_axes(rule, strategy, mesh), bounds(op)
    if not axes or (before < 0 and after < 0):
        return None
    return _around(rule.factors["s"].size, tuple((a, strategy[a][1]) for a in axes), mesh, before, after)


@lru_cache(maxsize=4096)
def _around(size: int, strides: tuple[tuple[str, int], ...], mesh: Mesh, before: int, after: int) -> Around:
    axes = tuple(a for a, _ in strides)
    starts, run = runs_of(Placement.of((size,), {a: (0, stride) for a, stride in strides}), 0, axes, mesh)
    rows = size // mesh.sizes_product(axes)
    found = rounds(tuple(starts), run, mesh.sizes_product(axes), before, after)
    return Around(found, found.pairs / (rows * size), found.kernels * strip(run, before, after) / rows)


def hops(op: Op, rule: Rule, strategy: Strategy, n: Mapping[str, int], mesh: Mesh) -> tuple[Within, ...]:
    """n: local sizes of the rule's loops."""
    axes = ring_axes(rule, strategy, mesh)
    if not axes:
        return ()
    ranks, values = mesh.sizes_product(axes), n["b"] * n["g"] * n["s"] * (n["e"] + n["d"])
    size, backward = DTYPE_BYTES.get(op.inputs[0].dtype, 4), "_backward" in op.target
    sums, bounded = values * max(size, 4) if backward else 0, around(op, rule, strategy, mesh)
    visits = [(hop, 1 / ranks) for hop in range(ranks)] if bounded is None else list(bounded.rounds.visits)

    def move(by: int, sent: float, beside: float) -> Within:
        return Within("ring" if min(by, ranks - by) == 1 else "jump", axes, float(sent), beside)

    found = [move(b - a, values * size + sums, beside) for (a, beside), (b, _) in itertools.pairwise(visits)]
    home = -visits[-1][0] % ranks
    return (*found, move(home, sums, 0.0)) if backward and home else tuple(found)


def merging(op: Op, rule: Rule, strategy: Strategy, n: Mapping[str, int], mesh: Mesh, triton: bool = False) -> tuple[float, float]:
    """Bytes that merging moves, and kernels that it takes. triton: whether results of forward are merged by a kernel of ours."""
    axes = ring_axes(rule, strategy, mesh)
    if not axes:
        return 0.0, 0.0
    ranks, size, backward = mesh.sizes_product(axes), DTYPE_BYTES.get(op.inputs[0].dtype, 4), "_backward" in op.target
    heads, each = n["b"] * n["g"] * n["r"] * n["q"], 1 if triton and not backward else 2
    here = heads * n["e"] + n["b"] * n["g"] * n["s"] * (n["e"] + n["d"]) if backward else heads * n["d"]
    bounded = around(op, rule, strategy, mesh)
    if bounded is not None:
        return float(bounded.merges * here * (size + 2 * max(size, 4))), float(each * bounded.rounds.kernels)
    reach = max(strategy[a][1] * mesh.axis_size(a) for a in axes)  # of one block, all ranks together
    blocks = math.ceil(rule.factors["q"].size / reach)
    return float(ranks * here * (size + 2 * max(size, 4))), float(each * ranks * blocks)


def workspace_bytes(op: Op, rule: Rule, strategy: Strategy, n: Mapping[str, int], mesh: Mesh) -> float:
    """What is there while it runs, besides operands and results."""
    if not ring_axes(rule, strategy, mesh):
        return 0.0
    size = DTYPE_BYTES.get(op.inputs[0].dtype, 4)
    block, heads = n["b"] * n["g"] * n["s"] * (n["e"] + n["d"]), n["b"] * n["g"] * n["r"] * n["q"]
    if "_backward" in op.target:
        return float(2 * block * size + (3 * block + heads * n["e"]) * max(size, 4))
    return float(2 * block * size + heads * n["d"] * max(size, 4))
