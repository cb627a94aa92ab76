"""What routed experts (`autopar.kernels.experts`) compute, move and exchange on one rank, at even load: R = T K rows in all, as many on every rank.

    FLOPs      forward 2 R (D G + F D): both products. Backward makes h again: 2 R D G three times (h, dh -> dx, dW1), 2 R F D twice (da, dW2)
    memory     besides operands and results: rows sorted and put back, what stands between the products
    exchange   over the axes that split experts: rows of x to their experts and of y back; backward x, the gradient, and dx: R D values each

G = u F are the features of the first product (u = 2 with a gate), F of the second. Arithmetic of Megatron Core's dropless dispatch.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.graph.graph import DTYPE_BYTES, Op
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.rules.experts import BACKWARD, FORWARD
from autopar.rules.grammar import Rule
from autopar.rules.strategy import Strategy

EXCHANGES = {FORWARD: 2, BACKWARD: 3}


def is_experts(op: Op) -> bool:
    return op.target in EXCHANGES


def _rows(n: Mapping[str, int]) -> int:
    return n["t"] * n["k"]


def flops(op: Op, n: Mapping[str, int]) -> float:
    """n: local sizes of the rule's loops."""
    first, second = 2.0 * _rows(n) * n["d"] * n["u"] * n["f"], 2.0 * _rows(n) * n["d"] * n["f"]
    return first + second if op.target == FORWARD else 3 * first + 2 * second


def moved_bytes(op: Op, n: Mapping[str, int]) -> float:
    d, g, f = n["d"], n["u"] * n["f"], n["f"]
    values = 6 * d + 2 * g + 2 * f if op.target == FORWARD else 10 * d + 4 * g + 5 * f
    return float(_rows(n) * values * _itemsize(op))


def workspace_bytes(op: Op, n: Mapping[str, int]) -> float:
    """What is there while it runs: rows of x and y, and between the products; backward has the gradients of all of them."""
    d, g, f = n["d"], n["u"] * n["f"], n["f"]
    values = 2 * d + g + f if op.target == FORWARD else 3 * d + 2 * g + 3 * f
    return float(_rows(n) * values * _itemsize(op))


def exchanged(
    op: Op, rule: Rule, strategy: Strategy, ins: tuple[Placement, ...], mesh: Mesh
) -> tuple[tuple[str, tuple[str, ...], float], ...]:
    """(kind, axes, bytes a rank sends) of each exchange."""
    axes = tuple(a.name for a in mesh.axes if a.size > 1 and strategy.get(a.name, ("", 0))[0] in rule.pairs)
    if not axes:
        return ()
    at, width = ins[op.target == BACKWARD], mesh.sizes_product(axes)
    tokens, features = at.local_shape(mesh)
    sent = tokens * _chosen(op) * features * _itemsize(op) * (width - 1) / width
    return (("all_to_all", axes, sent),) * EXCHANGES[op.target]


def _chosen(op: Op) -> int:
    """K."""
    return op.inputs[1 + (op.target == BACKWARD)].shape[1]


def _itemsize(op: Op) -> int:
    return DTYPE_BYTES.get(op.inputs[op.target == BACKWARD].dtype, 4)
