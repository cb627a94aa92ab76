"""What a rewritten step costs, by a walk over its graphs: the integer program's definition of a step's time, with none of its coefficients.

    stage    forward, backward, optimizer; it lasts as long as its busiest account: compute, the links inside a node, the links between nodes
    step     the sum of its stages

    an operator                     compute of the half in which its calls stand; one that runs again is charged to backward too
    a value kept for backward       compute of the ops that write it, and read it, where forward's kernels would not have written it
    a collective of parameters      its link (issued a layer ahead), in each half that gathers
    a collective of gradients       its link (awaited a layer later)
    either of these                 compute too, by the cluster's `contention`
    any other collective            its link, and compute, which waits for it; those inside an operator's local form too

An operator that runs unchanged on its shard is priced as the call it is, one device's work at the call's own shapes; one with a local lowering
(`autopar.passes.local`) as its rule says of the plan's strategy, so what a lowering adds to the operator is free but for its collectives. Copies
for collectives (permutations, padding) are free. The optimizer's time follows from the parameters' local shapes.

Shares with the program: `Cost`, the operators' rules, what fusion leaves to read and write. Only what the graph has is priced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from autopar import _torch
from autopar.capture.capture import Role
from autopar.capture.describe import dtype_name
from autopar.cost import Cost
from autopar.cost.experts import is_experts
from autopar.cost.ring import ring_axes
from autopar.graph.calls import collective_of, is_collective, is_issue, is_transfer, is_wait, transferred, wire_bytes
from autopar.graph.graph import Graph, Op, Tensor
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.passes import local
from autopar.passes.ancestors import ancestors
from autopar.passes.overlap import inputs_of, is_ahead, is_behind
from autopar.passes.partition import Parts
from autopar.passes.recompute import from_parameters
from autopar.plan.plan import Plan
from autopar.planner.formulation.names import moved
from autopar.planner.formulation.training import TrainingConfig, optimizer_s
from autopar.rules import lookup
from autopar.rules.strategy import placements
from autopar.simulate.written_bytes import saved_tensors

STAGES = ("forward", "backward", "optimizer")
COMPUTE = "compute"


@dataclass(frozen=True)
class Charge:
    """What one call of a half costs.

    resource: "compute", "intra" or "inter"; op: whose call it is; kind: of a collective, "" for an operator's work; serves: what a collective
    brings or sums ("activation", "parameter", "gradient"; "attention": keys and values that go round beside it); wire_bytes: what a rank sends.
    """

    node: fx.Node
    stage: str
    resource: str
    seconds: float
    op: str
    kind: str = ""
    serves: str = ""
    wire_bytes: float = 0.0

    @property
    def blocks(self) -> bool:
        return self.serves == "activation"


@dataclass(frozen=True)
class Collectives:
    """Equal ones together: how many, their seconds, what a rank sends."""

    count: int
    seconds: float
    wire_bytes: float


@dataclass(frozen=True)
class Price:
    """step_time_s: the sum of stage_s, by stage; accounts_s: by stage and resource; collectives: by stage, what they serve and kind."""

    step_time_s: float
    stage_s: Mapping[str, float]
    accounts_s: Mapping[tuple[str, str], float]
    collectives: Mapping[tuple[str, str, str], Collectives]
    charges: tuple[Charge, ...]

    def __str__(self) -> str:
        lines = [f"step {self.step_time_s * 1e6:.3f} us"]
        for stage, seconds in self.stage_s.items():
            accounts = ", ".join(f"{r} {t * 1e6:.3f}" for (s, r), t in self.accounts_s.items() if s == stage)
            lines.append(f"  {stage:<9} {seconds * 1e6:.3f} us: {accounts}")
        for (stage, serves, kind), c in sorted(self.collectives.items()):
            lines.append(f"  {stage:<9} {serves:<10} {kind:<14} {c.count:>4} x, {c.wire_bytes:,.0f} bytes, {c.seconds * 1e6:.3f} us")
        return "\n".join(lines)


def price(parts: Parts, plan: Plan, graph: Graph, cost: Cost, training: TrainingConfig, prefix: str) -> Price:
    """The time of a call, as `TrainingConfig` has it. parts: after `manager.overlap`; graph: the whole captured one, whose fusion `cost` knows; prefix: of group names."""
    found = charges(parts, plan, graph, cost, prefix)
    accounts: dict[tuple[str, str], float] = {}
    together: dict[tuple[str, str, str], list[Charge]] = defaultdict(list)

    def pay(stage: str, resource: str, seconds: float) -> None:
        accounts[stage, resource] = accounts.get((stage, resource), 0.0) + seconds

    early = _early(found, plan)
    stays = _staying(parts, plan) if training.in_a_row > 1 else {}
    for c in found:
        once = stays.get(c.node, 0.0) if c.serves == "parameter" else 0.0
        seconds = c.seconds * (1 - once + once / training.in_a_row)
        seconds /= training.micro_batches if c.serves == "gradient" and c not in early else 1
        pay(c.stage, c.resource, seconds)
        if c.blocks:
            pay(c.stage, COMPUTE, c.seconds)
        elif c.kind and c.serves != "attention":
            pay(c.stage, COMPUTE, cost.cluster.contention * seconds)
        if c.kind:
            together[c.stage, c.serves, c.kind].append(c)
    for n, role in zip((n for n in parts.forward.graph.nodes if n.op == "placeholder"), parts.forward_inputs, strict=True):
        if role.kind == "param" and role.name in training.trainable:
            pay("optimizer", COMPUTE, optimizer_s(cost, training, n.meta["val"].numel()))
    stages = {s: max((t for (stage, _), t in accounts.items() if stage == s), default=0.0) for s in STAGES}
    totals = {k: Collectives(len(v), sum(c.seconds for c in v), sum(c.wire_bytes for c in v)) for k, v in together.items()}
    return Price(sum(stages.values()), stages, accounts, totals, found)


def _staying(parts: Parts, plan: Plan) -> dict[fx.Node, float]:
    """Of forward's gathers, of which share of what they bring the first micro-batch of a call gathers for all."""
    places = [n for n in parts.forward.graph.nodes if n.op == "placeholder"]
    params = {n: r.name for n, r in zip(places, parts.forward_inputs, strict=True) if r.kind == "param"}
    found: dict[fx.Node, float] = {}
    for n in parts.forward.graph.nodes:
        if is_collective(n) and is_ahead(n):
            sizes = {params[a]: a.meta["val"].numel() for a in ancestors([n]) if a in params}
            once = sum(size for name, size in sizes.items() if plan.params[name].once_a_call)
            found[n] = once / max(1, sum(sizes.values()))
    return found


def _early(found: Sequence[Charge], plan: Plan) -> set[Charge]:
    """Of reductions of gradients those that every micro-batch has: what comes before gradients are added up."""
    of: dict[str, list[Charge]] = defaultdict(list)
    for c in found:
        if c.serves == "gradient":
            of[c.op.removeprefix("grad.")].append(c)
    early: set[Charge] = set()
    for name, mine in of.items():
        choice = plan.params.get(name)
        if choice is not None and choice.accumulated is not None:
            later = [] if choice.accumulated == choice.storage else moved(choice.accumulated, choice.storage, plan.mesh) or []
            early |= set(mine[: len(mine) - sum(s.kind != "slice" for s in later)])
    return early


def charges(parts: Parts, plan: Plan, graph: Graph, cost: Cost, prefix: str) -> tuple[Charge, ...]:
    """Of both halves, in order."""
    ops = {op.name: op for op in graph.ops}
    one = replace(cost, mesh=Mesh.of({}))
    kept_s = _kept_s(parts, cost)
    gathered: set[int] = set()  # of what is saved, what follows from parameters alone
    out: list[Charge] = []
    for stage, gm in (("forward", parts.forward), ("backward", parts.backward)):
        if gm is None:
            continue
        nodes = list(gm.graph.nodes)
        places = [n for n in nodes if n.op == "placeholder"]
        roles = dict(zip(places, inputs_of(parts, stage == "backward"), strict=True)) | {places[i]: Role("param") for i in gathered}
        fixed = from_parameters(nodes, {n: r for n, r in roles.items() if r is not None})
        bearers = {n: op for op, n in _runs(nodes, ops, stage, fixed)}
        for n in nodes:
            if n in bearers:
                op = bearers[n]
                recompute = op.direction != stage and n not in fixed
                aside_s = 0.0 if recompute else kept_s.get(op.name, 0.0)
                own_s = _seconds(n, op, plan, cost, one, recompute)
                out.append(Charge(n, stage, COMPUTE, own_s + aside_s, op.name))
                rule, strategy = lookup(op), plan.ops[op.name].strategy
                if is_experts(op) or ring_axes(rule, strategy, cost.mesh):  # what is exchanged where the graph does not show it
                    for kind, axes, sent, beside in cost.inside(op, rule, strategy, _placed(op, plan)[0]):
                        c = cost.collective(kind, axes, sent)
                        serves = "activation" if not beside else "attention"
                        out.append(Charge(n, stage, c.link, c.seconds, op.name, kind, serves, sent))
                        if beside:
                            out.append(Charge(n, stage, COMPUTE, cost.waits_s(c.seconds, beside * own_s), op.name))
            elif is_collective(n):
                kind, axes = collective_of(n, prefix)
                sent = wire_bytes(n, cost.mesh.sizes_product(axes))
                c = cost.collective(kind, axes, sent)
                serves = "parameter" if is_ahead(n) else "gradient" if is_behind(n) else "activation"
                out.append(Charge(n, stage, c.link, c.seconds, n.meta["op"], kind, serves, sent))
            elif is_transfer(n):
                _, resources, sent = transferred(n)
                out += [Charge(n, stage, r, cost.transfer_s(r, sent), n.meta["op"], "", "activation kept away", sent) for r in resources]
        results = _torch.results_of(gm.graph)
        gathered = {i for i, n in enumerate(results[len(results) - len(parts.saved) :]) if n in fixed}
    return tuple(out)


def _runs(nodes: Sequence[fx.Node], ops: Mapping[str, Op], stage: str, fixed: set[fx.Node]) -> Iterator[tuple[Op, fx.Node]]:
    """The operators that run in a half, each with the last call of its own.

    An operator's calls bear its name, and so do the redistributions of its operands. fixed: what follows from parameters alone. In backward a
    gathered parameter is made again under the name of the forward operator that reads it first, which says nothing of that operator.
    """
    of: dict[str, list[fx.Node]] = defaultdict(list)
    for n in nodes:
        if n.op == "call_function" and n.meta["op"] in ops and not is_issue(n) and not is_wait(n):
            of[n.meta["op"]].append(n)
    for name, calls in of.items():
        op = ops[name]
        own = [n for n in calls if str(n.target) == op.target]
        if not own and local.lookup(op.target) is not None:
            own = calls if op.direction == stage else [n for n in calls if n not in fixed]
        if own:
            yield op, own[-1]


def _kept_s(parts: Parts, cost: Cost) -> dict[str, float]:
    """By operator, what it takes to write what is saved, and to read it, besides what it does anyway."""
    found: dict[str, float] = defaultdict(float)
    for tensor, nbytes in saved_tensors(parts).items():
        for beside in cost.kept(tensor, nbytes):
            found[beside.op] += beside.seconds
    return found


def _seconds(n: fx.Node, op: Op, plan: Plan, cost: Cost, one: Cost, recompute: bool) -> float:
    """Of one run. one: prices on a mesh of one device; recompute: in backward, an operator of forward."""
    if local.lookup(op.target) is None:
        here = _as_called(n, op)
        ins = tuple(_whole(t) for t in here.inputs)
        outs = tuple(None if t is None else _whole(t) for t in here.outputs)
        return one.op(here, lookup(here), {}, ins, outs, recompute).seconds
    want, made = _placed(op, plan)
    return cost.op(op, lookup(op), plan.ops[op.name].strategy, want, made, recompute).seconds


def _placed(op: Op, plan: Plan) -> tuple[tuple[Placement, ...], tuple[Placement | None, ...]]:
    """Operands and results."""
    choice, shapes = plan.ops[op.name], tuple(None if t is None else t.shape for t in op.outputs)
    return placements(lookup(op), choice.strategy, tuple(t.shape for t in op.inputs), shapes, choice.partial)


def _as_called(n: fx.Node, op: Op) -> Op:
    """`op` as the call `n`: its tensors under the names they have in `op`, at the shapes they have here."""
    names = iter(t.name for t in op.inputs)

    def tensor(name: str, val: Any) -> Tensor:
        return Tensor(name, tuple(val.shape), dtype_name(val.dtype))

    def argument(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return tensor(next(names), x.meta["val"])
        if isinstance(x, (list, tuple)):
            return tuple(argument(y) for y in x)
        if isinstance(x, dict):
            return {k: argument(v) for k, v in x.items()}
        return x if x is None or isinstance(x, (bool, int, float, str, complex)) else str(x).removeprefix("torch.")

    args, kwargs = argument(tuple(n.args)), argument(dict(n.kwargs))
    vals = n.meta["val"] if isinstance(n.meta["val"], (list, tuple)) else [n.meta["val"]]
    outputs = tuple(None if t is None else tensor(t.name, v) for t, v in zip(op.outputs, vals, strict=True))
    return Op(op.name, op.target, args, kwargs, outputs, op.direction, op.module)


def _whole(t: Tensor) -> Placement:
    return Placement.of(t.shape)
