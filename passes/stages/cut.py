"""The stages of a rewritten joint graph: for each one a joint graph of its own.

Forward values go from stage to stage towards the last, gradients (and whatever backward of an earlier stage reads of a later one) towards the first, each handed on by the stages between.
So a stage's graph has, besides the whole's inputs and results that are its own, the roles

    received, sent              values of forward: from the stage before, to the one behind
    received_grad, sent_grad    values of backward: from the stage behind, to the one before

each by its place among those of this cut, which is the same on every rank and whatever becomes of gradients. What follows from inputs, constants, counters of random numbers, or is a view, a cast or a
gathered shard of a parameter has no stage: it is made in every graph that reads it, and never sent.

Requires: meta["op"] and meta["direction"], a parameter for each stage that reads it (`separate.py`). Provides: graphs that `partition` and all behind it take. Bitwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar.capture.capture import Role
from autopar.graph.calls import is_issue, is_wait
from autopar.passes.ancestors import ancestors
from autopar.passes.recompute import counters
from autopar.passes.shard import Sharded
from autopar.passes.stages.separate import stage_of

aten = torch.ops.aten
_MOVES = {
    aten.t.default, aten.transpose.int, aten.view.default, aten.permute.default, aten.detach.default, aten.alias.default, aten.unsqueeze.default, aten.expand.default,
    aten.slice.Tensor, aten.squeeze.dim, aten.squeeze.default, aten._to_copy.default, aten.reshape.default, aten._unsafe_view.default, aten.select.int, aten.narrow.default,
    aten.index_select.default, aten.clone.default, aten.constant_pad_nd.default, aten.cat.default,
}  # fmt: skip
_DRAWN = ("param", "buffer", "input", "whole", "coordinate", "seed")
_BACKWARD = ("grad", "input_grad", "sent_grad")


@dataclass(frozen=True)
class Crossing:
    """A value that is handed from one stage to its neighbour. name: in the whole graph."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Stages:
    """graphs: one a stage. forward: for every stage what it receives of the one before; backward: of the one behind. outputs: the stage of every result that is no gradient."""

    graphs: tuple[Sharded, ...]
    forward: tuple[tuple[Crossing, ...], ...]
    backward: tuple[tuple[Crossing, ...], ...]
    outputs: Mapping[Role, int]


def cut(sharded: Sharded, stages: Mapping[str, int], number: int, holders: Mapping[str, tuple[int, ...]]) -> Stages:
    """stages: of the captured operators that have one; holders: the stages that read each parameter of the model (`separate.py`)."""
    return _Cutter(sharded, stages, number, holders).run()


class _Cutter:
    def __init__(self, sharded: Sharded, stages: Mapping[str, int], number: int, holders: Mapping[str, tuple[int, ...]]) -> None:
        self.sharded, self.number, self.holders = sharded, number, holders
        self.nodes = [n for n in sharded.gm.graph.nodes if n.op != "output"]
        places = [n for n in self.nodes if n.op == "placeholder"]
        self.role_of = dict(zip(places, sharded.inputs, strict=True))
        self.results = list(zip(sharded.outputs, _torch.results_of(sharded.gm.graph), strict=True))
        self.free = self.free_nodes(stages)
        self.stage = self.placed(stages)
        # For each stage, by node so that the order is one on every rank.
        self.received: list[dict[fx.Node, None]] = [{} for _ in range(number)]
        self.received_grads: list[dict[fx.Node, None]] = [{} for _ in range(number)]

    def run(self) -> Stages:
        outputs = {r: self.of_result(n) for r, n in self.results if r.kind not in _BACKWARD}
        self.cross()
        graphs = tuple(self.graph(t) for t in range(self.number))
        return Stages(graphs, tuple(map(_crossings, self.received)), tuple(map(_crossings, self.received_grads)), outputs)

    # ---- which stage ---------------------------------------------------------------------------------------------

    def free_nodes(self, stages: Mapping[str, int]) -> set[fx.Node]:
        free = {n for n in self.nodes if n.op == "get_attr" or (n.op == "placeholder" and self.role_of[n].kind in _DRAWN)}
        drawn = counters(self.nodes, self.role_of)
        for n in self.nodes:
            if n.op != "call_function" or not all(a in free for a in n.all_input_nodes):
                continue
            moves = n.target in _MOVES or is_issue(n) or is_wait(n) or _torch.is_getitem(n)
            if n in drawn or moves or (n.meta.get("op") not in stages and n.meta.get("op") is not None):
                free.add(n)
        return free

    def placed(self, stages: Mapping[str, int]) -> dict[fx.Node, int]:
        """A node is on the stage of its operator; what brings a gradient to its parameter's storage, and the like, where what it reads is."""
        stage: dict[fx.Node, int] = {}
        for n in self.nodes:
            if n.op != "call_function" or n in self.free:
                continue
            backward = n.meta["direction"] == "backward"
            known = [stage[a] for a in n.all_input_nodes if a in stage and (a.meta["direction"] == "backward") == backward]
            mine = stages.get(n.meta.get("op", ""))
            if mine is not None:
                known.append(mine)
            if not known:
                known = [stage[a] for a in n.all_input_nodes if a in stage] or [self.number - 1 if backward else 0]
            stage[n] = min(known) if backward else max(known)
        return stage

    def of_result(self, n: Any) -> int:
        """What has no stage is made on the last one, or where the parameter is that it follows from."""
        if n in self.stage or not isinstance(n, fx.Node):
            return self.stage.get(n, self.number - 1)
        params = [self.role_of[a].name for a in ancestors([n]) if a in self.role_of and self.role_of[a].kind == "param"]
        return min((stage_of(p, self.holders) for p in params), default=self.number - 1)

    # ---- what crosses --------------------------------------------------------------------------------------------

    def cross(self) -> None:
        """Each value goes as far as it is read, through every stage between."""
        readers: dict[fx.Node, list[tuple[bool, int]]] = {n: [] for n in self.stage}

        def reads(n: fx.Node, backward: bool, stage: int) -> None:
            """Free operators read for those that read them; they read nothing that has a stage."""
            if n in readers:
                readers[n].append((backward, stage))

        for n, s in self.stage.items():
            for a in n.all_input_nodes:
                reads(a, n.meta["direction"] == "backward", s)
        for n in self.nodes:
            if n not in self.stage:
                continue
            s, backward = self.stage[n], n.meta["direction"] == "backward"
            if not backward:
                for t in range(s, max([t for _, t in readers[n]] + [s])):
                    self.received[t + 1][n] = None
            for t in range(s, min([t for behind, t in readers[n] if behind] + [s]), -1):
                self.received_grads[t - 1][n] = None

    # ---- the graphs ----------------------------------------------------------------------------------------------

    def graph(self, t: int) -> Sharded:
        received, grads = self.received[t], self.received_grads[t]
        sent = self.received[t + 1] if t + 1 < self.number else {}
        sent_grads = self.received_grads[t - 1] if t else {}
        mine = [(r, n) for r, n in self.results if self.is_mine(r, n, t)]
        results = [(r, n) for r, n in mine if r.kind not in _BACKWARD]
        results += [(Role("sent", "", i), n) for i, n in enumerate(sent)]
        results += [(r, n) for r, n in mine if r.kind in _BACKWARD]
        results += [(Role("sent_grad", "", i), n) for i, n in enumerate(sent_grads)]
        given = {**received, **grads}
        needed = ancestors([n for _, n in results if isinstance(n, fx.Node)], given)
        graph, env, roles = fx.Graph(), dict[fx.Node, fx.Node](), list[Role]()

        def place(n: fx.Node, role: Role, direction: str) -> None:
            env[n] = graph.placeholder(n.name)
            env[n].meta = {"val": n.meta["val"], "direction": direction}
            roles.append(role)

        for n in self.nodes:
            if n.op == "placeholder" and n in needed:
                env[n] = graph.node_copy(n)
                env[n].meta = dict(n.meta)
                roles.append(self.role_of[n])
        for i, n in enumerate(received):
            place(n, Role("received", "", i), "forward")
        for i, n in enumerate(grads):
            place(n, Role("received_grad", "", i), "backward")
        for n in self.nodes:
            if n in needed and n not in env:
                assert n in self.free or self.stage[n] == t, f"stage {t} makes {n.name}, which is on stage {self.stage.get(n)}"
                env[n] = graph.node_copy(n, env.__getitem__)
                env[n].meta = dict(n.meta)
        graph.output(tuple(env[n] if isinstance(n, fx.Node) else None for _, n in results))
        gm = fx.GraphModule(self.sharded.gm, graph)
        gm.graph.lint()
        return replace(self.sharded, gm=gm, inputs=tuple(roles), outputs=tuple(r for r, _ in results))

    def is_mine(self, role: Role, n: Any, t: int) -> bool:
        if role.kind in ("grad", "input_grad"):
            there = stage_of(role.name, self.holders) if role.kind == "grad" else self.number - 1
            return isinstance(n, fx.Node) and self.stage.get(n, there) == t
        return self.of_result(n) == t


def _crossings(nodes: Iterable[fx.Node]) -> tuple[Crossing, ...]:
    return tuple(Crossing(n.name, tuple(n.meta["val"].shape), n.meta["val"].dtype) for n in nodes)
