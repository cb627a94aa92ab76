"""Saved tensors that the plan keeps away from the device leave it in forward and come back in backward.

    forward     t = offload(x, medium, store); h = offloaded(t, x); h is saved in x's place
    backward    t = reload(h, ...); x = reloaded(t, ...) where x was read first

x leaves as soon as it is made, and its memory is free at the end of the next stretch; it comes back from the start of the stretch before the one that reads
it. So the plan has counted it. x comes back with the strides it had, so that whatever reads it does the same sums in the same order. Views of x are made again in backward
(`partition`): a view that is saved would keep all of x.

Requires: the halves of `partition`. Provides: the same results. Bitwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

import autopar.offload  # noqa: F401  registers the ops
from autopar import _torch
from autopar.graph.calls import OFFLOADED, nbytes
from autopar.passes.overlap import BROUGHT, MARK, SENT
from autopar.passes.partition import Parts
from autopar.tensors.memory_format import contiguous, dense_order


def offload(parts: Parts, store: str, window_of: Mapping[str, int], fake_mode: Any) -> Parts:
    """`parts`, with every saved node that is marked kept in its medium.

    store: the name of the place that runs it; window_of: op -> its stretch (`autopar.planner.formulation.overlap_windows`), by which the plan was priced.
    """
    if parts.backward is None or not any(OFFLOADED in n.meta for n in parts.forward.graph.nodes):
        return parts
    forward, backward = _copy(parts.forward), _copy(parts.backward)
    output = forward.graph.output_node()
    results = list(_torch.results_of(forward.graph))
    places = [n for n in backward.graph.nodes if n.op == "placeholder"]
    first = len(results) - len(parts.saved)
    ends, starts = _firsts(forward, window_of), _firsts(backward, window_of)
    for i, back in enumerate(places[: len(parts.saved)]):
        x = results[first + i]
        if x.meta.get(OFFLOADED):
            until = window_of[x.meta["op"]] + 2
            results[first + i] = _send(forward.graph, x, store, next((n for j, n in ends if j >= until), output), fake_mode)
            _bring(backward.graph, back, x, results[first + i], starts, fake_mode)
    output.args = (tuple(results),)
    for gm in (forward, backward):
        gm.graph.lint()
        gm.recompile()
    return replace(parts, forward=forward, backward=backward)


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def _firsts(gm: fx.GraphModule, window_of: Mapping[str, int]) -> list[tuple[int, fx.Node]]:
    """(stretch, the first call in it), in order. What is made again in backward is made in the stretch that needs it."""
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    direction = calls[-1].meta["direction"] if calls else ""
    out: list[tuple[int, fx.Node]] = []
    now = -1
    first: fx.Node | None = None  # of those whose stretch is not known yet
    for n in calls:
        first = first or n
        own = window_of.get(n.meta["op"]) if n.meta["direction"] == direction else None
        if own is None:
            continue
        if own > now:
            out.append((own, first))
            now = own
        first = None
    return out


def _send(graph: fx.Graph, x: fx.Node, store: str, until: fx.Node, mode: Any) -> fx.Node:
    """The handle of `x`, which is there before node `until`."""
    order = _order(x.meta["val"])
    dense = x
    if order != sorted(order):
        with graph.inserting_after(x):
            dense = _call(graph, torch.ops.aten.permute.default, (x, order), x, mode)
    with graph.inserting_after(dense):
        ticket = _call(graph, torch.ops.autopar.offload.default, (dense, x.meta[OFFLOADED], store), x, mode)
    with graph.inserting_before(until):
        handle = _call(graph, torch.ops.autopar.offloaded.default, (ticket, dense), x, mode)
    ticket.meta[MARK] = handle.meta[MARK] = SENT
    return handle


def _bring(graph: fx.Graph, place: fx.Node, x: fx.Node, handle: fx.Node, starts: list[tuple[int, fx.Node]], mode: Any) -> None:
    """Readers of `place`, which stood for `x`, read what comes back for the handle, which it stands for now."""
    val = x.meta["val"]
    place.meta["val"] = handle.meta["val"]
    order = _order(val)
    about = ([val.shape[d] for d in order], val.dtype, val.device)
    position = {n: i for i, n in enumerate(graph.nodes)}
    readers = sorted(place.users, key=position.__getitem__)
    like = readers[0] if readers[0].op != "output" else place
    here = max((k for k, (_, n) in enumerate(starts) if position[n] <= position[readers[0]]), default=0)
    with graph.inserting_before(starts[max(0, here - 1)][1] if starts else readers[0]):
        ticket = _call(graph, torch.ops.autopar.reload.default, (place, *about), like, mode)
    ticket.meta |= {"held_bytes": nbytes(x), OFFLOADED: x.meta[OFFLOADED], MARK: BROUGHT}  # from its issue there is what it brings
    with graph.inserting_before(readers[0]):
        back = _call(graph, torch.ops.autopar.reloaded.default, (ticket, *about), like, mode)
        back.meta[MARK] = BROUGHT
        if order != sorted(order):
            inverse = sorted(range(len(order)), key=order.__getitem__)
            back = _call(graph, torch.ops.aten.permute.default, (back, inverse), like, mode)
    for n in readers:
        n.replace_input_with(place, back)


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, mode: Any) -> fx.Node:
    new = graph.call_function(target, args)
    values = fx.map_arg(args, lambda n: n.meta["val"])
    with mode:
        new.meta = {"val": target(*values), "direction": like.meta["direction"], "op": like.meta.get("op", "output")}
    return new


def _order(val: torch.Tensor) -> list[int]:
    """Its dims as they lie, if that is without gaps; else as they are (it will come back contiguous)."""
    return list(dense_order(val) or contiguous(val.dim()))
