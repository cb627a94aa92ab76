"""What the scores that a loss reads are made of, read backwards from the loss: a linear layer, what is done to each score, and which rows of it are taken.

scores = rows of cap tanh(s (h w^T + b) / cap)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.fusions.graph import SAME, VIEWS, aten, looked_at, shape, transposed

# What may be done to rows without touching scores: views that keep the last dim, copies, casts, parts of the other dims.
COPIES = (aten.clone.default, aten._to_copy.default, *SAME)


@dataclass
class Logits:
    """h [T, D], w [V, D], b of V elements; `nodes`: all that stands between them and the loss; rows: what takes rows, from the product on."""

    h: fx.Node
    w: fx.Node
    b: fx.Node | None
    scale: float
    cap: float
    product: fx.Node
    nodes: list[fx.Node]
    rows: list[fx.Node] = field(default_factory=list)


def _number(x: Any) -> float | None:
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else None


def _times(n: fx.Node) -> float | None:
    """By what number `n` multiplies its first operand."""
    if (
        n.target not in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
        or n.kwargs
        or not isinstance(n.args[0], fx.Node)
    ):
        return None
    by = _number(n.args[1])
    if by is None or n.target in (aten.mul.Tensor, aten.mul.Scalar):
        return by
    return 1 / by if by else None


def logits_of(scores: fx.Node) -> Logits | None:
    """scores: [..., V]; None where they are no such thing."""
    words = shape(scores)[-1]
    nodes, rows = list[fx.Node](), list[fx.Node]()
    scale, cap = 1.0, 0.0
    bias: fx.Node | None = None
    n: Any = scores
    while isinstance(n, fx.Node) and n.op == "call_function":
        nodes.append(n)
        if "mark" in n.meta:  # the user says what becomes of it
            return None
        if n.target in (aten.mm.default, aten.addmm.default):
            return _linear(n, bias, scale, cap, nodes, rows)
        source = n.args[0]
        if not isinstance(source, fx.Node):
            return None
        if n.target in VIEWS or n.target is aten.slice.Tensor:
            if shape(n)[-1:] != (words,) or shape(source)[-1:] != (words,):
                return None
            if n.target is aten.slice.Tensor:
                if (n.args[1] if len(n.args) > 1 else 0) in (-1, len(shape(n)) - 1):
                    return None
                rows.append(n)
            elif shape(n)[:-1] != shape(source)[:-1]:
                rows.append(n)
        elif n.target in COPIES:
            if not n.meta["val"].dtype.is_floating_point or not source.meta["val"].dtype.is_floating_point:
                return None
        elif (by := _times(n)) is not None:
            if by > 0 and not cap and bias is None and source.target is aten.tanh.default:
                # mul(tanh(mul(x, a)), cap): a = s / cap
                nodes.append(source)
                inner = source.args[0]
                times = _times(inner) if isinstance(inner, fx.Node) else None
                if times is None or scale != 1.0:
                    return None
                assert isinstance(inner, fx.Node)
                nodes.append(inner)
                cap, scale = by, times * by
                source = inner.args[0]
            elif bias is not None:
                return None
            else:
                scale *= by
        elif n.target is aten.add.Tensor and not n.kwargs and bias is None:
            other = n.args[1]
            if not isinstance(other, fx.Node) or shape(other)[-1:] != (words,) or math.prod(shape(other)) != words:
                return None
            if other.meta["val"].dtype != n.meta["val"].dtype:
                return None
            bias = other
        else:
            return None
        n = source
    return None


def _linear(n: fx.Node, bias: fx.Node | None, scale: float, cap: float, nodes: list[fx.Node], rows: list[fx.Node]) -> Logits | None:
    if n.target is aten.addmm.default:
        if bias is not None or n.kwargs or not isinstance(n.args[0], fx.Node) or len(shape(n.args[0])) != 1:
            return None
        bias = n.args[0]
    w, h = transposed(n.args[-1]), looked_at(n.args[-2])
    if w is None or not isinstance(h, fx.Node):
        return None
    dtype = n.meta["val"].dtype
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64) or (bias is not None and bias.meta["val"].dtype != dtype):
        return None
    return Logits(h, w, bias, scale, cap, n, nodes, rows[::-1])
