"""Buckets: small collectives of parameters and gradients that are needed together become one, so that a link's latency is paid once.

Joined are gathers of parameters, and reductions of gradients, of one kind (and reduction), group and dtype, whose stretch is the same (`overlap` says what a stretch is) and
as many collectives before or after them on their way. How many bytes make a bucket, and what is too large to be copied for one, the cluster's links say
(`autopar.cost.buckets`).

    gather            cat of the local shards, flat     all_gather       wait     each one's columns of [ranks, bytes], copied out
    reduce-scatter    cat of [ranks, elements] each     reduce_scatter   wait     each one's part, a view
    all-reduce        cat of all, flat                  all_reduce       wait     each one's part, a view

Nothing is needed later than it was, and nothing kept longer than its stretch: gathers of a stretch are issued at one place already, where the first of them is; a reduction is
issued where the last gradient of its bucket is there; and a bucket is awaited where the first of its members was. Local shards are equally large on all ranks,
so the graph is the same text on each.

Memory. A bucket of gathers is there besides its members from its issue until the last of them is copied out; of reductions, besides the unreduced gradients while it is
filled, and as one storage for as long as any of its gradients lives.

Requires: the halves of a step after `prefetch` and `defer`. Provides: fewer collectives, marked as theirs were; a pure function of the graph. Sums go over the same
ranks, but their order within a collective is the backend's.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar.cost import Cost
from autopar.cost.buckets import JOINED, joined, limit
from autopar.graph.calls import collective_of, is_collective, nbytes
from autopar.passes.overlap import MARK, STRETCH, computes, is_ahead, is_behind
from autopar.passes.partition import Parts
from autopar.plan.text import buckets as said

MEMBERS = "bucketed"  # meta of a bucket's collective: the names of those that it stands for
_aten = torch.ops.aten


@dataclass(frozen=True)
class Bucketed:
    """members: collectives that are in buckets; buckets: those they became; saved_s: what that takes off the busy time of links."""

    members: int
    buckets: int
    saved_s: float

    def __str__(self) -> str:
        """For people; nothing where there are none."""
        return said(self.members, self.buckets, self.saved_s)


def bucket(gm: fx.GraphModule, prefix: str, cost: Cost) -> fx.GraphModule:
    """`gm`, one half of a step, with its small collectives joined. prefix: of group names; cost: of the cluster that it runs on."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    gm = fx.GraphModule(gm, graph)
    keys: dict[fx.Node, tuple[int, int]] = {n: (i, 0) for i, n in enumerate(graph.nodes)}
    found = _buckets(graph, prefix, cost)
    if not found:
        return gm
    mode = _torch.fake_mode_of(gm)
    for members in found:
        _Joined(graph, members, mode, keys).replace()
    out = _sorted(gm, keys)
    out.graph.lint()
    return out


def bucketed(parts: Parts, prefix: str, cost: Cost) -> Bucketed:
    """What `bucket` made of a step."""
    members, buckets, saved_s = 0, 0, 0.0
    for gm in (parts.forward, parts.backward):
        for n in gm.graph.nodes if gm is not None else ():
            if MEMBERS in n.meta:
                members += len(n.meta[MEMBERS])
                buckets += 1
                saved_s += (len(n.meta[MEMBERS]) - 1) * limit(cost, *collective_of(n, prefix)).alpha_s
    return Bucketed(members, buckets, saved_s)


# ---- which -------------------------------------------------------------------------------------------------------


def _buckets(graph: fx.Graph, prefix: str, cost: Cost) -> list[list[fx.Node]]:
    together: dict[tuple[Any, ...], list[fx.Node]] = defaultdict(list)
    done: dict[fx.Node, int] = {}  # calls that compute, before a node
    for n in graph.nodes:
        done[n] = len(done) and done[n.prev] + computes(n.prev)
    for n in graph.nodes:
        if not is_collective(n) or STRETCH not in n.meta or not (is_ahead(n) or is_behind(n)):
            continue
        kind, _ = collective_of(n, prefix)
        source = n.all_input_nodes[0].meta["val"]
        if kind not in JOINED or (kind == "all_gather") != is_ahead(n):
            continue
        # Gathers that are issued at one place, with all that leads to them; reductions that are awaited at one place.
        (wait,) = n.users
        place = done[n] if is_ahead(n) else done[wait]
        together[n.meta[MARK], n.meta[STRETCH], place, str(n.target), n.args[1:], source.dtype, source.device].append(n)
    out = []
    for nodes in together.values():
        within = limit(cost, *collective_of(nodes[0], prefix))
        out += [[nodes[i] for i in group] for group in joined([_whole(n) for n in nodes], within) if len(group) > 1]
    return out


def _whole(n: fx.Node) -> float:
    return float(max(nbytes(n), nbytes(n.all_input_nodes[0])))


# ---- one bucket --------------------------------------------------------------------------------------------------


class _Joined:
    """members: in order of issue. keys: of nodes, by which the graph is sorted; a new one has that of the node where it may first stand."""

    def __init__(self, graph: fx.Graph, members: list[fx.Node], mode: Any, keys: dict[fx.Node, tuple[int, int]]) -> None:
        self.graph, self.members, self.mode, self.keys = graph, members, mode, keys
        self.ahead = is_ahead(members[0])
        self.waits = [next(iter(n.users)) for n in members]
        self.made = 0

    def replace(self) -> None:
        first = self.members[0]
        kind = str(first.target)
        issued = self.keys[first if self.ahead else self.members[-1]]
        awaited = min(self.keys[w] for w in self.waits)
        sources = [n.all_input_nodes[0] for n in self.members]
        width = self._width(first)
        if "reduce_scatter" in kind:
            rows = [self.call(issued, _aten.view.default, (x, [width, _numel(x) // width])) for x in sources]
            packed = self.call(issued, _aten.view.default, (self.call(issued, _aten.cat.default, (rows, 1)), [sum(map(_numel, sources))]))
        else:
            packed = self.call(issued, _aten.cat.default, ([self.call(issued, _aten.view.default, (x, [_numel(x)])) for x in sources],))
        issue = self.call(issued, first.target, (packed, *first.args[1:]))
        issue.meta[STRETCH], issue.meta[MEMBERS] = first.meta[STRETCH], tuple(n.name for n in self.members)
        whole = self.call(awaited, self.waits[0].target, (issue,))
        if "all_gather" in kind:
            whole = self.call(awaited, _aten.view.default, (whole, [width, _numel(packed)]))
        at = 0
        for n, wait in zip(self.members, self.waits, strict=True):
            shape = list(n.meta["val"].shape)
            here = max(awaited, self.keys[wait])
            if "all_gather" in kind:
                size = _numel(n) // width
                part = self.call(here, _aten.slice.Tensor, (whole, 1, at, at + size))
                part = self.call(here, _aten.clone.default, (part,), {"memory_format": torch.contiguous_format})
            else:
                size = _numel(n)
                part = self.call(here, _aten.slice.Tensor, (whole, 0, at, at + size))
            at += size
            part = self.call(here, _aten.view.default, (part, shape))
            wait.replace_all_uses_with(part)
        for n in (*self.waits, *self.members):
            self.graph.erase_node(n)
            del self.keys[n]

    def call(self, at: tuple[int, int], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """A new node, which stands at `at` or as soon after it as what it reads is there."""
        with self.graph.inserting_before(self.graph.output_node()):  # `_sorted` puts it where it belongs
            node = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values[0], **values[1])
        first = self.members[0]
        node.meta |= {"direction": first.meta["direction"], "op": "bucket", MARK: first.meta[MARK]}
        self.made += 1
        self.keys[node] = (at[0], self.made)
        return node

    @staticmethod
    def _width(n: fx.Node) -> int:
        out, given = _numel(n), _numel(n.all_input_nodes[0])
        return max(out, given) // min(out, given)


def _numel(n: fx.Node) -> int:
    return int(n.meta["val"].numel())


def _sorted(gm: fx.GraphModule, keys: dict[fx.Node, tuple[int, int]]) -> fx.GraphModule:
    """The nodes in the order of `keys`, but each behind what it reads."""
    missing = {n: len(n.all_input_nodes) for n in keys}
    ready = [(k, n.name, n) for n, k in keys.items() if not missing[n] and n.op != "output"]
    heapq.heapify(ready)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    while ready:
        _, _, n = heapq.heappop(ready)
        env[n] = graph.node_copy(n, env.__getitem__)
        for u in n.users:
            missing[u] -= 1
            if not missing[u] and u.op != "output":
                heapq.heappush(ready, (keys[u], u.name, u))
    graph.output(fx.map_arg(gm.graph.output_node().args[0], env.__getitem__))
    return fx.GraphModule(gm, graph)
