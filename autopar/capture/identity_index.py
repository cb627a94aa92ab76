"""`x[arange(n)]` over all of a dim is that dim as it is. transformers looks its masks up so, by the number of each sample and each position.

As a lookup it could not be split: nothing in an index tells that its numbers count up. As a copy of x in another order of dims it can, as anything pointwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.rules.index import placed

_aten = torch.ops.aten
_LOOKUPS = (_aten.index.Tensor, _aten._unsafe_index.Tensor)
_COUNTS = {_aten.arange.default: 0, _aten.arange.start: 1, _aten.arange.start_step: 1}  # where their end stands
# What keeps elements in order, where it keeps their number.
_SAME_ORDER = (
    _aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default,
    _aten.expand.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default,
)  # fmt: skip


def plain_indices(gm: fx.GraphModule, mode: Any) -> int:
    """Rewrites such lookups of a captured graph in place; how many there were."""
    found = 0
    for n in list(gm.graph.nodes):
        if n.op == "call_function" and n.target in _LOOKUPS and (lookup := _Lookup.of(n)) is not None:
            lookup.rewrite(gm.graph, mode)
            found += 1
    return found


def _shape(n: fx.Node) -> tuple[int, ...]:
    return tuple(n.meta["val"].shape)


def _counts(n: Any) -> int:
    """How far the elements of `n` count up from 0 by one, in their order; 0: they do not, as far as is known."""
    while isinstance(n, fx.Node) and n.op == "call_function" and n.meta["val"].dtype in (torch.int64, torch.int32):  # narrower ones wrap
        if n.target in _COUNTS:
            end = _COUNTS[n.target]
            step = n.args[2] if len(n.args) > 2 else n.kwargs.get("step", 1)
            starts = end == 0 or n.args[0] == 0
            return math.prod(_shape(n)) if starts and step == 1 and isinstance(n.args[end], int) else 0
        source = n.args[0] if n.args else None
        adds_nothing = n.target is _aten.add.Tensor and n.args[1] == 0
        if not isinstance(source, fx.Node) or not (adds_nothing or n.target in _SAME_ORDER):
            return 0
        if math.prod(_shape(source)) != math.prod(_shape(n)):
            return 0
        n = source
    return 0


@dataclass(frozen=True)
class _Lookup:
    """x[indices]. shape: what the indices broadcast to; whole: dim of x that is taken as it is -> dim of `shape` in which it is counted."""

    node: fx.Node
    x: fx.Node
    indices: tuple[fx.Node | None, ...]
    shape: tuple[int, ...]
    whole: dict[int, int]

    @staticmethod
    def of(n: fx.Node) -> _Lookup | None:
        """None where no index counts a whole dim."""
        x, indices = n.args
        assert isinstance(x, fx.Node) and isinstance(indices, (list, tuple))
        given = {i: t for i, t in enumerate(indices) if isinstance(t, fx.Node)}
        if any(t.meta["val"].dtype in (torch.bool, torch.uint8) for t in given.values()):
            return None
        shape = tuple(torch.broadcast_shapes(*(_shape(t) for t in given.values())))
        aligned = {i: (1,) * (len(shape) - len(_shape(t))) + _shape(t) for i, t in given.items()}
        whole: dict[int, int] = {}
        for i, t in given.items():
            varies = [p for p, n in enumerate(aligned[i]) if n > 1]
            if len(varies) == 1 and _counts(t) == _shape(x)[i]:
                (p,) = varies
                if all(aligned[j][p] == 1 for j in given if j != i):
                    whole[i] = p
        every = tuple(t if isinstance(t, fx.Node) else None for t in indices)
        return _Lookup(n, x, every, shape, whole) if whole else None

    def rewrite(self, graph: fx.Graph, mode: Any) -> None:
        with graph.inserting_before(self.node):
            y, dims = self.looked_up(graph, mode)
            # Dims of the result: of x by their number, of the indices' shape by ("j", number), unless one of x is counted there.
            counted = {p: i for i, p in self.whole.items()}
            of_indices: list[Any] = [counted.get(p, ("j", p)) for p in range(len(self.shape))]
            wanted = placed([i for i, t in enumerate(self.indices) if t is not None], len(_shape(self.x)), of_indices)
            y = self.call(graph, mode, _aten.permute.default, y, [dims.index(d) for d in wanted if d in dims])
            for at, d in enumerate(wanted):
                if d not in dims:
                    y = self.call(graph, mode, _aten.unsqueeze.default, y, at)
            y = self.call(graph, mode, _aten.clone.default, y, memory_format=torch.contiguous_format)  # a lookup shares no memory
        self.node.replace_all_uses_with(y)
        graph.erase_node(self.node)

    def looked_up(self, graph: fx.Graph, mode: Any) -> tuple[fx.Node, list[Any]]:
        """x by the other indices, and which dims that has."""
        others = {i: t for i, t in enumerate(self.indices) if t is not None and i not in self.whole}
        if not others:
            return self.x, list(range(len(_shape(self.x))))
        left = [p for p in range(len(self.shape)) if p not in self.whole.values()]
        indices: list[fx.Node | None] = [None] * len(_shape(self.x))
        for i, t in others.items():
            missing = len(self.shape) - len(_shape(t))
            indices[i] = self.call(graph, mode, _aten.squeeze.dims, t, [p - missing for p in self.whole.values() if p >= missing])
        y = self.call(graph, mode, self.node.target, self.x, indices)
        return y, placed(list(others), len(_shape(self.x)), [("j", p) for p in left])

    def call(self, graph: fx.Graph, mode: Any, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        with mode:
            new.meta = {**self.node.meta, "val": target(*fx.map_arg(list(args), lambda a: a.meta["val"]), **kwargs)}
        return new
