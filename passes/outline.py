"""Repeated layers, found without module names, so that Inductor lowers each distinct one once.

Every node is hashed by what it is (target, constants, shapes, strides, dtypes of result and operands). A run in which the
hash sequence equals itself shifted by p is a tandem repeat of period p: a stack of layers. The run is cut into
copies where the fewest values cross, the copies are compared wire by wire, and each equal one becomes a call of one shared
subgraph. What remains is left in place. Then everything is retraced through the late decompositions, each distinct body once.

A body never returns two tensors on one storage, nor a view of what it was given: it returns the storage's first tensor, and
the views are made outside. Otherwise the outer graph could reuse memory that is still read.

Requires: aten graph with recorded values; collectives next to their waits. Bitwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from autopar import _torch

MIN_PERIOD = 12  # nodes; shorter repeats are not layers


@dataclass(frozen=True)
class Repeat:
    """Nodes [start, start + period x count) of the call sequence are `count` copies of one body."""

    start: int
    period: int
    count: int


@dataclass
class Outlined:
    """gm: the decomposed graph; distinct: bodies that Inductor will lower; layers: calls of them."""

    gm: fx.GraphModule
    distinct: int = 0
    layers: int = 0
    bodies: dict[str, str] = field(default_factory=dict)


def outline(gm: fx.GraphModule, fake_mode: Any) -> Outlined:
    """`gm` decomposed for Inductor, with repeated stretches as calls of shared subgraphs."""
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    repeats = [r for r in find_repeats([_hash(n) for n in calls]) if r.count > 1]
    return _Rebuilder(gm, calls, repeats, fake_mode).run()


# ---- finding -----------------------------------------------------------------------------------------------------


def _hash(n: fx.Node) -> str:
    def text(x: Any) -> str:
        if isinstance(x, fx.Node):
            return _value(x)
        if isinstance(x, (list, tuple)):
            return "(" + ",".join(map(text, x)) + ")"
        if isinstance(x, dict):
            return "{" + ",".join(f"{k}:{text(v)}" for k, v in x.items()) + "}"
        return repr(x)

    return hashlib.sha256(f"{n.target}{text(n.args)}{text(n.kwargs)}{_value(n)}".encode()).hexdigest()


def _value(n: fx.Node) -> str:
    def one(v: Any) -> str:
        return f"{tuple(v.shape)}{v.stride()}{v.dtype}{v.device}" if isinstance(v, torch.Tensor) else repr(v)

    val = n.meta.get("val")
    return "|".join(map(one, val)) if isinstance(val, (list, tuple)) else one(val)


def find_repeats(hashes: Sequence[str]) -> list[Repeat]:
    """Disjoint tandem repeats, in order; each covers the most nodes in its stretch."""
    ids: dict[str, int] = {}
    sequence = np.array([ids.setdefault(h, len(ids)) for h in hashes])
    return list(_search(sequence, 0, len(sequence)))


def _search(sequence: Any, lo: int, hi: int) -> Iterator[Repeat]:
    best: Repeat | None = None
    a = sequence[lo:hi]
    for period in range(MIN_PERIOD, (hi - lo) // 2 + 1):
        equal = np.concatenate(([False], a[:-period] == a[period:], [False]))
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        if not len(edges):
            continue
        starts, ends = edges[::2], edges[1::2]
        i = int(np.argmax(ends - starts))
        run = int(ends[i] - starts[i])
        saved = run // period * period
        if saved and (best is None or saved > best.period * (best.count - 1)):
            best = Repeat(lo + int(starts[i]), period, run // period + 1)
    if best is None:
        return
    yield from _search(sequence, lo, best.start)
    yield best
    yield from _search(sequence, best.start + best.period * best.count, hi)


# ---- rebuilding --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Slot:
    """What a body returns for one of its nodes: output `index` as it is, or a view of an output or input's storage."""

    kind: str  # "output" | "input"
    index: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None


@dataclass(frozen=True)
class _Body:
    name: str
    gm: fx.GraphModule
    slots: dict[int, _Slot]  # position of a node in the segment -> where to find it


class _Rebuilder:
    def __init__(self, gm: fx.GraphModule, calls: list[fx.Node], repeats: list[Repeat], mode: Any) -> None:
        self.gm, self.calls, self.mode = gm, calls, mode
        self.position = {n: i for i, n in enumerate(calls)}
        self.repeats = [self.align(r) for r in repeats]
        self.out = fx.Graph()
        self.root = torch.nn.Module()
        self.env: dict[fx.Node, Any] = {}
        self.bodies: dict[str, _Body] = {}
        self.layers = 0

    def align(self, r: Repeat) -> Repeat:
        """The same repeat cut where the fewest values cross and no tuple does; one copy less if that needs room."""
        last = {n: max((self.position.get(u, len(self.calls)) for u in n.users), default=i) for n, i in self.position.items()}

        def crossing(cut: int) -> float:
            live = [n for n in self.calls[max(0, cut - 2 * r.period) : cut] if last[n] >= cut]
            near = [n for n in live if last[n] < cut + r.period]
            return float("inf") if any(isinstance(n.meta["val"], (list, tuple)) for n in live) else len(near)

        whole = range(r.start, r.start + 1)
        end = r.start + r.period * r.count
        best = min([*whole, *range(r.start + 1, r.start + r.period)], key=lambda c: (crossing(c), c))
        count = (end - best) // r.period
        return Repeat(best, r.period, count)

    def run(self) -> Outlined:
        for n in self.gm.graph.nodes:
            if n.op == "placeholder":
                new = self.out.placeholder(n.name)
                new.meta["val"] = _torch.fresh_fake(n.meta["val"], self.mode)
                self.env[n] = new
            elif n.op == "get_attr":
                self.env[n] = self.attribute(str(n.target), _torch.get_attribute(self.gm, str(n.target)), n)
        at = 0
        for r in self.repeats:
            self.inline(self.calls[at : r.start])
            for k in range(r.count):
                self.segment(r, k)
            at = r.start + r.period * r.count
        self.inline(self.calls[at:])
        results = self.gm.graph.output_node().args[0]
        self.out.output(tuple(self.env[n] if isinstance(n, fx.Node) else n for n in results))
        gm = fx.GraphModule(self.root, self.out)
        _torch.drop_dead_code(gm)
        gm.graph.lint()
        return Outlined(gm, len(self.bodies), self.layers, {b.name: b.name for b in self.bodies.values()})

    def attribute(self, name: str, value: Any, like: fx.Node | None = None) -> fx.Node:
        flat = name.replace(".", "_")
        if not hasattr(self.root, flat):
            if isinstance(value, torch.nn.Module):
                self.root.add_module(flat, value)
            else:
                self.root.register_buffer(flat, value)
        node = self.out.get_attr(flat)
        if like is not None:
            node.meta["val"] = _torch.fresh_fake(like.meta["val"], self.mode)
        return node

    def inline(self, nodes: list[fx.Node]) -> None:
        """Copies `nodes` through the decompositions."""
        if not nodes:
            return
        inputs, outputs = self.interface(nodes)
        traced = self.decompose(nodes, inputs, outputs)
        inner: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for n in traced.graph.nodes:
            if n.op == "placeholder":
                inner[n] = self.env[next(given)]
            elif n.op == "output":
                for source, new in zip(outputs, n.args[0], strict=True):
                    self.env[source] = inner[new]
            elif n.op == "get_attr":
                value = _torch.get_attribute(traced, str(n.target))
                name = f"constant_{hashlib.sha256(repr(value).encode()).hexdigest()[:12]}"
                inner[n] = self.attribute(name, value, n if "val" in n.meta else None)
            else:
                inner[n] = self.out.node_copy(n, inner.__getitem__)
                inner[n].meta = dict(n.meta)

    def interface(self, nodes: list[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """What a stretch reads of outside, in order of first use, and which of its nodes are used outside."""
        inside = set(nodes)
        inputs = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
        outputs = [n for n in nodes if any(u not in inside for u in n.users)]
        return inputs, outputs

    def decompose(self, nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> fx.GraphModule:
        """The stretch as a graph of its own, retraced through the late decompositions on the values it will really get."""
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for i, n in enumerate(inputs):
            env[n] = graph.placeholder(f"in_{i}")
        for n in nodes:
            env[n] = graph.node_copy(n, env.__getitem__)
        graph.output(tuple(env[n] for n in outputs))
        piece = fx.GraphModule(self.gm, graph)
        return _torch.decompose_late(piece, [self.env[n].meta["val"] for n in inputs], self.mode)

    # ---- copies of a body --------------------------------------------------------------------------------------

    def wiring(self, nodes: list[fx.Node], inputs: list[fx.Node]) -> str:
        """The text of a segment: every node with operands by position, and the real layout of what comes in."""
        names = {n: f"i{k}" for k, n in enumerate(inputs)} | {n: f"n{k}" for k, n in enumerate(nodes)}

        def text(x: Any) -> str:
            if isinstance(x, fx.Node):
                return names[x]
            if isinstance(x, (list, tuple)):
                return "(" + ",".join(map(text, x)) + ")"
            if isinstance(x, dict):
                return "{" + ",".join(f"{k}:{text(v)}" for k, v in x.items()) + "}"
            return repr(x)

        lines = [f"{n.target}{text(n.args)}{text(n.kwargs)}" for n in nodes]
        return "\n".join([_value(self.env[n]) for n in inputs] + lines)

    def segment(self, r: Repeat, k: int) -> None:
        nodes = self.calls[r.start + k * r.period : r.start + (k + 1) * r.period]
        inputs, _ = self.interface(nodes)
        wanted = self.wanted(r)
        key = hashlib.sha256((self.wiring(nodes, inputs) + repr(wanted)).encode()).hexdigest()
        if key not in self.bodies:
            self.bodies[key] = self.body(key, nodes, inputs, wanted)
        body = self.bodies[key]
        self.layers += 1
        attr = self.attribute(body.name, body.gm)
        args = [self.env[n] for n in inputs]
        call = self.out.call_function(_torch.invoke_subgraph(), (attr, body.name, *args), {})
        results = body.gm.graph.output_node().args[0]
        call.meta["val"] = tuple(m.meta["val"] for m in results)
        made: dict[int, fx.Node] = {}
        for i, slot in body.slots.items():
            if slot.kind == "input":
                base = args[slot.index]
            else:
                if slot.index not in made:
                    made[slot.index] = self.out.call_function(_torch.getitem, (call, slot.index), {})
                    made[slot.index].meta["val"] = _torch.fresh_fake(call.meta["val"][slot.index], self.mode)
                base = made[slot.index]
            node = base
            if slot.view is not None:
                node = self.out.call_function(torch.ops.aten.as_strided.default, (base, *map(_listed, slot.view)), {})
                with self.mode:
                    node.meta["val"] = torch.as_strided(base.meta["val"], *slot.view)
            self.env[nodes[i]] = node

    def wanted(self, r: Repeat) -> tuple[int, ...]:
        """Positions whose values any copy gives to the outside: all copies return the same."""
        out = set()
        for k in range(r.count):
            nodes = self.calls[r.start + k * r.period : r.start + (k + 1) * r.period]
            inside = set(nodes)
            out |= {i for i, n in enumerate(nodes) if any(u not in inside for u in n.users)}
        return tuple(sorted(out))

    def body(self, key: str, nodes: list[fx.Node], inputs: list[fx.Node], wanted: tuple[int, ...]) -> _Body:
        traced = self.decompose(nodes, inputs, [nodes[i] for i in wanted])
        places = [n for n in traced.graph.nodes if n.op == "placeholder"]
        results = list(traced.graph.output_node().args[0])
        owners = {_torch.storage_of(p.meta["val"]): ("input", i, p.meta["val"]) for i, p in enumerate(places)}
        kept: list[fx.Node] = []
        slots: dict[int, _Slot] = {}
        for i, m in zip(wanted, results, strict=True):
            v = m.meta["val"]
            owner = owners.get(_torch.storage_of(v))
            if owner is None:
                slots[i] = _Slot("output", len(kept), None)
                owners[_torch.storage_of(v)] = ("output", len(kept), v)
                kept.append(m)
            else:
                kind, index, base = owner
                same = (v.shape, v.stride(), v.storage_offset()) == (base.shape, base.stride(), base.storage_offset())
                view = None if same else (tuple(v.shape), tuple(v.stride()), int(v.storage_offset()))
                slots[i] = _Slot(kind, index, view)
        traced.graph.output_node().args = (tuple(kept),)
        traced.graph.eliminate_dead_code()
        _torch.drop_dead_code(traced)
        traced.recompile()
        return _Body(f"layer_{key[:16]}", traced, slots)


def _listed(x: Any) -> Any:
    return list(x) if isinstance(x, tuple) else x
