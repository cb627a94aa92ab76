"""Backward of a max pool is kept an offset into its window, a byte, instead of an index into the plane, eight.

    offset = where in its window a maximum is,    index = where the window begins + where the offset lies in it

torch.compile keeps offsets too: its decomposition of a max pool in a joint graph makes indices of them, which its partitioner then makes in backward. Halves that are handed to
Inductor one by one would have forward make the indices. Bitwise.

Requires: "local". For graphs that are compiled: call by call, offsets are made of indices.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar import _torch

aten = torch.ops.aten
_POOLS = {aten.max_pool2d_with_indices.default: 2, aten.max_pool3d_with_indices.default: 3}
_BACKWARD = {aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default}


def pool_offsets(gm: fx.GraphModule, mode: Any) -> None:
    """In place, where nothing but a backward of the pool reads its indices."""
    changed = False
    for n in list(gm.graph.nodes):
        if n.target in _POOLS and n.meta["direction"] == "forward":
            indices = [u for u in n.users if u.target is operator.getitem and u.args[1] == 1]
            readers = [u for i in indices for u in i.users]
            args = _arguments(n, _POOLS[n.target])
            if readers and all(_is_backward_of(u, i) for i in indices for u in i.users) and _torch.pools_with_offsets(args[0], args[3]):
                _replace(gm.graph, mode, n, args, readers)
                changed = True
    if changed:
        gm.graph.eliminate_dead_code()


def _arguments(n: fx.Node, dims: int) -> tuple[list[int], list[int], list[int], list[int], bool]:
    """Window, stride, padding, dilation and whether sizes round up, as torch takes them: one number for all dims, or one for each."""

    def each(value: Any, default: Any) -> list[int]:
        value = list(value) if isinstance(value, (list, tuple)) else [value]
        value = value or list(default)
        return [int(v) for v in (value * dims if len(value) == 1 else value)]

    given = [*n.args[1:], *([[], 0, 1, False][len(n.args) - 2 :])]
    window = each(given[0], [])
    return window, each(given[1], window), each(given[2], [0]), each(given[3], [1]), bool(given[4])


def _is_backward_of(u: fx.Node, indices: fx.Node) -> bool:
    return u.target in _BACKWARD and u.meta["direction"] == "backward" and u.args[-1] is indices and indices not in u.args[:-1]


def _replace(graph: fx.Graph, mode: Any, n: fx.Node, args: tuple[Any, ...], readers: list[fx.Node]) -> None:
    window, stride, padding, dilation, up = args
    x = n.args[0]
    assert isinstance(x, fx.Node)
    pool, indices_of = _torch.pool_with_offsets()

    def call(target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        made = graph.call_function(target, args)
        with mode:
            made.meta = {**like.meta, "val": target(*fx.map_arg(args, lambda a: a.meta["val"]))}
        return made

    with graph.inserting_before(n):
        both = call(pool, (x, window, stride, padding, dilation, up), n)
        out, offsets = (call(operator.getitem, (both, i), n) for i in (0, 1))
    for u in list(n.users):
        if u.args[1] == 0:
            u.replace_all_uses_with(out)
            graph.erase_node(u)
    plane = list(x.meta["val"].shape[-len(window) :])
    for u in readers:
        with graph.inserting_before(u):
            indices = call(indices_of, (offsets, window, plane, stride, padding, dilation), u)
        u.args = (*u.args[:-1], indices)
