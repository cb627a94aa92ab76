"""What a traced gate (`gates.py`) computes, where it is one of the forms that a kernel has (`triton/gate.py`). Of rows x of 2 F features, g and u those of the gate and of what it gates:

    a = f(min(g, limit)) (clamp(u, -limit, limit) + shift)                      f: swish g sigmoid(slope g), gelu, gelu of tanh, relu

swish of slope 1 is SiLU; with limit 7, slope 1.702 and shift 1 it is gpt-oss's. The expression is read off the graph, then checked by numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

aten = torch.ops.aten
KINDS = ("swish", "gelu", "gelu_tanh", "relu")
Expression = tuple[Any, ...]


class GateForm(NamedTuple):
    """kind: of KINDS; apart: gate and gated are halves of a row, else they alternate; gate_first: of the two; limit: 0 for none."""

    kind: str
    apart: bool
    gate_first: bool
    slope: float = 1.0
    limit: float = 0.0
    shift: float = 0.0

    def of(self, x: Tensor) -> Tensor:
        """[S, 2 F] -> [S, F]."""
        parts = x.chunk(2, -1) if self.apart else (x[:, ::2], x[:, 1::2])
        g, u = parts if self.gate_first else (parts[1], parts[0])
        if self.limit:
            g, u = g.clamp(max=self.limit), u.clamp(-self.limit, self.limit)
        if self.kind == "swish":
            f = g * torch.sigmoid(self.slope * g)
        else:
            f = F.relu(g) if self.kind == "relu" else F.gelu(g, approximate="tanh" if self.kind == "gelu_tanh" else "none")
        return f * (u + self.shift)


def form_of(forward: fx.GraphModule, rows: int, features: int) -> GateForm | None:
    """Of a traced gate, [S, G] -> [S, F]; None where it is another. rows, features: of an example that may be computed."""
    value = _expression(forward)
    found = None if value is None else _form(list(_factors(value)))
    if found is None:
        return None
    x = torch.linspace(-9, 9, rows * features, dtype=torch.float64).reshape(features, rows).t()
    a = forward(x)
    near = max(1e-6, 4 * torch.finfo(a.dtype).eps)  # a gate may name the dtype it computes in
    return found if a.shape == (rows, features // 2) and torch.allclose(a.double(), found.of(x), rtol=near, atol=near) else None


def _factors(e: Expression) -> Iterator[Expression]:
    """In whatever order they are multiplied."""
    if e[0] == "mul":
        yield from _factors(e[1])
        yield from _factors(e[2])
    else:
        yield e


def _form(factors: list[Expression]) -> GateForm | None:
    """One of them, or two that are swish together, of the gate; one of what it gates."""
    for e in factors:
        rest = [f for f in factors if f is not e]
        if e[0] == "sigmoid" and len(rest) == 2:
            g, slope = (e[1][1], e[1][2]) if e[1][0] == "scale" else (e[1], 1.0)
            if g in rest:
                rest.remove(g)
                return _between(g, rest[0], "swish", slope)
        elif e[0] in ("silu", "gelu", "gelu_tanh", "relu") and len(rest) == 1:
            return _between(e[1], rest[0], "swish" if e[0] == "silu" else e[0], 1.0)
    return None


def _between(g: Expression, u: Expression, kind: str, slope: float) -> GateForm | None:
    shift, limit = 0.0, 0.0
    if u[0] == "add":
        u, shift = u[1], u[2]
    if g[0] == u[0] == "clamp":
        limit = g[3]
        if g[2] is not None or limit is None or limit <= 0 or u[2:] != (-limit, limit):
            return None
        g, u = g[1], u[1]
    if g[0] != "part" or u[0] != "part" or g[1] != u[1] or g[2] == u[2]:
        return None
    return GateForm(kind, g[1], g[2] == 0, slope, limit, shift)


def _expression(forward: fx.GraphModule) -> Expression | None:
    """What the graph gives, as nested tuples; None where it has an operator that none of the forms has. Sizes are not followed: numbers will tell."""
    known: dict[fx.Node, Expression] = {}
    for n in forward.graph.nodes:
        if n.op == "placeholder":
            known[n] = ("x",)
        elif n.op == "output":
            return known.get(n.args[0]) if isinstance(n.args[0], fx.Node) else None
        elif (
            n.args and isinstance(n.args[0], fx.Node) and (e := _of(n, [known.get(a, a) if isinstance(a, fx.Node) else a for a in n.args]))
        ):
            known[n] = e
    return None


def _of(n: fx.Node, given: Sequence[Any]) -> Expression | None:
    t, x = n.target, given[0]
    if not isinstance(x, tuple):
        return None
    if t is operator.getitem and x[0] == "parts":
        return "part", True, given[1]
    if t == aten.split.Tensor and x == ("x",) and given[2:] in ([-1], [1]):
        return ("parts",)
    if t == aten.slice.Tensor and x == ("x",) and given[1] in (1, -1) and given[2] in (0, 1) and given[4:] == [2]:
        return "part", False, given[2]
    if t == aten._to_copy.default or t == aten.detach.default:
        return x if set(n.kwargs) <= {"dtype"} else None  # kernels compute in float32 whatever it says
    if t == aten.mul.Tensor:
        return ("mul", x, given[1]) if isinstance(given[1], tuple) else ("scale", x, float(given[1])) if _is_number(given[1]) else None
    if t == aten.add.Tensor and _is_number(given[1]) and not n.kwargs:
        return "add", x, float(given[1])
    if t == aten.clamp.default:
        low, high = (*given[1:], n.kwargs.get("min"), n.kwargs.get("max"))[:2]
        return "clamp", x, low, high
    if t == aten.gelu.default:
        return "gelu" if n.kwargs.get("approximate", "none") == "none" else "gelu_tanh", x
    names = {aten.silu.default: "silu", aten.sigmoid.default: "sigmoid", aten.relu.default: "relu"}
    return (names[t], x) if t in names else None


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)
