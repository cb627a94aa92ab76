"""Reading a captured graph backwards, and writing new calls into it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
SAME = (aten.detach.default, aten.alias.default)  # the operand itself, by another name
TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def shape(n: fx.Node) -> tuple[int, ...]:
    return tuple(n.meta["val"].shape)


def same(n: Any) -> Any:
    """What a node is another name of."""
    while isinstance(n, fx.Node) and n.target in SAME:
        n = n.args[0]
    return n


def looked_at(n: Any) -> Any:
    """The matrix that a node is, through names and views that leave its shape."""
    n = same(n)
    while isinstance(n, fx.Node) and n.target in VIEWS and isinstance(n.args[0], fx.Node) and shape(n.args[0]) == shape(n):
        n = same(n.args[0])
    return n


def transposed(n: Any) -> fx.Node | None:
    """The matrix of which a node is the transpose."""
    n = looked_at(n)
    if not isinstance(n, fx.Node) or n.target not in TRANSPOSES or len(shape(n)) != 2:
        return None
    source = n.args[0]
    assert isinstance(source, fx.Node)
    turned = shape(n) == shape(source)[::-1] and n.args[1:] not in (([0, 1],), (0, 0), (1, 1))
    found = looked_at(source)
    return found if turned and isinstance(found, fx.Node) else None


def is_matrix(n: Any, matrix: fx.Node) -> bool:
    """Whether a node is `matrix`, through names, views and pairs of transposes."""
    n = looked_at(n)
    while isinstance(n, fx.Node) and n is not matrix:
        first = transposed(n)
        second = transposed(first) if first is not None else None
        if second is None:
            return False
        n = second
    return n is matrix


def is_turned(n: Any, matrix: fx.Node) -> bool:
    """Whether a node is the transpose of `matrix`."""
    turned = transposed(n)
    return turned is not None and is_matrix(turned, matrix)


class Writer:
    """New calls, with the values that they have and where they come from."""

    def __init__(self, graph: fx.Graph, mode: Any) -> None:
        self.graph, self.mode = graph, mode

    def call(self, before: fx.Node, like: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """before: the node that it stands before; like: the one whose module and direction it has."""
        with self.graph.inserting_before(before):
            new = self.graph.call_function(target, args, kwargs)
        new.meta = {k: v for k, v in like.meta.items() if k not in ("val", "tag", "mark", "tensor_meta")}
        with self.mode:
            a, k = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
            new.meta["val"] = target(*a, **k)
        return new


def escapes(nodes: Collection[fx.Node], results: Collection[fx.Node]) -> bool:
    """Whether any of `nodes` is used by others than these and `results`."""
    return any(u not in nodes and u not in results for n in nodes for u in n.users)
