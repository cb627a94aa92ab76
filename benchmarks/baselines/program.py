"""A training step to compare on: captured once, priced for any choice of what backward keeps of forward.

Every choice, a baseline's or the planner's, is a `Plan` and goes the same way: shard, partition, offload, overlap, then `autopar.simulate.price` for the seconds of
every call and `autopar.timeline.replay` for time and memory. A baseline's plan has the strategies of the hand layout `layout` (on one device all are the same:
replicated), and its own `kept` and `recompute`.

Memory is the simulator's with the sizes of `autopar.simulate.written_bytes`, with two corrections: what is saved for backward is written, also where fusion alone would not
have written it; the counters of random numbers, which operators share, are made in the kernels that use them where there are kernels. The optimizer
step counts as in the integer program: parameters, state, gradients and AdamW's temporaries.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from autopar.capture.capture import Call, Captured, capture, off_cache
from autopar.capture.describe import describe
from autopar.capture.tile import layer_periods
from autopar.cost import Cost
from autopar.graph.calls import OFFLOADED
from autopar.graph.graph import DTYPE_BYTES, Graph
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.hardware.cluster import Cluster
from autopar.models import configs as models
from autopar.passes.manager import joint_passes, overlap, run_passes
from autopar.passes.offload import offload
from autopar.passes.overlap import inputs_of
from autopar.passes.partition import Parts, partition
from autopar.passes.recompute import counters, saved_bytes
from autopar.passes.shard import Sharded, shard
from autopar.passes.sharding.emit import Options
from autopar.plan.decisions import OFFLOAD
from autopar.plan.plan import Plan
from autopar.planner.formulation.overlap_windows import window_of
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.layout import Layout
from autopar.planner.propagate import propagate
from autopar.rules import lookup
from autopar.rules.grammar import Rule
from autopar.rules.strategy import placements
from autopar.simulate.price import Price, price
from autopar.simulate.simulator import records
from autopar.simulate.written_bytes import stored, with_saved
from autopar.solver.fold import fold
from autopar.timeline.replay import COMPUTE, replay
from benchmarks.baselines.recompute import as_compiled

PREFIX = "memory"  # of the names of process groups, none of which exists


@dataclass(frozen=True)
class Point:
    """What a plan costs: peak_bytes of a device over the step, step_s with the optimizer; saved_bytes: what forward hands to backward; exposed_s: compute
    idle for copies or links."""

    peak_bytes: float
    step_s: float
    saved_bytes: float
    exposed_s: float


@dataclass
class Program:
    """layers: operator of forward -> (stack, number) of the layer it is of; storage: dtypes of the parameters as they are stored."""

    captured: Captured
    graph: Graph
    layers: Mapping[str, tuple[str, int]]
    storage: Mapping[str, torch.dtype]
    mesh_axes: dict[str, int]
    cluster: Cluster
    training: TrainingConfig
    layout: str

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh.of(self.mesh_axes)

    @cached_property
    def rules(self) -> dict[str, Rule]:
        return {op.name: lookup(op) for op in self.graph.ops}

    @cached_property
    def cost(self) -> Cost:
        return Cost.compiled(self.cluster, self.mesh, self.graph, self.rules) if self.training.fuses else Cost(self.cluster, self.mesh)

    @cached_property
    def window_of(self) -> dict[str, int]:
        return window_of(self.graph, fold(self.graph).stacks)

    @cached_property
    def base(self) -> Plan:
        """The hand layout, which keeps all that backward reads."""
        made = propagate(self.graph, Layout.of(self.layout, self.mesh), self.mesh_axes, self.training.trainable)
        return replace(made, kept={}, recompute=frozenset())

    @cached_property
    def forward_seconds(self) -> dict[str, float]:
        """Of one run of each operator, in the base plan."""
        charges = self.price(self.base, self.parts(self.base)).charges
        return {c.op: c.seconds for c in charges if c.stage == "forward" and not c.kind}

    def keeping(self, saved: Collection[str]) -> Plan:
        """The base plan, that keeps of forward exactly the tensors `saved` and makes all else again that backward needs."""
        saved = self.of_forward(saved)
        again, kept = set(), dict[str, Placement]()
        for op in self.graph.ops:
            if op.direction == "forward":
                shapes = tuple(None if t is None else t.shape for t in op.outputs)
                choice = self.base.ops[op.name]
                _, made = placements(self.rules[op.name], choice.strategy, tuple(t.shape for t in op.inputs), shapes, choice.partial)
                kept |= {t.name: p for t, p in zip(op.outputs, made, strict=True) if t is not None and p is not None and t.name in saved}
                again |= {op.name} if any(t is not None and t.name not in saved for t in op.outputs) else set()
        return replace(self.base, kept=kept, recompute=frozenset(again))

    def of_forward(self, saved: Collection[str]) -> set[str]:
        """`saved`, with what autograd recorded in backward though forward could have made it replaced by what that is made of: for torch's partitioner such an
        operator is forward's, if nothing of it depends on a tangent. In effect these are views of saved results."""
        maker = {t.name: op for op in self.graph.ops for t in op.outputs if t is not None}
        todo, seen = list(saved), set(saved)
        while todo:
            t = todo.pop()
            if t in maker and maker[t].direction == "backward":
                new = [i.name for i in maker[t].inputs if i.name not in seen]
                seen |= set(new)
                todo += new
        return {t for t in seen if t not in maker or maker[t].direction == "forward"}

    # ---- what a plan costs -------------------------------------------------------------------------------------------

    def parts(self, plan: Plan, fuses: bool = False) -> Parts:
        """The halves that run. fuses: as they are compiled, without what is then free to make again."""
        sharded = self.marked(plan) if self.mesh.size == 1 else self.sharded(plan)
        halves = partition(sharded, reshard_after_forward=plan.reshard_after_forward, recompute=plan.recompute, fuses=fuses)
        return overlap(offload(halves, PREFIX, self.window_of, sharded.fake_mode), PREFIX)

    def sharded(self, plan: Plan) -> Sharded:
        reduce = getattr(torch, self.training.reduce) if self.training.reduce else None
        options = Options(torch.device("cpu"), dict(self.storage), PREFIX, reduce)
        return run_passes(shard(self.captured, self.graph, plan, options), PREFIX, joint_passes(self.training.fuses))

    @cached_property
    def labelled(self) -> Sharded:
        """The local graph of one device; the mark of every node that a plan might keep is the name of the tensor that it is."""
        whole = {t.name: Placement.of(t.shape) for t in self.graph.tensors.values()}
        names = {n: OFFLOAD + n for n in whole}
        sharded = self.sharded(replace(self.base, kept=whole, activations=names))
        for n in sharded.gm.graph.nodes:
            if n.meta.pop("kept", ""):
                n.meta["label"] = n.meta.pop(OFFLOADED)
        return sharded

    def marked(self, plan: Plan) -> Sharded:
        """What the shard pass makes of a plan for one device, where plans differ in nothing but the marks of what they keep."""
        for n in self.labelled.gm.graph.nodes:
            label = n.meta.get("label")
            for mark in ("kept", OFFLOADED):
                n.meta.pop(mark, None)
            if label in plan.kept:
                n.meta |= {"kept": label} | ({OFFLOADED: plan.offload[label]} if label in plan.offload else {})
        return self.labelled

    def price(self, plan: Plan, parts: Parts) -> Price:
        return price(parts, plan, self.graph, self.cost, self.training, PREFIX)

    def point(self, plan: Plan, fusion: str = "planned", ours: bool = False) -> Point:
        """fusion: "planned", as the integer program knows it, or "compiled", as it is in the graphs that run (`recompute.py`); ours: as our passes make these."""
        parts = self.parts(plan, ours and fusion == "compiled")
        priced = self.price(plan, parts)
        seconds = {c.node: (c.resource, c.seconds) for c in priced.charges}
        sizes = stored(self.graph, self.cost, parts.backward)
        if fusion == "compiled":
            computed, sizes = as_compiled(parts, self.cost)
            seconds |= {n: (COMPUTE, s) for n, s in computed.items()}
        inside = in_kernels(parts) if self.training.fuses else set()
        seconds |= {n: (COMPUTE, 0.0) for n in inside}
        table, start_bytes = records(parts, lambda n: seconds.get(n, (COMPUTE, 0.0)), with_saved(parts, sizes, inside))
        state_bytes, update_bytes = self.optimizer_bytes(parts)
        run = replay(table, int(start_bytes + state_bytes))
        return Point(
            max(float(run.peak_bytes), update_bytes),
            run.seconds + priced.stage_s["optimizer"],
            float(saved_bytes(parts.forward, len(parts.saved))),
            run.exposed_s,
        )

    def optimizer_bytes(self, parts: Parts) -> tuple[float, float]:
        """Bytes of the optimizer's state, and of all there is while it runs."""
        s, state, update = self.training, 0.0, 0.0
        places = (n for n in parts.forward.graph.nodes if n.op == "placeholder")
        for n, role in zip(places, parts.forward_inputs, strict=True):
            if role.kind == "param":
                numel, trained = n.meta["val"].numel(), role.name in s.trainable
                state += numel * s.state_bytes * trained
                update += numel * (s.master_bytes + trained * (s.state_bytes + (s.master_bytes + s.step_bytes)))
        return state, update


def in_kernels(parts: Parts) -> set[Any]:
    """Calls that make the counters of random numbers."""
    found: set[Any] = set()
    for backward, gm in enumerate((parts.forward, parts.backward)):
        if gm is not None:
            places = gm.graph.find_nodes(op="placeholder")
            roles = {n: r for n, r in zip(places, inputs_of(parts, bool(backward)), strict=True) if r is not None}
            found |= {n for n in counters(gm.graph.nodes, roles) if n.op == "call_function"}
    return found


def public(
    name: str, layers: int, batch: int, sequence: int, mesh_axes: dict[str, int], cluster: str, layout: str,
    dropout: float | None = None, precision: str = "bfloat16", fuses: bool = True, width: int | None = None,
) -> Program:  # fmt: skip
    """A step of one of `autopar.models.configs`. dropout: probability for all that it drops; None: as the model has it. width: see `narrow`."""
    config = models.config(name)
    for key, value in list(vars(config).items()) if dropout is not None else ():
        if ("dropout" in key or "pdrop" in key) and isinstance(value, float):
            setattr(config, key, dropout)
    if width is not None:
        narrow(config, width)
    shapes = models.inputs(config, batch, sequence)
    return capture_program(models.build(config, layers), shapes, mesh_axes, Cluster.of(cluster), layout, precision, fuses)


def narrow(config: Any, width: int) -> None:
    """`config` with a hidden size of `width`: heads of the size they have, all else in proportion, at most 16 words for every hidden unit."""

    def name(*known: str) -> str:
        return next(k for k in known if getattr(config, k, None) is not None)

    hidden, heads = name("hidden_size", "d_model", "n_embd"), name("num_attention_heads", "num_heads", "n_head")
    was, n = getattr(config, hidden), getattr(config, heads)
    now = max(1, width * n // was)
    setattr(config, hidden, width)
    setattr(config, heads, now)
    if getattr(config, "num_key_value_heads", None) is not None:
        config.num_key_value_heads = max(1, config.num_key_value_heads * now // n)
    for key in ("intermediate_size", "d_ff", "n_inner"):
        if getattr(config, key, None) is not None:
            setattr(config, key, getattr(config, key) * width // was)
    config.vocab_size = min(config.vocab_size, 16 * width)


def capture_program(
    model: nn.Module, inputs: Mapping[str, Any], mesh_axes: dict[str, int], cluster: Cluster, layout: str, precision: str = "bfloat16",
    fuses: bool = True,
) -> Program:  # fmt: skip
    """inputs: tensors, or shapes of token ids. precision: what is computed in; parameters and reductions are float32. fuses: whether it is compiled."""
    tensors = {k: v if isinstance(v, torch.Tensor) else torch.empty(tuple(v), dtype=torch.int64, device="meta") for k, v in inputs.items()}
    model.train()
    call = Call.of((), off_cache(model, tensors))
    cast = None if precision == "float32" else getattr(torch, precision)
    captured = capture(model, call, tuple((tuple(t.shape), t.dtype) for t in call.tensors), cast=cast)
    graph = describe(captured)
    params = dict(model.named_parameters())
    trainable = frozenset(n for n in graph.params if params[n].requires_grad)
    stored_bytes = max(DTYPE_BYTES[str(params[n].dtype).removeprefix("torch.")] for n in graph.params)
    training = TrainingConfig(trainable, "" if cast is None else "float32", master_bytes=float(stored_bytes), fuses=fuses)
    storage = {n: params[n].dtype for n in graph.params}
    return Program(captured, graph, layers_of(model, graph), storage, dict(mesh_axes), cluster, training, layout)


def layers_of(model: nn.Module, graph: Graph) -> dict[str, tuple[str, int]]:
    """Operator of forward -> the module list and number of the layer that it came from; those outside of layers are left out."""
    found = {}
    for stack in layer_periods(model):
        inside = re.compile(re.escape(stack) + r"\.(\d+)(\.|$)")
        for op in graph.ops:
            match = inside.match(op.module)
            if match and op.direction == "forward":
                found[op.name] = (stack, int(match[1]))
    return found
