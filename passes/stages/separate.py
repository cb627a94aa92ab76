"""Every stage by itself: the captured program again, in the order of stages, with a parameter for every stage that reads one.

A tied weight is read on the first stage and on the last. In the captured program its gradient is a sum of what the two make, which would have to be sent from one to the other for every
micro-batch. Here it is two parameters, `wte.weight` and `wte.weight@3`, each with its part of the gradient. Their storage is the same, and the parts are added up once a step
(`autopar.runtime.stages`). The sum is taken apart through what is linear in it alone: views, casts, a product with a constant.

Views and casts of parameters are copied for each stage that reads them. Operators of forward are sorted by stage, those of backward against it, both otherwise as they were, so that
whatever version of a tensor the shard pass finds, it was made on this stage or on one that comes before. Random operators keep their number.

Requires: the stage of every operator, none for what is free. Provides: roles of parameters `name@stage`. Bitwise, but for the order in which parts of a gradient are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autopar import _torch
from autopar.capture.capture import Captured, Role
from autopar.capture.describe import describe
from autopar.graph.graph import Graph
from autopar.passes.ancestors import ancestors
from autopar.passes.sharding.operators import DRAW
from autopar.plan.decisions import OpChoice
from autopar.plan.plan import Plan
from autopar.rules import lookup

AT = "@"
aten = torch.ops.aten
_LINEAR = {
    aten.t.default, aten.transpose.int, aten.view.default, aten.permute.default, aten.reshape.default, aten._unsafe_view.default,
    aten.squeeze.dim, aten.unsqueeze.default, aten._to_copy.default, aten.clone.default, aten.neg.default, aten.mul.Tensor,
}  # fmt: skip


def owner(name: str) -> str:
    """The model's name of a parameter that may be a stage's copy."""
    return name.partition(AT)[0]


def stage_of(name: str, holders: Mapping[str, tuple[int, ...]]) -> int:
    """The stage whose parameter `name` is."""
    param, _, stage = name.partition(AT)
    return int(stage) if stage else holders.get(param, (0,))[0]


@dataclass(frozen=True)
class Separate:
    """stages: of every operator that is not free; holders: the stages that read each parameter of the model, in order; the first has it under its own name.
    unread: parameters that no stage reads, which holders has on the first."""

    captured: Captured
    graph: Graph
    plan: Plan
    stages: Mapping[str, int]
    holders: Mapping[str, tuple[int, ...]]
    unread: frozenset[str]


def separate(captured: Captured, graph: Graph, plan: Plan, stages: Mapping[str, int]) -> Separate:
    return _Separator(captured, graph, plan, stages).run()


@dataclass
class _Made:
    """What became of a node: for each stage, of one that follows from parameters; else under None."""

    on: dict[int | None, fx.Node] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """A summand of a gradient: `then`, from the last to the first, of what `made` is."""

    made: fx.Node
    then: tuple[fx.Node, ...] = ()


class _Separator:
    def __init__(self, captured: Captured, graph: Graph, plan: Plan, stages: Mapping[str, int]) -> None:
        self.captured, self.graph, self.plan = captured, graph, plan
        self.stages = dict(stages)
        self.nodes = [n for n in captured.gm.graph.nodes if n.op != "output"]
        places = [n for n in self.nodes if n.op == "placeholder"]
        self.role_of = dict(zip(places, captured.inputs, strict=True))
        self.out = fx.Graph()
        self.made: dict[fx.Node, _Made] = {n: _Made() for n in self.nodes}
        self.ops: dict[str, OpChoice] = dict(plan.ops)
        self.split: set[fx.Node] = set()  # sums of a gradient's parts, and what follows from them, which are not made
        self.of: set[fx.Node] = set()
        self.held: dict[str, tuple[int, ...]] = {}
        self.unread: frozenset[str] = frozenset()

    def stage(self, n: fx.Node) -> int | None:
        source = n.args[0] if _torch.is_getitem(n) else n
        assert isinstance(source, fx.Node)
        return self.stages.get(source.name)

    def run(self) -> Separate:
        self.of = of_params = self.of_params()
        results = list(zip(self.captured.outputs, _torch.results_of(self.captured.gm.graph), strict=True))
        parts = {r.name: self.parts(n) for r, n in results if r.kind == "grad" and isinstance(n, fx.Node)}
        holders = self.held = self.holders(of_params, parts)
        inputs = self.placeholders(holders)
        rules = {op.name: lookup(op).kind == "random" for op in self.graph.ops}
        drawn = 0
        draws: dict[str, int] = {}
        for op in self.graph.ops:
            if rules[op.name]:
                draws[op.name] = drawn
                drawn += op.direction == "forward"
        for n in self.in_order():
            self.bring(n, self.stage(n))
        for n, made in self.made.items():
            if n.name in draws:
                for copy in made.on.values():
                    copy.meta[DRAW] = draws[n.name]
        roles, outputs = [], []
        for role, n in results:
            if role.kind == "grad":
                stages = holders.get(role.name, (0,))
                for s in stages:  # what is free, such as zeros, is on the first
                    mine = [x for x in parts.get(role.name, ()) if (stages[0] if (at := self.stage(x.made)) is None else at) == s]
                    roles.append(role._replace(name=self.named(role.name, s, holders)))
                    outputs.append(self.whole(mine, s) if mine else None)
            else:
                roles.append(role)
                outputs.append(self.bring(n, None) if isinstance(n, fx.Node) else n)
        self.out.output(tuple(outputs))
        gm = fx.GraphModule(self.captured.gm, self.out)
        gm.graph.lint()
        captured = replace(self.captured, gm=gm, inputs=inputs, outputs=tuple(roles))
        params = {self.named(p, s, holders): choice for p, choice in self.plan.params.items() for s in holders.get(p, (0,))}
        plan = replace(self.plan, params=params, ops=self.ops).answering_as(self.plan)
        return Separate(captured, describe(captured), plan, self.stages, holders, self.unread)

    # ---- who reads what ------------------------------------------------------------------------------------------

    def of_params(self) -> set[fx.Node]:
        """Parameters, and free operators that follow from them."""
        found = {n for n, r in self.role_of.items() if r.kind == "param"}
        for n in self.nodes:
            if n.op == "call_function" and self.stage(n) is None and any(a in found for a in n.all_input_nodes):
                found.add(n)
        return found

    def holders(self, of_params: set[fx.Node], parts: Mapping[str, list[_Part]]) -> dict[str, tuple[int, ...]]:
        found: dict[str, set[int]] = {r.name: set() for r in self.captured.inputs if r.kind == "param"}
        for n in self.nodes:
            s = self.stage(n)
            if n.op == "call_function" and s is not None:
                for p in self.roots([a for a in n.all_input_nodes if a in of_params]):
                    found[p].add(s)
        for p, nodes in parts.items():
            found[p] |= {s for x in nodes if (s := self.stage(x.made)) is not None}
        results = zip(self.captured.outputs, _torch.results_of(self.captured.gm.graph), strict=True)
        returned = set(self.roots([n for r, n in results if r.kind in ("output", "buffer_update") and n in of_params]))
        self.unread = frozenset(p for p, stages in found.items() if not stages and p not in returned)
        return {p: tuple(sorted(stages)) or (0,) for p, stages in found.items()}

    def roots(self, nodes: list[fx.Node]) -> Iterator[str]:
        return (self.role_of[n].name for n in ancestors(nodes) if n.op == "placeholder" and self.role_of[n].kind == "param")

    @staticmethod
    def named(param: str, stage: int, holders: Mapping[str, tuple[int, ...]]) -> str:
        first = holders.get(param, (stage,))[0]
        return param if stage == first else f"{param}{AT}{stage}"

    # ---- the graph -----------------------------------------------------------------------------------------------

    def placeholders(self, holders: Mapping[str, tuple[int, ...]]) -> tuple[Role, ...]:
        roles = []
        for n, role in self.role_of.items():
            stages = holders[role.name] if role.kind == "param" else (None,)
            for s in stages:
                new = self.out.node_copy(n) if s in (None, stages[0]) else self.out.placeholder(f"{n.name}_at_{s}")
                new.meta = dict(n.meta)
                self.made[n].on[s] = new
                roles.append(role if s is None else role._replace(name=self.named(role.name, s, holders)))
        return tuple(roles)

    def in_order(self) -> list[fx.Node]:
        """What has a stage, so that each comes behind what it reads."""
        behind = {op.name for op in self.graph.ops if op.direction == "backward"}
        staged = [(s, n) for n in self.nodes if n.op == "call_function" and n not in self.split and (s := self.stage(n)) is not None]
        name = {n: n.args[0].name if _torch.is_getitem(n) else n.name for _, n in staged}
        return [n for s, n in sorted(staged, key=lambda x: (name[x[1]] in behind, -x[0] if name[x[1]] in behind else x[0]))]

    def bring(self, n: fx.Node, stage: int | None) -> fx.Node:
        """What is `n` in the new graph, made if it is not there; of a parameter, or what follows from one, the one of this stage."""
        key = stage if n in self.of else None
        made = self.made[n].on
        if key not in made:
            if key is None and n in self.of:  # of a parameter, and forward returns it
                stages = [s for s in made if s is not None] or [self.held[p][0] for p in self.roots([n])]
                return self.bring(n, min(stages))
            assert n.op in ("call_function", "get_attr"), (n, stage, made)
            mine = self.stage(n) if n not in self.of else stage
            env = {a: self.bring(a, mine) for a in n.all_input_nodes}
            if made:
                made[key] = self.again(n, stage, env)
            else:
                made[key] = self.out.node_copy(n, env.__getitem__)
                made[key].meta = dict(n.meta)
        return made[key]

    # ---- gradients -----------------------------------------------------------------------------------------------

    def parts(self, g: fx.Node, then: tuple[fx.Node, ...] = ()) -> list[_Part]:
        """What a gradient is the sum of, where that comes from several stages."""
        made_of = g.all_input_nodes
        if len(g.users) != 1:
            return [_Part(g, then)]
        if g.target is aten.add.Tensor and not g.kwargs and len(made_of) == 2 and all(self.stage(a) is not None for a in made_of):
            found = [x for a in made_of for x in self.parts(a, then)]
            if len({self.stage(x.made) for x in found}) > 1:
                self.split.add(g)
                return found
        if g.target in _LINEAR and sum(isinstance(a, fx.Node) for a in g.args) == 1 and self.stage(made_of[0]) is not None:
            found = self.parts(made_of[0], (g, *then))
            if len(found) > 1:
                self.split.add(g)
                return found
        return [_Part(g, then)]

    def whole(self, parts: list[_Part], stage: int) -> fx.Node:
        """Their sum, on `stage`."""
        total: fx.Node | None = None
        for part in parts:
            n = self.bring(part.made, stage)
            for f in part.then:
                n = self.again(f, stage, {f.all_input_nodes[0]: n})
            if total is not None:
                like = next(g for g in self.split if g.target is aten.add.Tensor and g.meta["val"].shape == n.meta["val"].shape)
                n = self.again(like, stage, dict(zip(like.all_input_nodes, (total, n), strict=True)))
            total = n
        assert total is not None
        return total

    def again(self, n: fx.Node, stage: int | None, env: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """`n` once more, of other operands."""
        args, kwargs = fx.map_arg((n.args, n.kwargs), env.__getitem__)
        new = self.out.create_node(n.op, n.target, args, kwargs, f"{n.name}_at_{stage}")
        new.meta = dict(n.meta)
        if n.name in self.ops:
            self.ops[new.name] = self.ops[n.name]
        if stage is not None and n.name in self.stages:
            self.stages[new.name] = stage
        return new
