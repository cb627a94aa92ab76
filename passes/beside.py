"""Beside a collective of activations goes a product that it does not wait for: in backward of tensor parallelism the gradients of weights, which no collective of the layer needs.

A collective that a layer waits for (`overlap` leaves those alone) is issued where its operand is there and awaited where its result is read first. Between the two
are put, until their seconds are the collective's by the cluster's prices,

    put off    products before it that it does not need, the nearest first, with what follows from them up to there
    called up  products behind it that do not need it, with what leads to them

no further than `FAR` products away, and never beyond what would make the most memory that the half has alive at a time more: operands that a product is the last to read
live until it runs. This is the overlap of Megatron Core (`tp_comm_bulk_wgrad`, `tp_comm_bulk_dgrad`) and of Wang et al., ASPLOS '23, without a kernel of its own. The plan's time does not
count on it: it has such collectives as time that compute waits.

Requires: a half of a step, before `prefetch` and `defer`. Provides: the same nodes in another order, a pure function of the graph and the prices. Bitwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import fx

from autopar.capture.capture import Role
from autopar.capture.describe import dtype_name
from autopar.cost import Cost
from autopar.graph.calls import collective_of, is_collective, is_issue, is_wait, nbytes, storage_of, wire_bytes
from autopar.passes.overlap import AHEAD, BEHIND, MARK, calls_between, goes_before, mark, marked, reorder

FAR = 8  # products between a collective and one that goes beside it
_aten = torch.ops.aten
# Product -> the operand that is the left factor; the right one follows.
_PRODUCTS = {_aten.mm.default: 0, _aten.bmm.default: 0, _aten.addmm.default: 1, _aten.baddbmm.default: 1}


def beside(gm: fx.GraphModule, inputs: Sequence[Role | None], prefix: str, cost: Cost) -> fx.GraphModule:
    """`gm`, one half of a step, with products beside the collectives that its layers wait for. inputs: roles of the placeholders (`overlap.inputs_of`); prefix: of group
    names. What is kept away from the device has its own places in the order: a half with such transfers is left as it is."""
    gm = mark(gm, inputs)
    if any(n.meta.get(MARK) not in (None, AHEAD, BEHIND) for n in gm.graph.nodes):
        return gm
    places = _Places(gm, inputs, prefix, cost)
    if not places.find():
        return gm
    calls = sorted(places.calls, key=places.key)
    return reorder(gm, calls, _of_marked(gm, calls))


class _Places:
    """Where every call goes. key: of a call, by which they are sorted."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Role | None], prefix: str, cost: Cost) -> None:
        self.prefix, self.cost = prefix, cost
        self.calls = calls_between(gm)
        self.at = {n: i for i, n in enumerate(self.calls)}
        self.behind: dict[fx.Node, int] = {}  # call -> the collective's place that it is put beside
        self.products = [i for i, n in enumerate(self.calls) if n.target in _PRODUCTS]
        # What a call follows from, itself too, as bits by place; marked calls lead from one to another.
        self.needs: dict[fx.Node, int] = {}
        for n in gm.graph.nodes:
            bits = 1 << self.at[n] if n in self.at else 0
            for a in n.all_input_nodes:
                bits |= self.needs[a]
            self.needs[n] = bits
        self.live = _Live(gm, inputs, self.at, len(self.calls))

    def key(self, n: fx.Node) -> tuple[int, int, int]:
        i = self.at[n]
        return (i, 0, i) if n not in self.behind else (self.behind[n], 1, i)

    def find(self) -> bool:
        """Whether anything moves."""
        for c, n in enumerate(self.calls):
            if is_collective(n) and not marked(n) and any(map(is_wait, n.users)):
                self.fill(c)
        return bool(self.behind)

    def fill(self, c: int) -> None:
        issue = self.calls[c]
        kind, axes = collective_of(issue, self.prefix)
        width = self.cost.mesh.sizes_product(axes)
        left_s = self.cost.collective(kind, axes, wire_bytes(issue, width)).seconds
        if width == 1:
            return
        split = int(np.searchsorted(self.products, c))
        for i in reversed(self.products[max(0, split - FAR) : split]):
            if left_s > 0 and not self.needs[issue] >> i & 1 and self.put_off(i, c):
                left_s -= self.seconds(self.calls[i])
        for i in self.products[split : split + FAR]:
            if left_s > 0 and not self.needs[self.calls[i]] >> c & 1 and self.call_up(i, c):
                left_s -= self.seconds(self.calls[i])

    def put_off(self, i: int, c: int) -> bool:
        """Product i behind the issue of collective c, with what follows from it before that."""
        group = [n for n in self.calls[i:c] if self.needs[n] >> i & 1]
        if any(n in self.behind or is_issue(n) or is_wait(n) for n in group):
            return False
        if any(at < c and self.needs[n] >> i & 1 for n, at in self.behind.items()):  # it was called up to a place before this one
            return False
        return self.live.later(group, c) and self.take(group, c)

    def call_up(self, i: int, c: int) -> bool:
        """Product i right behind the issue of collective c, with what leads to it from there."""
        wanted = self.needs[self.calls[i]]
        group = [n for n in self.calls[c + 1 : i + 1] if wanted >> self.at[n] & 1]
        if any(n in self.behind or is_issue(n) or is_wait(n) for n in group):
            return False
        if any(at > c and wanted >> self.at[n] & 1 for n, at in self.behind.items()):  # it was put off to a place behind this one
            return False
        return self.live.earlier(group, c) and self.take(group, c)

    def take(self, group: Sequence[fx.Node], c: int) -> bool:
        self.behind |= dict.fromkeys(group, c)
        return True

    def seconds(self, n: fx.Node) -> float:
        first = _PRODUCTS[n.target]  # type: ignore[index]
        a, b = n.args[first], n.args[first + 1]
        assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
        left, right = a.meta["val"], b.meta["val"]
        flops = 2.0 * math.prod(left.shape) * right.shape[-1]
        return self.cost.kernel_s("matmul", dtype_name(left.dtype), flops, float(nbytes(n) + nbytes(a) + nbytes(b)), 1)


class _Live:
    """Bytes that are alive at every place of a half, and what moving a call makes of them. What backward's caller holds, parameters and the batch, is alive throughout."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Role | None], at: dict[fx.Node, int], count: int) -> None:
        self.last: dict[fx.Node, int] = {}  # storage -> the place of what reads it last; `count`: it is alive at the end
        self.at = at
        made: dict[fx.Node, int] = {}
        place = 0
        for n in gm.graph.nodes:
            place = max(place, at.get(n, 0))
            if n.op == "output":
                self.last |= {storage_of(a): count for a in n.all_input_nodes}
                continue
            read = [*n.all_input_nodes, *(n.args[0].all_input_nodes if is_wait(n) and isinstance(n.args[0], fx.Node) else ())]
            for a in read:
                base = storage_of(a)
                if self.last.get(base) != count:
                    self.last[base] = place
            if storage_of(n) is n:
                made[n] = place
                self.last.setdefault(n, place)
        held = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.last |= {n: count for n, role in zip(held, inputs, strict=True) if role is not None}
        self.bytes = np.zeros(count + 1)
        for n, start in made.items():
            self.bytes[start : self.last[n] + 1] += nbytes(n)
        self.most = self.bytes.max()

    def later(self, group: Sequence[fx.Node], c: int) -> bool:
        """Whether `group`, all before place c, may run right behind it; then it does."""
        mine = {n for n in group if storage_of(n) is n}
        read = {storage_of(a) for n in group for a in n.all_input_nodes} - mine
        ends = {base: self.last[base] for base in read if self.last[base] < c}
        changes = [(end + 1, c + 1, nbytes(base)) for base, end in ends.items()]
        for n in mine:  # what the group makes for itself is there all at once, at place c
            changes.append((self.at[n], min(self.last[n] + 1, c), -nbytes(n)))
            if self.last[n] < c:
                changes.append((c, c + 1, nbytes(n)))
        if not self._changed(changes):
            return False
        self.last |= dict.fromkeys([*ends, *(n for n in mine if self.last[n] < c)], c)
        return True

    def earlier(self, group: Sequence[fx.Node], c: int) -> bool:
        """Whether `group`, all behind place c, may run right behind it; then it does."""
        return self._changed([(c, self.at[n], nbytes(n)) for n in group if storage_of(n) is n])

    def _changed(self, changes: Sequence[tuple[int, int, int]]) -> bool:
        before = self.bytes.copy()
        for start, end, size in changes:
            self.bytes[start:end] += size
        if self.bytes.max() > self.most:
            self.bytes = before
            return False
        return True


def _of_marked(gm: fx.GraphModule, calls: Sequence[fx.Node]) -> dict[fx.Node, tuple[int, int, int]]:
    """Places of what is marked: what is gathered right before it is read, what is reduced right behind what makes it."""
    place = {n: i for i, n in enumerate(calls)}
    out: dict[fx.Node, tuple[int, int, int]] = {}
    for n in gm.graph.nodes:
        if marked(n) and not goes_before(n):
            out[n] = max((out[a][0] if a in out else place.get(a, 0) for a in n.all_input_nodes), default=0), 1, 0
    for n in reversed(gm.graph.nodes):
        if marked(n) and goes_before(n):
            users = [out[u][0] if u in out else place.get(u, len(calls)) for u in n.users]
            out[n] = min(users, default=len(calls)), -1, 0
    return out
