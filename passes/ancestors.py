"""What results are made of."""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch import fx


def ancestors(results: Iterable[fx.Node], given: Container[fx.Node] = ()) -> set[fx.Node]:
    """`results`, and all that they are made of; of nodes that are `given`, not what those are made of."""
    seen: set[fx.Node] = set()
    todo = list(results)
    while todo:
        n = todo.pop()
        if n not in seen:
            seen.add(n)
            todo += () if n in given else n.all_input_nodes
    return seen
