"""The shard pass: a graph at global shapes + a plan -> the graph that every rank runs, at local shapes.

Walks the captured graph in order. Every tensor has versions, one per placement it has been brought to; an operand is
taken from the version that is cheapest to turn into what the op's strategy asks for, and the redistribution is inserted once
(later consumers find the version: this is the deduplication of collectives). Then the op's local form is emitted: the
same op on local operands, or its local lowering. Gradients are brought to their parameter's storage right
where their last contribution is computed, so that only one is whole at a time.

Rank-neutral: coordinates and random counters are graph inputs, groups have names that are the same on every rank.
Requires: plan for every op of the graph. Provides: local shapes, `meta["direction"]` and `meta["op"]` (the op it is emitted for) on every
node, `meta["kept"]`, the name of the captured value, on those the plan keeps for backward. Bitwise per shard.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar.capture.capture import Captured, Role
from autopar.capture.describe import getattr_value, tensor_name
from autopar.graph.graph import Graph, Op, Tensor
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.passes.sharding.emit import Emitter, Options
from autopar.passes.sharding.operators import Operators
from autopar.passes.sharding.parameters import Parameters
from autopar.passes.sharding.versions import Versions
from autopar.plan.checks import contradiction
from autopar.plan.decisions import CollectiveUse, Decisions, ParamChoice
from autopar.rules import lookup
from autopar.rules.strategy import placements
from autopar.tensors.memory_format import order_of


@dataclass(frozen=True)
class Sharded:
    """The local graph. inputs: roles of the placeholders (also "coordinate" and "seed"); outputs: roles of the outputs."""

    gm: fx.GraphModule
    inputs: tuple[Role, ...]
    outputs: tuple[Role, ...]
    collectives: tuple[CollectiveUse, ...]
    fake_mode: Any


def shard(captured: Captured, graph: Graph, plan: Decisions, options: Options) -> Sharded:
    return _Sharder(captured, graph, plan, options).run()


class _Sharder:
    """The walk over the captured graph."""

    def __init__(self, captured: Captured, graph: Graph, plan: Decisions, options: Options) -> None:
        self.captured, self.graph, self.plan, self.options = captured, graph, plan, options
        self.mesh: Mesh = plan.mesh
        self.emit = Emitter(captured.fake_mode, options)
        self.versions = Versions(self.emit, plan)
        self.parameters = Parameters(self.emit, self.versions, plan)
        self.pending: dict[str, tuple[str, Tensor, ParamChoice, fx.Node]] = {}  # parameters that no operator has read yet, by their tensors

    def run(self) -> Sharded:
        graph, plan, options = self.graph, self.plan, self.options
        nodes = list(self.captured.gm.graph.nodes)
        by_name = {o.name: o for o in graph.ops}
        # As `graph.ops`: what forward would find first among versions could have been made in backward else.
        nodes.sort(key=lambda n: n.name in by_name and by_name[n.name].direction == "backward")
        entries = []
        places = iter(self.captured.inputs)
        for node in (n for n in nodes if n.op == "placeholder"):
            role = next(places)
            val = node.meta["val"]
            if role.kind == "param":
                choice = plan.params[role.name]
                shape = choice.storage.local_shape(self.mesh)
                new = self.emit.placeholder(node.name, shape, options.storage[role.name], role, order_of(val))
                self.parameters.formats[role.name] = order_of(val)
                entries.append((role.name, graph.params[role.name], choice, new))
                continue
            placement = Placement.of(tuple(val.shape))
            if role.kind == "input":
                placement = plan.inputs[role.index]
            elif role.kind == "tangent" and role.index >= 0:
                placement = plan.outputs[role.index]
            local_shape = placement.local_shape(self.mesh)
            self.versions.put(node.name, placement, self.emit.placeholder(node.name, local_shape, val.dtype, role, order_of(val)))
        for a in self.mesh.axes:
            if a.size > 1:
                name = "coordinate_" + a.name.replace(".", "_")
                self.versions.coordinates[a.name] = self.emit.placeholder(name, (), torch.int64, Role("coordinate", a.name))
        samples = self.captured.samples
        seed = self.emit.placeholder("seed", (2 if samples is None else 3,), torch.int64, Role("seed"))
        operators = Operators(self.emit, self.versions, plan, seed, samples)
        pending = self.pending = {t.name: (p, t, c, n) for p, t, c, n in entries}
        grad_of: dict[str, list[str]] = {}
        for p, name in graph.grads.items():
            grad_of.setdefault(name, []).append(p)
        given = {
            tensor_name(n): self.given_at(r, n)
            for r, n in self.results()
            if r.kind in ("output", "buffer_update") and isinstance(n, fx.Node)
        }
        if options.accumulated:
            for p, (at, dtype) in accumulated_grads(graph, plan, options.reduce, options.storage).items():
                shape = at.local_shape(plan.mesh)
                order = self.parameters.formats[p] if plan.params[p].accumulated else None
                self.parameters.accumulated[p] = self.emit.placeholder(
                    "accumulated_" + re.sub(r"\W", "_", p), shape, dtype, Role("accumulated", p), order
                )
        for node in nodes:
            if node.op == "get_attr":
                value = getattr_value(self.captured.gm, node)
                self.versions.put(node.name, Placement.of(tuple(value.shape)), self.emit.constant(value))
            if node.op != "call_function" or _torch.is_getitem(node):
                continue
            op = by_name[node.name]
            self.emit.direction, self.emit.current = op.direction, op.name
            for t in op.inputs:
                if t.name in pending:
                    self.parameters.enter(*pending.pop(t.name))
            operators.op(node, op)
            self.emit.current = "output"
            made = [t.name for t in op.outputs if t is not None]
            for name in made if op.direction == "forward" else ():
                if name in given:
                    self.versions.get(
                        name, given[name]
                    )  # here and not at the end: made for backward first, it would be no result of forward
            for name in made:
                for p in grad_of.get(name, ()):
                    self.parameters.finish(p, name)
        return self.outputs()

    def results(self) -> list[tuple[Role, Any]]:
        """What the captured graph gives, by role."""
        return list(zip(self.captured.outputs, _torch.results_of(self.captured.gm.graph), strict=True))

    def given_at(self, role: Role, node: fx.Node) -> Placement:
        if role.kind == "output":
            return self.plan.outputs[role.index]
        if role.kind == "input_grad":
            return self.plan.inputs[role.index]
        return Placement.of(self.graph.tensors[tensor_name(node)].shape)

    def outputs(self) -> Sharded:
        results: list[fx.Node | None] = []
        roles: list[Role] = []
        for role, n in self.results():
            if role.kind == "grad":
                if n is None:
                    results.append(None)
                else:
                    if role.name not in self.parameters.done_grads:
                        self.emit.direction = "backward"
                        self.parameters.finish(role.name, tensor_name(n))
                    results.append(self.parameters.done_grads[role.name])
            elif not isinstance(n, fx.Node):
                results.append(None)
            else:
                self.emit.direction, self.emit.current = "backward" if role.kind == "input_grad" else "forward", "output"
                if tensor_name(n) in self.pending:  # a parameter that forward returns, and no operator reads
                    self.parameters.enter(*self.pending.pop(tensor_name(n)))
                results.append(self.versions.get(tensor_name(n), self.given_at(role, n)))
            roles.append(role)
        self.emit.out.output(tuple(results))
        gm = fx.GraphModule(self.emit.root, self.emit.out)
        _torch.drop_dead_code(gm)
        gm.graph.lint()
        return Sharded(gm, tuple(self.emit.in_roles), tuple(roles), tuple(self.versions.collectives), self.emit.mode)


def accumulated_grads(
    graph: Graph, plan: Decisions, reduce: torch.dtype | None, storage: Mapping[str, torch.dtype]
) -> dict[str, tuple[Placement, torch.dtype]]:
    """Where every gradient is added to those of other micro-batches, and its dtype there. reduce: the dtype of reductions, None: each gradient's own; storage: of stored
    parameters. Raises PlanError where what is made does not lead to where the plan adds it up."""
    by_name = {o.name: o for o in graph.ops}
    given = {t.name: p for t, p in zip(graph.inputs, plan.inputs, strict=True)}
    given |= {t.name: plan.outputs[i] for t, i in zip(graph.tangents, graph.tangent_of, strict=True) if i >= 0}
    given |= {t.name: plan.params[p].storage for p, t in graph.params.items() if p in plan.params}
    out = {}
    for p, name in graph.grads.items():
        op = by_name.get(name.split(".")[0])
        shape = graph.tensors[name].shape
        made = (given.get(name) or Placement.of(shape)) if op is None else _made_at(op, plan, name)
        choice, dtype = plan.params[p], reduce or getattr(torch, graph.tensors[name].dtype)
        if choice.accumulated == choice.storage:
            dtype = storage[p]
        elif choice.accumulated is not None and any(made.reductions.get(a) != r for a, r in choice.accumulated.partial):
            raise contradiction(
                f"a gradient of {p} that lies at {made} cannot be added up at {choice.accumulated}", f"params.{p}.accumulated"
            )
        out[p] = choice.accumulated or made, dtype
    return out


def _made_at(op: Op, plan: Decisions, name: str) -> Placement:
    """Where `op` leaves its result `name`."""
    choice = plan.ops[op.name]
    shapes = tuple(None if t is None else t.shape for t in op.outputs)
    _, made = placements(lookup(op), choice.strategy, tuple(t.shape for t in op.inputs), shapes, choice.partial)
    at = made[next(i for i, t in enumerate(op.outputs) if t is not None and t.name == name)]
    assert at is not None
    return at
