"""FLOPs of one rank's share of a compute-heavy op, from the op's rule: a product of local loop sizes.

    matmul      2 x product of all loops                                 m k, k n -> m n:  2 m k n
    attention   2 b h q s (e + d), half of it causal; backward 2.5 times   (five products for two: Dao et al., FlashAttention-2)
    conv        2 x product of n, channels, kernel and the positions where the kernel is put; backward: as much for dx and for dW
    loss head   a matmul for its scores, and one for each gradient: `loss_head.py`
    moe         2 m k n, a rank with a share of the experts having that share of the rows (experts equally busy); backward twice. Routed experts: `experts.py`

A multiply-add counts as two; complex numbers count as four real products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.cost import experts, loss_head
from autopar.cost.ring import around
from autopar.graph.graph import Op
from autopar.graph.mesh import Mesh
from autopar.rules.grammar import Rule
from autopar.rules.strategy import Strategy

HEAVY = ("matmul", "attention", "conv", "moe")  # kinds priced by FLOPs; all others by the bytes they move
ATTENTION_BACKWARD = 2.5
ATTENTION = ("attention", "attention_backward", "causal_attention", "causal_attention_backward")  # as `Cost.kernel_s` has them


def local_sizes(rule: Rule, strategy: Strategy, mesh: Mesh) -> dict[str, int]:
    """Sizes of the loops on one rank: global / product of the axes that split them, rounded up."""
    width: dict[str, int] = {}
    for axis, (letter, _) in strategy.items():
        for x in (letter, rule.taken[letter]) if letter in rule.taken else (letter,):
            width[x] = width.get(x, 1) * mesh.axis_size(axis)
    return {x: -(-f.size // width.get(x, 1)) for x, f in rule.factors.items()}


def flops(op: Op, rule: Rule, strategy: Strategy, mesh: Mesh) -> float:
    """FLOPs on one rank; zero for kinds that are not in HEAVY."""
    if rule.kind not in HEAVY or rule.is_fallback:
        return 0.0
    n = local_sizes(rule, strategy, mesh)
    if rule.kind == "attention":
        total = _attention(op, {**n, "s": rule.factors["s"].size}) * _seen(op, rule, strategy, mesh)  # keys that are split come by
    else:
        total = {"matmul": _matmul, "conv": _conv, "moe": _moe}[rule.kind](op, rule, n)
    return total * (4 if compute_dtype(op).startswith("complex") else 1)


def compute_dtype(op: Op) -> str:
    """The dtype the products are made in: that of the first operand which is no integer."""
    if loss_head.is_loss_head(op):
        return loss_head.dtype(op)
    inputs = op.inputs
    return next((t.dtype for t in inputs if t.dtype.startswith(("float", "bfloat", "complex"))), inputs[0].dtype if inputs else "float32")


def _matmul(op: Op, rule: Rule, n: Mapping[str, int]) -> float:
    each = 2.0 * math.prod(n.values())
    return each * loss_head.products(op) if loss_head.is_loss_head(op) else each


def _attention(op: Op, n: Mapping[str, int]) -> float:
    pairs = float(n["b"] * n["g"] * n["r"] * n["q"] * n["s"])
    each = 2.0 * pairs * (n["e"] + n["d"])
    return each * (ATTENTION_BACKWARD if is_backward(op) else 1)


def attention_kind(op: Op, rule: Rule, strategy: Strategy, mesh: Mesh) -> str:
    """One of ATTENTION: causal is what the kernel is told of, and skips. Most of what a part of the queries sees has no mask at all."""
    causal = not any(x in ("q", "s") for x, _ in strategy.values()) and _seen(op, rule, strategy, mesh) < 1
    return f"{'causal_' if causal else ''}attention{'_backward' if is_backward(op) else ''}"


def is_backward(op: Op) -> bool:
    return "_backward" in op.target


def is_causal(op: Op) -> bool:
    """Whether attention knows of causality otherwise than by a mask."""
    bias, causal, index = (op.arg(i) for i in ((6, 7, 9) if is_backward(op) else (3, 4, 6)))
    return bool(causal) and bias is None and index is None


def seen(op: Op, rule: Rule) -> float:
    """The share of (query, key) pairs that attention computes on one device that has all of them."""
    return _seen(op, rule, {}, Mesh(()))


def _seen(op: Op, rule: Rule, strategy: Strategy, mesh: Mesh) -> float:
    """The share of a rank's (query, key) pairs that is computed, on the rank with the most: that of the last queries, if they are split.

    The kernels skip what causality hides, half of a square, only where they are told of it: with a bias it comes as a mask, and all pairs are computed, but in
    a ring, for what its bounds leave (`ring.py`). Query i sees i + 1 keys of s, and half of its own is counted. An axis of n ranks whose digit has stride t
    puts the last of them (n - 1) t / 2 behind the middle.
    """
    q, s = rule.factors["q"].size, rule.factors["s"].size
    if not is_causal(op):
        bounded = around(op, rule, strategy, mesh)
        return 1.0 if bounded is None else bounded.seen
    if not q or not s:
        return 0.0
    behind = sum((mesh.axis_size(a) - 1) * stride / 2 for a, (x, stride) in strategy.items() if x in ("q", "s"))
    if behind or q <= s:
        return min(1.0, (q / 2 + behind) / s)
    return 1 - s / (2 * q)


def _conv(op: Op, rule: Rule, n: Mapping[str, int]) -> float:
    """A transposed convolution puts its kernel at every pixel of the input, an ordinary one at every pixel of the output."""
    backward = is_backward(op)
    transposed = bool(op.arg(7 if backward else 6))
    elsewhere = "t" if transposed else "s"
    each = 2.0 * math.prod(v for x, v in n.items() if not x.startswith(elsewhere))
    return each * sum(map(bool, op.arg(10)[:2])) if backward else each


def _moe(op: Op, rule: Rule, n: Mapping[str, int]) -> float:
    """`e` numbers the experts and `o` their offsets: neither is a loop of the product."""
    if experts.is_experts(op):
        return experts.flops(op, n)
    share = n["e"] / max(rule.factors["e"].size, 1)
    each = 2.0 * share * math.prod(v for x, v in n.items() if x not in ("e", "o"))
    return each * (2 if is_backward(op) else 1)
