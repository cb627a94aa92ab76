"""Saved values that backward's kernels make themselves of what they read anyway.

A plan says what is kept, and where memory is short that little is. A compiler makes one kernel of memory-bound neighbours; in it a cast, a gate or a probability is made again of
its operands for nothing, and need be neither written in forward, nor kept, nor read (torch's min-cut partitioner counts on that). So where the graph is compiled, a value that
the plan saves is made again if

    it, and what it is made of down to what is saved or given, are cheap, fusible calls, and nothing but such calls reads it in backward
    its kernels then read less: what they would have to read in its place, and do not read yet, is smaller than it is; or no larger, if forward writes that
        anyway, and this for backward alone
    backward never holds more: what is saved in its place, or lives longer for it, is no larger than it is

What is made of nothing that is saved yet (logits in single precision, of a product in half precision) is replaced by what it is made of. Products, attention, collectives, random
numbers, what users want saved and what is kept away from the device stay as planned. So what runs again in the plan, and what the plan's memory is, holds.

Requires: meta["direction"]. Bitwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.capture.capture import Role
from autopar.capture.describe import describe_calls, describe_node, dtype_name, tensor_name
from autopar.cost.fusion import fused, is_fusible
from autopar.graph.calls import OFFLOADED, is_issue, is_wait, nbytes, shares_storage, storage_of
from autopar.graph.graph import Tensor
from autopar.rules import lookup

LONGEST = 32  # calls that one value may be made again of
LEAST_BYTES = 4096  # of a value that is looked at


@dataclass
class _Way:
    """How a value is made again: the calls; what is saved already of which they are made; what is not."""

    calls: set[fx.Node]
    saved: set[fx.Node]
    unsaved: set[fx.Node]


@dataclass
class FusedRecompute:
    """Finds forward calls to be made again besides `recomputed`. results: of forward, to who called; saved: what backward reads of forward; pinned: operators whose
    results users want saved."""

    nodes: Sequence[fx.Node]
    role_of: Mapping[fx.Node, Role]
    results: Sequence[Any]
    saved: Set[fx.Node]
    recomputed: Set[fx.Node]
    pinned: Set[str]

    def __post_init__(self) -> None:
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.added = set[fx.Node]()
        self.known: dict[fx.Node, bool] = {}
        self.written = _written([n for n in self.nodes if n.op != "call_function" or n.meta["direction"] == "forward"], self.results)

    def run(self) -> set[fx.Node]:
        made: dict[fx.Node, list[fx.Node]] = {}
        for n in sorted(self.saved, key=self.order.__getitem__):
            made.setdefault(_maker(n), []).append(n)
        for maker, mine in made.items():
            way = self.way(maker, mine)
            if way is not None:
                self.saved = set(self.saved) - set(mine) | way.unsaved
                self.added |= way.calls
        return self.added

    def way(self, maker: fx.Node, mine: list[fx.Node]) -> _Way | None:
        size = sum(nbytes(n) for n in {storage_of(n) for n in mine})
        if not self.is_free(maker) or size < LEAST_BYTES or any(OFFLOADED in n.meta for n in (maker, *mine)):
            return None
        readers = list(self.readers(maker))
        # Where what the plan makes again reads it, it is not known when that will be.
        if not readers or not all(self.is_cheap(r) and r.meta["direction"] == "backward" for r in readers):
            return None
        way = self.made_of(mine)
        if way is None:
            return None
        first = min(self.order[r] for r in readers)
        instead = sum(nbytes(n) for n in {storage_of(n) for n in way.unsaved})
        unread, longer = 0, 0
        for n in {storage_of(n) for n in way.saved}:
            reads = [r for r in self.readers(_maker(n)) if r.op != "output" and r.meta["direction"] == "backward"]
            unread += 0 if any(self.is_cheap(r) for r in reads) else nbytes(n)
            longer += 0 if any(self.order[r] >= first for r in reads) else nbytes(n)
        # At equal size, what is written for backward alone gives way to what is written anyway.
        gains = instead + unread < size or (instead + unread == size and maker not in self.written and way.unsaved <= self.written)
        return way if gains and instead + longer <= size else None

    def made_of(self, mine: list[fx.Node]) -> _Way | None:
        way = _Way(set(), set(), set())
        todo = list(mine)
        while todo:
            n = todo.pop()
            if n in way.calls:
                continue
            way.calls.add(n)
            if len(way.calls) > LONGEST:
                return None
            for a in n.all_input_nodes:
                if a in self.saved and a not in mine:
                    if OFFLOADED in a.meta:
                        return None
                    way.saved.add(a)
                elif a.op == "placeholder":
                    if self.role_of[a].kind in ("input", "buffer", "seed"):
                        return None
                elif a.op == "get_attr" or self.is_free(a) or self.is_part(a):
                    todo.append(a)
                elif a in self.recomputed or is_issue(a) or is_wait(a) or OFFLOADED in a.meta or isinstance(a.meta["val"], (list, tuple)):
                    return None
                else:
                    way.unsaved.add(a)
        way.calls = {n for n in way.calls if n.op == "call_function"}
        return way

    def readers(self, maker: fx.Node) -> Iterator[fx.Node]:
        """What reads it in backward or is made again there, through views and parts of tuples."""
        todo, seen = [maker], {maker}
        while todo:
            for user in todo.pop().users:
                if user in seen:
                    continue
                seen.add(user)
                if self.is_part(user):
                    todo.append(user)
                elif user.op == "output" or user.meta["direction"] == "backward" or user in self.recomputed or user in self.added:
                    yield user

    def is_part(self, n: fx.Node) -> bool:
        return not is_wait(n) and shares_storage(n) is not None

    def is_free(self, n: fx.Node) -> bool:
        """Whether it may be made again at all, where that is free."""
        return self.is_cheap(n) and n.meta["direction"] == "forward" and n.meta.get("op") not in self.pinned and not n.meta.get("random")

    def is_cheap(self, n: fx.Node) -> bool:
        if n not in self.known:
            self.known[n] = n.op == "call_function" and not is_issue(n) and not is_wait(n) and _is_fusible(n)
        return self.known[n]


def _written(nodes: Sequence[fx.Node], results: Sequence[Any]) -> set[fx.Node]:
    """What forward's kernels write though nothing is kept."""
    graph, calls = describe_calls(nodes, results)
    shares = fused(graph, {op.name: lookup(op) for op in graph.ops})
    return {n for name, n in calls.items() if name not in shares or shares[name].writes}


def _is_fusible(n: fx.Node) -> bool:
    tensors = {}
    for a in n.all_input_nodes:
        val = a.meta["val"]
        if not hasattr(val, "dtype"):
            return False
        tensors[tensor_name(a)] = Tensor(tensor_name(a), tuple(val.shape), dtype_name(val.dtype))
    op = describe_node(n, tensors)
    rule = lookup(op)
    return is_fusible(op, rule) and rule.kind != "random"


def _maker(n: fx.Node) -> fx.Node:
    """The call that made its memory."""
    while not is_wait(n) and (base := shares_storage(n)) is not None:
        n = base
    return n
