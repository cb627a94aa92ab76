"""Repeated layers become calls of one shared subgraph, so that Inductor lowers each distinct one once.

The copies of a repeat (see `repeats`) are compared wire by wire; those that are equal become calls of one body, the others
are left in place. Everything is retraced through the late decompositions, each distinct body once.

Counters. Random ops differ between layers in one integer, the op's number, added to a key. Where copies differ in an integer that is added
to an int64 tensor, the integer becomes a 0-d operand of the body. It is integer arithmetic, so still bitwise.

Storage. A body returns every storage it makes once, as the tensor that made it, and nothing of what it was given; views of either are
made again outside, by the ops that made them inside. Otherwise the outer graph could reuse memory that is still read.

Collectives ahead of or behind the layers' computation (`overlap.marked`) belong to no body: Inductor keeps what a collective reads for a wait
in the same graph only. They are issued and awaited in the outer graph, between two bodies; those that stand inside of one go before it (gathers
of parameters) or behind it (reductions of gradients).

Requires: aten graph with recorded values. Bitwise.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar.passes.constant_scatters import constant_scatters
from autopar.passes.demands import guard
from autopar.passes.overlap import goes_before, marked
from autopar.passes.repeats import Cuts, Repeat, adds_integer, call_hash, find_repeats, text, value_text


@dataclass(frozen=True)
class Outlined:
    """gm: the decomposed graph; distinct: bodies that Inductor will lower; layers: calls of them."""

    gm: fx.GraphModule
    distinct: int
    layers: int


def outline(gm: fx.GraphModule, fake_mode: Any) -> Outlined:
    """`gm` decomposed for Inductor, with repeated stretches as calls of shared subgraphs."""
    gm = _getitems_first(gm)
    calls = _calls(gm)
    cuts = Cuts(calls)
    repeats = [c for r in find_repeats([call_hash(n) for n in calls]) if (c := cuts.best(r)) is not None]
    calls, repeats = _counters_as_operands(gm, calls, repeats, fake_mode)
    return _Rebuilder(gm, calls, repeats, fake_mode).run()


def _calls(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and not marked(n)]


def _getitems_first(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of `gm` in which a tuple is taken apart right where it is made, so that none needs to cross a cut."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}

    def add(n: fx.Node) -> None:
        if n not in env:
            env[n] = graph.node_copy(n, env.__getitem__)
            for u in n.users if isinstance(n.meta.get("val"), (list, tuple)) else ():
                if _torch.is_getitem(u):
                    add(u)

    for n in gm.graph.nodes:
        add(n)
    return fx.GraphModule(gm, graph)


# ---- counters ----------------------------------------------------------------------------------------------------


def _counters_as_operands(gm: fx.GraphModule, calls: list[fx.Node], repeats: list[Repeat], mode: Any) -> tuple[list[fx.Node], list[Repeat]]:
    """Integers in which the copies of a repeat differ, as 0-d tensors made before it."""
    firsts = [calls[r.start] for r in repeats]
    for r, first in zip(repeats, firsts, strict=True):
        for column in zip(*r.copies(calls), strict=True):
            if not adds_integer(column[0]) or len({n.args[1] for n in column}) == 1:
                continue
            for n in column:
                like = n.args[0].meta["val"]
                with gm.graph.inserting_before(first):
                    counter = gm.graph.call_function(
                        torch.ops.aten.full.default, ([], n.args[1]), {"dtype": torch.int64, "device": like.device}
                    )
                with mode:
                    counter.meta["val"] = torch.empty((), dtype=torch.int64, device=like.device)
                n.args = (n.args[0], counter)
    calls = _calls(gm)
    position = {n: i for i, n in enumerate(calls)}
    return calls, [Repeat(position[f], r.period, r.count) for r, f in zip(repeats, firsts, strict=True)]


# ---- rebuilding --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Body:
    """gm: what Inductor lowers. roots: ("input" | "output", index) of every storage that `views`, a graph over them, looks at.

    wanted: positions in the segment of the nodes that `views` returns.
    """

    name: str
    gm: fx.GraphModule
    roots: tuple[tuple[str, int], ...]
    views: fx.Graph
    wanted: tuple[int, ...]


class _Rebuilder:
    def __init__(self, gm: fx.GraphModule, calls: list[fx.Node], repeats: list[Repeat], mode: Any) -> None:
        self.gm, self.calls, self.repeats, self.mode = gm, calls, repeats, mode
        self.between = _between(gm, calls, repeats)
        self.out = fx.Graph()
        self.root = torch.nn.Module()
        self.env: dict[fx.Node, Any] = {}
        self.bodies: dict[str, _Body] = {}
        self.layers = 0

    def run(self) -> Outlined:
        for n in self.gm.graph.nodes:
            if n.op == "placeholder":
                new = self.out.placeholder(n.name)
                new.meta["val"] = _torch.fresh_fake(n.meta["val"], self.mode)
                self.env[n] = new
            elif n.op == "get_attr":
                self.env[n] = self.attribute(str(n.target), _torch.get_attribute(self.gm, str(n.target)), n)
        pending: list[fx.Node] = []
        at = 0
        for r in self.repeats:
            pending += self.stretch(at, r.start)
            copies = r.copies(self.calls)
            wanted = _wanted(copies)
            texts = [self.wiring(c, lambda n: n) for c in copies]
            times = Counter(texts)
            for k, (nodes, wires) in enumerate(zip(copies, texts, strict=True)):
                pending += self.between.get(r.start + k * r.period, [])
                if times[wires] == 1:
                    pending += nodes
                    continue
                self.inline(pending)
                pending = []
                self.segment(nodes, wanted)
            at = r.start + r.period * r.count
        self.inline(pending + self.stretch(at, len(self.calls)) + self.between.get(len(self.calls), []))
        results = _torch.results_of(self.gm.graph)
        self.out.output(tuple(self.env[n] if isinstance(n, fx.Node) else n for n in results))
        gm = fx.GraphModule(self.root, self.out)
        _torch.drop_dead_code(gm)
        gm.graph.lint()
        return Outlined(gm, len(self.bodies), self.layers)

    def stretch(self, start: int, end: int) -> list[fx.Node]:
        """Calls [start, end) with the collectives that stand before each."""
        return [n for i in range(start, end) for n in [*self.between.get(i, []), self.calls[i]]]

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
        inputs, outputs = _interface(nodes)
        # On the very values of the graph so far: its views keep sharing their storage, which Inductor's passes go by.
        traced = self.decompose(nodes, inputs, outputs, [self.env[n].meta["val"] for n in inputs])
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

    def decompose(self, nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node], values: list[Any]) -> fx.GraphModule:
        """The stretch as a graph of its own, retraced through the late decompositions on the values it will really get."""
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for i, n in enumerate(inputs):
            env[n] = graph.placeholder(f"in_{i}")
        for n in nodes:
            env[n] = graph.node_copy(n, env.__getitem__)
        graph.output(tuple(env[n] for n in outputs))
        guard(graph)
        return constant_scatters(_torch.decompose_late(fx.GraphModule(self.gm, graph), values, self.mode), self.mode)

    # ---- copies of a body --------------------------------------------------------------------------------------

    def wiring(self, nodes: list[fx.Node], real: Callable[[fx.Node], fx.Node]) -> str:
        """The text of a segment: every node with operands by position, and the layout of what comes in, recorded at `real(input)`."""
        inputs, _ = _interface(nodes)
        names = {n: f"i{k}" for k, n in enumerate(inputs)} | {n: f"n{k}" for k, n in enumerate(nodes)}
        lines = [f"{n.target}{text(n.args, names.__getitem__)}{text(n.kwargs, names.__getitem__)}" for n in nodes]
        return "\n".join([value_text(real(n)) for n in inputs] + lines)

    def segment(self, nodes: list[fx.Node], wanted: tuple[int, ...]) -> None:
        """A call of the body that equals `nodes`."""
        inputs, _ = _interface(nodes)
        key = hashlib.sha256((self.wiring(nodes, self.env.__getitem__) + repr(wanted)).encode()).hexdigest()
        args = [self.env[n] for n in inputs]
        if key not in self.bodies:
            fresh = [_torch.fresh_fake(a.meta["val"], self.mode) for a in args]
            self.bodies[key] = _body(key, self.decompose(nodes, inputs, [nodes[i] for i in wanted], fresh), wanted)
        body = self.bodies[key]
        self.layers += 1
        call = self.out.call_function(_torch.invoke_subgraph(), (self.attribute(body.name, body.gm), body.name, *args), {})
        results = _torch.results_of(body.gm.graph)
        call.meta["val"] = tuple(_torch.fresh_fake(m.meta["val"], self.mode) for m in results)
        made: dict[int, fx.Node] = {}
        bases = iter(body.roots)
        inner: dict[fx.Node, fx.Node] = {}
        for v in body.views.nodes:
            if v.op == "placeholder":
                kind, index = next(bases)
                if kind == "output" and index not in made:
                    made[index] = self.out.call_function(_torch.getitem, (call, index), {})
                    made[index].meta["val"] = call.meta["val"][index]
                inner[v] = args[index] if kind == "input" else made[index]
            elif v.op == "output":
                for i, m in zip(body.wanted, v.args[0], strict=True):
                    self.env[nodes[i]] = inner[m]
            else:
                new = self.out.node_copy(v, inner.__getitem__)
                values, named = fx.map_arg((new.args, new.kwargs), lambda a: a.meta["val"])
                assert callable(new.target)
                with self.mode:
                    new.meta = {"val": new.target(*values, **named)}
                inner[v] = new


def _between(gm: fx.GraphModule, calls: list[fx.Node], repeats: list[Repeat]) -> dict[int, list[fx.Node]]:
    """The nodes that belong to no body, by the call that they go before."""
    position = {n: i for i, n in enumerate(calls)}
    out: dict[int, list[fx.Node]] = {}
    at = 0
    for n in gm.graph.nodes:
        if n in position:
            at = position[n] + 1
        elif n.op == "call_function":
            to = at
            for r in repeats:
                inside = (at - r.start) % r.period
                if r.start <= at < r.start + r.period * r.count and inside:
                    to = at - inside + (0 if goes_before(n) else r.period)
            out.setdefault(to, []).append(n)
    return out


def _interface(nodes: list[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """What a stretch reads of outside, in order of first use, and which of its nodes are used outside."""
    inside = set(nodes)
    inputs = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
    outputs = [n for n in nodes if any(u not in inside for u in n.users)]
    return inputs, outputs


def _wanted(copies: list[list[fx.Node]]) -> tuple[int, ...]:
    """Positions whose values any copy gives to the outside: all copies return the same."""
    out: set[int] = set()
    for nodes in copies:
        inside = set(nodes)
        out |= {i for i, n in enumerate(nodes) if any(u not in inside for u in n.users)}
    return tuple(sorted(out))


def _body(key: str, traced: fx.GraphModule, wanted: tuple[int, ...]) -> _Body:
    """`traced` cut down to the storages it makes, and the views of them and of its inputs."""
    places = {n: i for i, n in enumerate(n for n in traced.graph.nodes if n.op == "placeholder")}
    owner: dict[int, fx.Node] = {}
    for n in traced.graph.nodes:
        if isinstance(n.meta.get("val"), torch.Tensor):
            owner.setdefault(_torch.storage_of(n.meta["val"]), n)
    views = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    roots: list[tuple[str, int]] = []
    kept: list[fx.Node] = []

    def visit(n: fx.Node) -> None:
        if n in env:
            return
        if n in places or (isinstance(n.meta["val"], torch.Tensor) and owner[_torch.storage_of(n.meta["val"])] is n):
            env[n] = views.placeholder(f"root_{len(roots)}")
            roots.append(("input", places[n]) if n in places else ("output", len(kept)))
            if n not in places:
                kept.append(n)
            return
        for a in n.all_input_nodes:
            visit(a)
        env[n] = views.node_copy(n, env.__getitem__)

    results = _torch.results_of(traced.graph)
    for m in results:
        visit(m)
    views.output(tuple(env[m] for m in results))
    traced.graph.output_node().args = (tuple(kept),)
    _torch.drop_dead_code(traced)
    traced.recompile()
    return _Body(f"layer_{key[:16]}", traced, tuple(roots), views, wanted)
