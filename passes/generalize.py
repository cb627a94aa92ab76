"""Two rewritten graphs of one program, at two sizes -> one graph for all sizes.

Passes work on numbers. What they make of a program at two sizes differs in numbers alone (else it is not one program: `NotGeneralError`), and every number that differs
is an expression of the sizes that vary (`autopar.capture.lift`). In the general graph it is computed from those, which are the graph's first inputs.

Requires: two graphs by the same passes. Provides: size arithmetic in the graph; values recorded at the first size. Bitwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar.capture.capture import NotGeneralError
from autopar.capture.lift import Lift


@dataclass(frozen=True)
class General:
    """gm: its first inputs are the symbols' values. inputs: shape and strides of the others, numbers or expressions of `names`. at: the numbers of units that its values
    are recorded at."""

    gm: fx.GraphModule
    names: tuple[Any, ...]
    inputs: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...]
    at: tuple[int, ...]


def generalize(first: fx.GraphModule, second: fx.GraphModule, lift: Lift) -> General:
    other: dict[fx.Node, fx.Node] = {}
    mine, theirs = list(first.graph.nodes), list(second.graph.nodes)
    if [(n.op, n.target, n.name) for n in mine if n.op != "get_attr"] != [(n.op, n.target, n.name) for n in theirs if n.op != "get_attr"]:
        a, b = next((pair for pair in zip(mine, theirs, strict=False) if pair[0].target != pair[1].target), (mine[-1], theirs[-1]))
        raise NotGeneralError(f"it has other calls at another size: {a.name} ({a.target}) where there is {b.name} ({b.target})")
    for a, b in zip(mine, theirs, strict=True):
        other[a] = b
        if a.op == "get_attr":
            x, y = (_torch.get_attribute(gm, str(n.target)) for gm, n in ((first, a), (second, b)))
            if not _same(x, y):
                raise NotGeneralError(f"a constant of it, {a.name}, depends on the size")

    def size_of(n: fx.Node, path: tuple[Any, ...]) -> Any:
        a, b = _at(n, path), _at(other[n], path)
        if a == b and type(a) is type(b):
            return None
        found = lift(a, b)
        if found is None:
            raise NotGeneralError(
                f"{path} of {n.name} ({n.target}) is {a} at one size and {b} at another, which is no expression of them that was captured"
            )
        return found

    for a in mine:
        if _shape(a.args) != _shape(other[a].args) or _shape(a.kwargs) != _shape(other[a].kwargs):
            raise NotGeneralError(f"{a.name} ({a.target}) has other arguments at another size")
    gm, inputs = _torch.symbolic(first, lift.names, size_of)
    return General(gm, tuple(lift.names), tuple((tuple(s), tuple(t)) for s, t in inputs), lift.first)


def _at(n: fx.Node, path: tuple[Any, ...]) -> Any:
    kind, *rest = path
    x: Any = {"args": n.args, "kwargs": n.kwargs}.get(kind)
    if x is None:
        x = n.meta["val"].shape if kind == "shape" else n.meta["val"].stride()
    for key in rest:
        x = x[key]
    return x


def _shape(x: Any) -> Any:
    """Arguments without their numbers."""
    if isinstance(x, fx.Node):
        return x.name if x.op != "get_attr" else "get_attr"
    if isinstance(x, (list, tuple)):
        return tuple(_shape(y) for y in x)
    if isinstance(x, dict):
        return tuple((k, _shape(y)) for k, y in x.items())
    return type(x).__name__ if type(x) in (int, float) else str(x)


def _same(x: Any, y: Any) -> bool:
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return x is y
    if _torch.is_fake(x) or _torch.is_fake(y):
        return x.shape == y.shape and x.dtype == y.dtype
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)
