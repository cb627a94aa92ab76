"""From a module to a step, all stages in order. The page to read first.

    capture       nn.Module, one call               -> Captured   fx, forward and backward in one, fake tensors at global shapes
    fuse          Captured                          -> Captured   operators of ours in place of many, where there are patterns and the plan wants them
    describe      Captured                          -> Graph      torch-free
    fold          Graph                             -> Folded     one copy of every repeated layer, with how many there are
    make_plan     Folded, Cluster, mesh             -> Plan       the integer program (`autopar.planner`); or propagate: Graph, Layout -> Plan
    shard         Captured, Graph, Plan             -> Sharded    fx, local shapes, collectives
    joint passes  Sharded                           -> Sharded    laid out, equal calls once, nothing dead
    cut           Sharded                           -> Stages     in a pipeline: a joint graph for every stage (`autopar.runtime.stages`)
    partition     Sharded                           -> Parts      forward and backward apart; what is saved between them, what runs again
    offload       Parts                             -> Parts      what the plan keeps away from the device leaves and comes back
    overlap       Parts                             -> Parts      parameters gathered ahead of their use, gradients reduced behind it; small ones together
    generalize    a half, at two sizes              -> General    where sizes vary: one graph for all of them
    lower         a half                            -> Lowered    a callable over flat tensors: eager, or Inductor with each distinct layer once

No stage looks back: passes decide nothing, the planner sees no torch, the runtime does not ask how a plan was found. `seen` and `rewritten` are the stages on either
side of the plan; `autopar.runtime.build` decides between them, on one rank for all; `autopar.runtime.step` lowers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from autopar.capture.capture import Call, Captured, Shapes, capture
from autopar.capture.describe import describe
from autopar.capture.fusions.table import fused
from autopar.capture.micro_batches import WholeBatch
from autopar.capture.randomness import refuse_unknown_random
from autopar.cost import Cost
from autopar.distributed.groups import Groups
from autopar.graph.graph import Graph
from autopar.graph.varying import Varying
from autopar.passes.manager import for_kernels, joint_passes, overlap, run_passes
from autopar.passes.offload import offload
from autopar.passes.partition import Parts, partition
from autopar.passes.shard import Sharded, shard
from autopar.passes.sharding.emit import Options
from autopar.passes.sharding.groups import group_names
from autopar.passes.stay import later
from autopar.plan.decisions import CollectiveUse, Decisions
from autopar.runtime.artifacts import Kept
from autopar.runtime.compile_cache import CompileOnce
from autopar.runtime.dump import Dump
from autopar.runtime.expert_load import ExpertLoad
from autopar.solver.fold import Folded, fold
from autopar.text.log import log, timed


@dataclass(frozen=True)
class Settings:
    """What rewriting and lowering depend on besides the plan."""

    device: torch.device
    storage: Mapping[str, torch.dtype]
    reduce: torch.dtype | None
    backend: str
    once: CompileOnce | None
    # Prices of the cluster, which say what goes beside collectives and which of them are joined; None where nothing is known of it.
    links: Cost | None = None
    joins: bool = True
    # Where activations are that the plan keeps away from the device (`autopar.offload`), and between which operators they move.
    store: str = ""
    window_of: Mapping[str, int] = field(default_factory=dict)
    load: ExpertLoad = field(default_factory=ExpertLoad)
    kept: Kept | None = None  # what was compiled ahead


@dataclass(frozen=True)
class Seen:
    """What a module computes, in three forms: with torch, without it, without repetition."""

    captured: Captured
    graph: Graph
    folded: Folded

    @cached_property
    def text(self) -> str:
        """The same for two modules that compute the same."""
        return "\n".join(f"{count} x {line}" for line, count in self.folded.lines)

    @cached_property
    def chunked(self) -> Seen | None:
        """With operators of ours where there are patterns (`autopar.capture.fusions`); None where there are none."""
        captured = fused(self.captured)
        if captured is self.captured:
            return None
        graph = describe(captured)
        return Seen(captured, graph, fold(graph))


def seen(
    model: nn.Module,
    call: Call,
    shapes: Shapes,
    *,
    loss_fn: Callable[..., torch.Tensor] | None,
    loss_only: bool,
    grad: bool,
    cast: torch.dtype | None,
    autocast: torch.dtype | None,
    varying: tuple[Varying, ...] = (),
    batch: WholeBatch | None = None,
) -> Seen:
    """See `autopar.capture.capture.capture` for the arguments. batch: that the call is a micro-batch of."""

    def captured_at(shapes: Shapes) -> Captured:
        return capture(model, call, shapes, loss_fn=loss_fn, loss_only=loss_only, grad=grad, cast=cast, autocast=autocast, varying=varying)

    with timed("capture"):
        captured = captured_at(shapes) if batch is None else batch.part(batch.samples(shapes), captured_at)
        graph = describe(captured)
        refuse_unknown_random(captured.gm)
    with timed("fold"):
        folded = fold(graph)
    log.info("captured %d operators, %d of them distinct, %d parameters", len(graph.ops), len(set(folded.rep.values())), len(graph.params))
    return Seen(captured, graph, folded)


def rewritten(
    captured: Captured, graph: Graph, plan: Decisions, groups: Groups, settings: Settings, sync: bool, accumulated: bool, dump: Dump
) -> tuple[Parts, tuple[CollectiveUse, ...]]:
    """What this rank runs, and its collectives. sync: gradients are reduced; accumulated: onto those of earlier calls."""
    sharded = joint(captured, graph, plan, groups, settings, sync, accumulated, dump)
    return halves(sharded, graph, plan, groups, settings, dump), sharded.collectives


def joint(
    captured: Captured, graph: Graph, plan: Decisions, groups: Groups, settings: Settings, sync: bool, accumulated: bool, dump: Dump
) -> Sharded:
    """Up to the joint passes: forward and backward in one graph."""
    s, fuses = settings, settings.backend == "inductor"
    options = Options(s.device, dict(s.storage), groups.prefix, s.reduce, sync, accumulated)
    with timed("shard"):
        sharded = shard(captured, graph, plan, options)
    with timed("joint passes"):
        return run_passes(sharded, groups.prefix, joint_passes(fuses=fuses), dump.graph)


def halves(sharded: Sharded, graph: Graph, plan: Decisions, groups: Groups, settings: Settings, dump: Dump) -> Parts:
    """From the joint graph, of the whole program or of a pipeline's stage, to what is lowered."""
    s, fuses = settings, settings.backend == "inductor"
    for axes in group_names(sharded.gm, groups.prefix):
        groups.ensure(axes)
    with timed("partition, offload, overlap"):
        pinned = frozenset(op.name for op in graph.ops if op.binding)
        if fuses:
            sharded = for_kernels(sharded, groups.prefix, plan.recompute)
        parts = partition(
            sharded,
            reshard_after_forward=plan.reshard_after_forward,
            recompute=plan.recompute,
            fuses=fuses,
            pinned=pinned,
            gathered=plan.gathered_once,
            once=plan.gathered_once_a_call,
        )
        dump.graph("partition, forward", parts.forward)
        dump.graph("partition, backward", parts.backward)
        parts = offload(parts, s.store, s.window_of, sharded.fake_mode)
        after = later(parts) if parts.stays else None
        parts = replace(overlap(parts, groups.prefix, s.links, s.joins), later=after)
    dump.graph("overlap, forward", parts.forward)
    dump.graph("overlap, backward", parts.backward)
    log.info("%d collectives, %d values saved for backward", len(sharded.collectives), len(parts.saved))
    return parts
