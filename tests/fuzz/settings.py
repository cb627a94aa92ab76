"""How a program is run: on one process by `autopar.compile`, or on simulated ranks by a layout, a plan of the solver's or one drawn at random.

A random plan gives every operator any strategy that its rule allows: the rewrite must be right for all of them, whoever chooses.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from autopar.graph.graph import Graph, Op
from autopar.graph.mesh import Mesh
from autopar.plan.decisions import OFFLOAD, OpChoice
from autopar.plan.plan import Plan
from autopar.planner.formulation.names import moved
from autopar.rules import lookup
from autopar.rules.strategy import is_legal, placements

MESHES: tuple[dict[str, int], ...] = ({"a": 2}, {"a": 4}, {"a": 2, "tp": 2}, {"a": 2, "tp": 2}, {"a": 3}, {"tp": 2}, {"tp": 4})
LAYOUTS = ("ddp", "fsdp", "tp", "fsdp+tp")


@dataclass(frozen=True)
class Setting:
    """mesh: empty for one process. layout: a hand layout, "random" or "plan". recompute, offloaded: seeds of what runs again and of what is kept
    elsewhere, -1: nothing. accumulated: of where gradients are added up to those of an earlier call, -1: there is none."""

    mesh: dict[str, int] = field(default_factory=dict)
    layout: str = "fsdp"
    backend: str = "aot_eager"
    seed: int = 0
    recompute: int = -1
    offloaded: int = -1
    memory: str = "fastest"
    accumulated: int = -1

    def as_dict(self) -> dict[str, Any]:
        """What is not as by default."""
        return {k: v for k, v in asdict(self).items() if v != getattr(DEFAULT, k)}

    @staticmethod
    def of(text: dict[str, Any]) -> Setting:
        return Setting(**text)

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self.as_dict().items()) or "one process"


DEFAULT = Setting()


@dataclass(frozen=True)
class Wanted:
    """What is drawn from. planned: share of settings that the solver decides; inductor: of programs that one process compiles by it."""

    mesh: dict[str, int] | None = None
    planned: float = 0.08
    inductor: float = 0.0
    ranks: int = 1


def draw(rng: random.Random, wanted: Wanted) -> list[Setting]:
    """One process always, a few meshes besides."""
    backend = "inductor" if rng.random() < wanted.inductor else "aot_eager"
    out = [Setting(backend=backend)]
    for _ in range(wanted.ranks):
        mesh = wanted.mesh or rng.choice(MESHES)
        kind = rng.random()
        again = rng.randrange(1000) if rng.random() < 0.25 else -1
        offloaded = rng.randrange(1000) if rng.random() < 0.15 else -1
        seed = rng.randrange(1000)
        if kind < wanted.planned:
            mesh = rng.choice([{"a": 1}, mesh])
            out.append(Setting(mesh, "plan", seed=seed, memory=rng.choice(("fastest", "fastest", "least"))))
        elif kind < 0.5:
            out.append(Setting(mesh, "random", seed=seed, recompute=again, offloaded=offloaded))
        else:
            layouts = [x for x in LAYOUTS if ("tp" in x) <= ("tp" in mesh) and ("fsdp" in x) <= (len(mesh) > 1 or "tp" not in mesh)]
            out.append(Setting(mesh, rng.choice(layouts), recompute=again, offloaded=offloaded))
        if rng.random() < 0.25:
            out[-1] = replace(out[-1], accumulated=rng.randrange(1000))
    return out


def randomly(graph: Graph, plan: Plan, seed: int) -> Plan:
    """`plan` with other strategies: each operator draws its own."""
    rng, mesh = random.Random(seed), plan.mesh
    often = rng.choice((0.3, 0.7, 0.95))
    ops: dict[str, OpChoice] = {}
    sums: dict[str, frozenset[str]] = {}  # tensor -> axes over which it is Partial: no other can be made so
    for op in graph.ops:
        rule = lookup(op)
        strategy: dict[str, tuple[str, int]] = {}
        partial: dict[str, frozenset[int]] = {}
        for axis in mesh.axes:
            if axis.size == 1 or rng.random() > often:
                continue
            linear = [who for who in rule.linear if all(axis.name in sums.get(op.inputs[i].name, ()) for i in who)]
            if linear and rng.random() < 0.6:
                partial[axis.name] = rng.choice(linear)
                continue
            choices = [
                (x, s)
                for x, f in rule.factors.items()
                if f.split and f.size and f.size % axis.size == 0
                for s in range(1, f.size // axis.size + 1)
                if f.size % (s * axis.size) == 0 and is_legal(rule, {**strategy, axis.name: (x, s)}, mesh)
            ]
            if choices:
                strategy[axis.name] = rng.choice(choices)
        ops[op.name] = OpChoice(strategy, partial, rule.kind, rule.is_fallback)
        for t, p in zip(op.outputs, made_at(op, ops), strict=True):
            if t is not None and p is not None:
                sums[t.name] = frozenset(a for a, how in p.partial if how == "sum")
    return replace(plan, ops=ops, layout="random")


def with_policies(graph: Graph, plan: Plan, again: int, offloaded: int) -> Plan:
    """Some operators run again, some of what backward reads is kept in host memory."""
    forward = [op for op in graph.ops if op.direction == "forward"]
    read = {t.name for op in graph.ops if op.direction == "backward" for t in op.inputs}
    if again >= 0:
        rng = random.Random(again)
        share = rng.choice((0.3, 0.6, 1.0))
        plan = replace(plan, recompute=plan.recompute | {op.name for op in forward if rng.random() < share})
    if offloaded >= 0:
        rng = random.Random(offloaded)
        kept, policies = dict(plan.kept), {}
        for op in forward:
            if op.name in plan.recompute or lookup(op).kind == "view":
                continue
            made = made_at(op, plan.ops)
            for t, p in zip(op.outputs, made, strict=True):
                if t is not None and p is not None and t.name in read and not p.partial and rng.random() < 0.6:
                    kept[t.name], policies[t.name] = p, OFFLOAD + "host"
        plan = replace(plan, kept=kept, activations=policies)
    return plan


def accumulating(graph: Graph, plan: Plan, seed: int) -> Plan:
    """`plan` with gradients added up where they are made, as their parameters are stored, or on the way there."""
    rng, params = random.Random(seed), dict(plan.params)
    by_name = {op.name: op for op in graph.ops}
    for name, grad in graph.grads.items():
        op, choice = by_name.get(grad.split(".")[0]), plan.params[name]
        if op is None:
            continue
        made = next(p for t, p in zip(op.outputs, made_at(op, plan.ops), strict=True) if t is not None and t.name == grad)
        steps = [s.dst for s in moved(made, choice.storage, plan.mesh) or [] if s.dst.shape == choice.shape]
        params[name] = replace(choice, accumulated=rng.choice([None, choice.storage, *steps]))
    return replace(plan, params=params)


def made_at(op: Op, ops: dict[str, OpChoice]) -> tuple[Any, ...]:
    c = ops[op.name]
    shapes = tuple(t.shape for t in op.inputs), tuple(None if t is None else t.shape for t in op.outputs)
    return placements(lookup(op), c.strategy, *shapes, c.partial)[1]


def size_of(mesh: dict[str, int]) -> int:
    return Mesh.of(mesh).size if mesh else 1
