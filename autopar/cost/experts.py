"""What routed experts (`autopar.kernels.experts`) compute, move and exchange on one rank. R = T K: rows of its own tokens, for K experts each; S:
rows that its experts get.

    load       S = R at even load. Where experts are split over W ranks the fullest of them gets S = min(imbalance, W) R: all wait for it, so it is
               what is priced
    FLOPs      forward 2 S (D G + F D): both products. Backward makes h again: 2 S D G three times (h, dh -> dx, dW1), 2 S F D twice (da, dW2)
    passes     S (6 D + 2 G + 2 F) values forward, S (10 D + 4 G + 5 F) backward: rows put in order by expert, products, a gate in one pass, rows put in
               order again and summed. A Triton kernel that sums (`autopar.kernels.triton.combine`) reads rows where they are, which leaves 4 D of forward's;
               backward is about as the body with kernels is, 10 D + 5 G + 4 F
    memory     besides operands and results, at the worst moment of the body: rows, what stands between the products, gradients of both; of a gate as SwiGLU is
    exchange   over the axes that split experts: rows of x to their experts and of y back; backward x, the gradient, and dx: S D values each, but for the
               W-th part that stays

G = u F are the features of the first product (u = 2 with a gate), F of the second. Arithmetic of Megatron Core's dropless dispatch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.graph.graph import DTYPE_BYTES, Op
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.hardware.parts import Device
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


def remade_flops(op: Op, n: Mapping[str, int]) -> float:
    """Of `flops`, h that backward makes again."""
    return 2.0 * _rows(n) * n["d"] * n["u"] * n["f"] if op.target == BACKWARD else 0.0


def kept_bytes(op: Op, rule: Rule, strategy: Strategy, n: Mapping[str, int], mesh: Mesh, imbalance: float = 1.0) -> float:
    """What forward receives and makes of it, x, h and a, on the fullest rank: of software that keeps it for backward."""
    values = n["d"] + n["u"] * n["f"] + n["f"] if op.target == FORWARD else 0
    return float(load_of(rule, strategy, mesh, imbalance) * _rows(n) * values * _itemsize(op))


def combined_in_triton(op: Op, device: Device) -> bool:
    """Whether a kernel sums what experts made of a token."""
    x, _, scores, _, w2 = (t.dtype for t in op.inputs[op.target == BACKWARD :][:5])
    return not device.why_no_triton(w2, x, *([scores] if op.target == FORWARD else []))


def moved_bytes(op: Op, n: Mapping[str, int], triton: bool = False) -> float:
    """triton: as `combined_in_triton` says."""
    d, g, f = n["d"], n["u"] * n["f"], n["f"]
    values = (4 if triton else 6) * d + 2 * g + 2 * f if op.target == FORWARD else 10 * d + 4 * g + 5 * f
    return float(_rows(n) * values * _itemsize(op))


def workspace_bytes(op: Op, rule: Rule, strategy: Strategy, n: Mapping[str, int], mesh: Mesh, imbalance: float = 1.0) -> float:
    """What is there while it runs, on the fullest rank. Where experts are split, rows are there as they were sent and as they came."""
    is_exchanged, load = ranks_of(rule, strategy, mesh) > 1, load_of(rule, strategy, mesh, imbalance)
    d, g, f = n["d"], n["u"] * n["f"], n["f"]
    own, size = _rows(n), _itemsize(op)
    received, backward = load * own, op.target == BACKWARD
    w = max(
        1.0, DTYPE_BYTES.get(op.inputs[2 + backward].dtype, 4) / size
    )  # scores in float32, as many routers have them, make what they meet as wide
    if backward:
        cast = w > 1
        scores = (1 + w) * d + g + (2 + w + w * cast) * f  # where their gradient is made
        second = (1 + 2 * w + cast) * d + g + 2 * f
        gated = d + 3 * g + f  # x, h, the gradient of a; that of h, from its parts
        most = received * max(scores, second, gated)
        on_the_way = received * (g + 2 * d) + own * d
    else:
        added = 1 if op.args[5] is None else 3  # with a bias: a product, the bias of every row, their sum
        most = received * (max(d + added * g, g + 2 * f, f + added * d) + d * is_exchanged)
        most = max(most, own * (2 + w) * d)  # put in order and weighted
        on_the_way = received * 2 * d + own * d
    return float(size * max(most, on_the_way * is_exchanged))


def load_of(rule: Rule, strategy: Strategy, mesh: Mesh, imbalance: float) -> float:
    """Rows of the fullest rank's experts, of as many as all have at even load. imbalance: that is said of them; more than all rows cannot come to one rank."""
    axes = _axes(rule, strategy, mesh)
    return min(imbalance, float(mesh.sizes_product(axes))) if axes else 1.0


def _axes(rule: Rule, strategy: Strategy, mesh: Mesh) -> tuple[str, ...]:
    """Those that split experts."""
    return tuple(a.name for a in mesh.axes if a.size > 1 and strategy.get(a.name, ("", 0))[0] in rule.pairs)


def ranks_of(rule: Rule, strategy: Strategy, mesh: Mesh) -> int:
    """Over how many ranks experts are split."""
    return mesh.sizes_product(_axes(rule, strategy, mesh))


def rows_bytes(op: Op, n: Mapping[str, int]) -> float:
    """Of one exchange at even load, if no row was there already."""
    return float(_rows(n) * n["d"] * _itemsize(op))


def exchanged(
    op: Op, rule: Rule, strategy: Strategy, ins: tuple[Placement, ...], mesh: Mesh, imbalance: float = 1.0
) -> tuple[tuple[str, tuple[str, ...], float], ...]:
    """(kind, axes, bytes that the fullest rank takes, or gives back) of each exchange."""
    axes = _axes(rule, strategy, mesh)
    if not axes:
        return ()
    at, width = ins[op.target == BACKWARD], mesh.sizes_product(axes)
    tokens, features = at.local_shape(mesh)
    sent = load_of(rule, strategy, mesh, imbalance) * tokens * _chosen(op) * features * _itemsize(op) * (width - 1) / width
    return (("all_to_all", axes, sent),) * EXCHANGES[op.target]


def chosen_of(op: Op, rule: Rule) -> tuple[int, int]:
    """K, and how many experts there are."""
    return _chosen(op), math.prod(rule.factors[x].size for x in rule.pairs)


def _chosen(op: Op) -> int:
    """K."""
    return op.inputs[1 + (op.target == BACKWARD)].shape[1]


def _itemsize(op: Op) -> int:
    return DTYPE_BYTES.get(op.inputs[op.target == BACKWARD].dtype, 4)
