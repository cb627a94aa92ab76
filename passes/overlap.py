"""What prefetching of parameters and deferred reduction of gradients share: which collectives, over which stretches, in what order.

Two kinds of collectives depend on nothing that a layer computes, or nothing that is computed depends on them:

    ahead    gathers of parameters, with all that leads to them from parameters alone (casts, padding, an earlier gather) and their wait
    behind   reductions of gradients, their waits, and all that follows on the way to the graph's results

Two more are marked and stay where `offload` puts them: what leaves the device ("sent") and what comes back ("brought").

Their nodes are marked (`meta["overlap"]`), because they may lie in any layer: `outline` looks for layers among the other calls only, and
issues and awaits these collectives between two layers, in the graph that holds both halves.

OverlapWindows. The calls that are not marked are cut into stretches, in order: a repeated layer (as outlining finds and cuts it) is one; what lies
outside of layers is cut where W bytes of collectives are together, a rest of less than W / 2 joins the layer that follows it. W is the
largest sum over a repeated layer; without repeated layers, the largest sum of two consecutive collectives. So a stretch has less than
1.5 W bytes, or less than W plus one collective.

A window is what the compute stream has to do between the issue of a collective and its wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from autopar import _torch
from autopar.capture.capture import Role
from autopar.graph.calls import is_collective, is_issue, is_wait, shares_storage
from autopar.passes.partition import Parts
from autopar.passes.repeats import Cuts, call_hash, find_repeats

AHEAD, BEHIND, SENT, BROUGHT = "ahead", "behind", "sent", "brought"
MARK = "overlap"
# Meta of a marked collective: (the stretch it belongs to, how many collectives of its chain lie between it and what reads or makes its tensor).
STRETCH = "stretch"


def marked(n: fx.Node) -> bool:
    return MARK in n.meta


def is_ahead(n: fx.Node) -> bool:
    return n.meta.get(MARK) == AHEAD


def goes_before(n: fx.Node) -> bool:
    """Whether a marked node that stands inside of a layer belongs before it, rather than behind it."""
    return n.meta.get(MARK) in (AHEAD, BROUGHT)


def is_behind(n: fx.Node) -> bool:
    return n.meta.get(MARK) == BEHIND


@dataclass(frozen=True)
class Window:
    """Calls [start, end), those not marked; members: indices of the collectives that belong to it."""

    start: int
    end: int
    members: tuple[int, ...]


# ---- which collectives -------------------------------------------------------------------------------------------


def mark(gm: fx.GraphModule, inputs: Sequence[Role | None]) -> fx.GraphModule:
    """A copy of `gm` with gathers of parameters and reductions of gradients marked. inputs: roles of the placeholders; None: a saved value."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    gm = fx.GraphModule(gm, graph)
    nodes = list(graph.nodes)
    places = [n for n in nodes if n.op == "placeholder"]
    fixed = {n for n, r in zip(places, inputs, strict=True) if r is not None and r.kind in ("param", "coordinate")}
    fixed |= {n for n in nodes if n.op == "get_attr"}
    from_params: set[fx.Node] = set()
    for n in nodes:
        if n.op == "call_function" and n.all_input_nodes and all(a in fixed or a in from_params for a in n.all_input_nodes):
            from_params.add(n)
    wanted: set[fx.Node] = set()
    for n in reversed(nodes):
        if n in from_params and (is_collective(n) or (is_wait(n) and is_collective(_of(n))) or any(u in wanted for u in n.users)):
            wanted.add(n)
            n.meta[MARK] = AHEAD
    last: set[fx.Node] = set()  # what gradients are brought to their places with, and nothing else reads
    for n in reversed(nodes):
        if n.meta.get("op", "").startswith("grad.") and all(u in last or u.op == "output" for u in n.users):
            last.add(n)
    for n in nodes:
        if n in last and not marked(n) and (is_collective(n) or any(map(is_behind, n.all_input_nodes))):
            n.meta[MARK] = BEHIND
    return gm


def _of(wait: fx.Node) -> fx.Node:
    issue = wait.args[0]
    assert isinstance(issue, fx.Node)
    return issue


def inputs_of(parts: Parts, backward: bool) -> list[Role | None]:
    """Roles of the placeholders of one half."""
    return [*[None] * len(parts.saved), *parts.backward_inputs] if backward else list(parts.forward_inputs)


# ---- stretches ---------------------------------------------------------------------------------------------------


def calls_between(gm: fx.GraphModule) -> list[fx.Node]:
    """The calls that are not marked, in order; a tuple is taken apart right where it is made, as for outlining."""
    out: dict[fx.Node, None] = {}

    def add(n: fx.Node) -> None:
        out[n] = None
        if isinstance(n.meta.get("val"), (list, tuple)):
            for u in n.users:
                if _torch.is_getitem(u):
                    add(u)

    for n in gm.graph.nodes:
        if n.op == "call_function" and not marked(n) and n not in out:
            add(n)
    return list(out)


def behind(gm: fx.GraphModule, position: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Of what is marked to stand behind a call: that call's position."""
    out: dict[fx.Node, int] = {}
    before = 0
    for n in gm.graph.nodes:
        before = max(before, position.get(n, 0))
        if is_behind(n):
            out[n] = before
    return out


def windows(calls: list[fx.Node], at: Sequence[int], sizes: Sequence[int]) -> list[Window]:
    """at: the call each collective belongs to, ascending; sizes: bytes."""
    cuts = Cuts(calls)
    stacks = [c for r in find_repeats([call_hash(n) for n in calls]) if (c := cuts.best(r)) is not None]
    layers = [(s.start + k * s.period, s.start + (k + 1) * s.period) for s in stacks for k in range(s.count)]
    inside = [[i for i, p in enumerate(at) if a <= p < b] for a, b in layers]
    if layers and any(inside):
        limit = max(sum(sizes[i] for i in members) for members in inside)
    else:
        limit = max((a + b for a, b in pairwise(sizes)), default=sum(sizes))
    out: list[tuple[int, list[int]]] = []
    todo = 0  # collectives so far given to a stretch
    for (start, end), members in [*zip(layers, inside, strict=True), ((len(calls), len(calls)), [])]:
        group: list[int] = []
        while todo < len(at) and (at[todo] < start or start == end):
            group.append(todo)
            todo += 1
            is_last = todo == len(at) or at[todo] > at[group[-1]]  # collectives of one call are in one window: it ends behind that call
            if is_last and sum(sizes[i] for i in group) >= limit:
                out.append((at[group[0]], group))
                group = []
        if start == end:
            out += [(at[group[0]], group)] if group else []
            break
        if group and sum(sizes[i] for i in group) * 2 >= limit:
            out.append((at[group[0]], group))
            group = []
        out.append((at[group[0]] if group else start, group + members))
        todo += len(members)
    ends = [*(start for start, _ in out[1:]), len(calls)][: len(out)]
    return [Window(start, end, tuple(members)) for (start, members), end in zip(out, ends, strict=True)]


# ---- order -------------------------------------------------------------------------------------------------------


def reorder(gm: fx.GraphModule, calls: list[fx.Node], moved: dict[fx.Node, tuple[int, int, int]]) -> fx.GraphModule:
    """`gm` with `calls` in their order. moved: (call, phase, rank): before that call (phase < 0) or right behind it (phase > 0).

    Other marked nodes stay behind the call that they are behind now.
    """
    position = {n: i for i, n in enumerate(calls)}
    keys: dict[fx.Node, tuple[int, int, int, int]] = {}
    before = -1
    for i, n in enumerate(gm.graph.nodes):
        if n in position:
            before = max(before, position[n])
            keys[n] = (position[n], 0, 0, i)
        elif n.op == "call_function":
            keys[n] = (*moved.get(n, (before, 1, 0)), i)
        elif n.op != "output":
            keys[n] = (-1, -1, 0, i)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for n in sorted(keys, key=keys.__getitem__):
        env[n] = graph.node_copy(n, env.__getitem__)
    graph.output(fx.map_arg(gm.graph.output_node().args[0], env.__getitem__))
    out = fx.GraphModule(gm, graph)
    out.graph.lint()
    return out


# ---- windows -----------------------------------------------------------------------------------------------------


def overlapped(gm: fx.GraphModule) -> list[tuple[fx.Node, int]]:
    """Every collective and transfer with its window, the number of calls that compute between its issue and its wait; also `meta["window"]`."""
    done = 0
    issued: dict[fx.Node, int] = {}
    out = []
    for n in gm.graph.nodes:
        if is_issue(n):
            issued[n] = done
        elif is_wait(n):
            issue = _of(n)
            if issue in issued:
                issue.meta["window"] = done - issued[issue]
                out.append((issue, done - issued[issue]))
        elif computes(n):
            done += 1
    return out


def blocking(gm: fx.GraphModule) -> int:
    """Collectives with nothing to compute between issue and wait."""
    return sum(window == 0 for n, window in overlapped(gm) if is_collective(n))


def blocking_of(parts: Parts) -> tuple[int, int]:
    """(collectives that block, all collectives) of a step's two halves."""
    halves = [gm for gm in (parts.forward, parts.backward) if gm is not None]
    return sum(map(blocking, halves)), sum(is_collective(n) for gm in halves for n, _ in overlapped(gm))


def computes(n: fx.Node) -> bool:
    """A call that does work of its layer: no view, no part of a tuple, no collective and nothing on the way from or to one of the marked."""
    if n.op != "call_function" or marked(n) or is_issue(n) or is_wait(n) or _torch.is_getitem(n):
        return False
    return shares_storage(n) is None
