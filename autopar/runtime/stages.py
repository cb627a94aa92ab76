"""A model on the stages of a pipeline: which mesh axis they lie along, what each rank holds, and the step of a stage.

The axis `pp` of the mesh. Parameters are first spread over all ranks of it, as in fsdp, since nothing is known of stages before a call is captured. Then the program is cut, and each
parameter moves to the stages that read it: there it is a DTensor on the stage's part of the mesh, in the plan's placement; on other ranks nothing is left of it. A parameter that several
stages read (a tied embedding and head) is on each of them, equal: its gradient is summed over them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Placement as DPlacement

from autopar import _torch
from autopar.capture.belongs import belongs
from autopar.capture.capture import Captured, Role
from autopar.distributed.groups import Groups
from autopar.distributed.shards import dtensor_placements
from autopar.errors import AutoparError, InputError
from autopar.graph.graph import Graph
from autopar.graph.placement import Placement
from autopar.passes.shard import Sharded
from autopar.passes.stages.cut import Stages, cut
from autopar.passes.stages.separate import Separate, separate
from autopar.pipeline import Lists
from autopar.pipeline.actions import BACKWARD, WEIGHT
from autopar.plan.decisions import ParamChoice, PipelineChoice
from autopar.plan.plan import Plan
from autopar.planner.axes import PIPELINE as AXIS
from autopar.planner.cuts import Cut, cut_into, shares, stages_of
from autopar.planner.staged import of_the_pipeline
from autopar.runtime.compile_cache import CompileOnce
from autopar.runtime.dump import Dump
from autopar.runtime.halved_backward import HalvedBackward
from autopar.runtime.pipeline import Settings, joint
from autopar.runtime.step import Step
from autopar.tensors.memory_format import laid, order_of
from autopar.tensors.owned import cut_box, local_box


def stage_mesh(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The part of the mesh that this rank's stages are on, and the whole; of a mesh without an axis `pp` itself, and None."""
    names = mesh.mesh_dim_names or ()
    if AXIS not in names:
        return mesh, None
    others = tuple(n for n in names if n != AXIS)
    if not others:  # a stage on one device is a mesh of one
        mesh = DeviceMesh(mesh.device_type, mesh.mesh.unsqueeze(-1), mesh_dim_names=(AXIS, "dp"))
        others = ("dp",)
    return mesh[others], mesh


class Division:
    """How a module's programs are divided into stages. lists: the schedule of a training call; micro_batches: of it; mine: the stages that this process compiles; cut, holders: known from the
    first program on."""

    def __init__(self, lists: Lists, mine: Iterable[int], given: PipelineChoice | None = None) -> None:
        """given: of a plan that was made before, whose cuts hold."""
        self.lists, self.mine = lists, tuple(mine)
        self.micro_batches = lists.micro_batches
        self.cut = None if given is None or len(given.layers) != lists.stages else Cut(given.layers)
        self.holders: dict[str, tuple[int, ...]] = {}

    def where(self, graph: Graph, captured: Captured) -> dict[str, int]:
        """The stage of every operator. The first program decides about cuts."""
        matches = belongs(captured.gm, graph)
        if self.cut is None:
            self.cut = cut_into(graph, matches, self.lists.stages)
        return stages_of(graph, matches, self.cut)

    def holding(self, model: nn.Module, parts: Separate) -> None:
        """Takes note of the stages that read each parameter. Those that no program reads go with their module's layer, or where the parameter before them is: a head follows its body.

        Raises AutoparError for one that another program read on other stages: it is not there."""
        found = {name: stages for name, stages in parts.holders.items() if name not in parts.unread}
        if not self.holders:
            assert self.cut is not None
            by_layer, before = self.cut.of_layer, 0
            for name, _ in model.named_parameters(remove_duplicate=False):
                near = [s for layer, s in by_layer.items() if name.startswith(layer + ".")]
                stages = self.holders[name] = found.get(name) or (near[0] if near else before,)
                before = stages[0] if len(stages) == 1 else before
            for names in _aliases(model):
                stages = tuple(sorted({s for n in names if n in found for s in found[n]})) or self.holders[names[0]]
                self.holders |= dict.fromkeys(names, stages)
            return
        for name, stages in found.items():
            missing = [s for s in stages if self.lists.where[s] not in {self.lists.where[h] for h in self.holders[name]}]
            if missing:
                raise AutoparError(
                    f"this call reads parameter {name!r} on stage {missing[0]}, and an earlier one placed it on {self.holders[name]}",
                    where="pipeline",
                    fix="make the first call one that reads all that later ones do: a training batch",
                )

    def told(self, plan: Plan, step: StagedStep) -> Plan:
        """`plan`, with its stages and what the schedule makes of its times; a pipeline's plan as it is."""
        assert self.cut is not None
        if plan.pipeline is not None and plan.pipeline.layers == self.cut.stages:
            return plan
        forward, backward = shares(step.graph, step.parts_of_program.stages, self.lists.stages)
        if not any(backward):
            forward, backward = tuple(f / 3 for f in forward), tuple(2 * f / 3 for f in forward)
        sent = [sum(math.prod(c.shape) * c.dtype.itemsize for c in received) for received in (*step.crossing.forward[1:], ())]
        return of_the_pipeline(plan, self.lists, self.cut.stages, (forward, backward), sent)


class Pipeline(Division):
    """Of one module, on the ranks of a mesh."""

    def __init__(self, groups: Groups, lists: Lists, given: PipelineChoice | None = None) -> None:
        self.groups = groups
        self.axis: Any = groups.whole.get_group(AXIS)
        self.ranks: list[int] = dist.get_process_group_ranks(self.axis)  # of the job, one a rank of the pipeline
        self.rank = self.ranks.index(dist.get_rank())
        super().__init__(lists, lists.of_rank(self.rank), given)
        self.placed = False
        self.model: Callable[[], nn.Module | None] = lambda: None
        self.away: frozenset[str] = frozenset()  # names of parameters that this rank does not hold
        self.away_ids: frozenset[int] = frozenset()

    def rank_of(self, stage: int) -> int:
        """Of the job."""
        return self.ranks[self.lists.where[stage]]

    def number(self, samples: int) -> int:
        """Of micro-batches that a batch of so many samples is run as. Raises InputError where they do not divide it."""
        m = self.micro_batches
        if samples % m:
            near = [n for n in range(1, samples + 1) if samples % n == 0]
            raise InputError(
                f"{samples} samples do not make {m} micro-batches of one size, as a pipeline takes them",
                where=f"schedule {self.lists.name}",
                fix=f"pass batches of a multiple of {m} (drop_last=True leaves out a shorter last one), or micro_batches={max((n for n in near if n <= m), default=1)}",
            )
        return m

    def held(self, name: str) -> bool:
        return any(s in self.mine for s in self.holders[name])

    def sharers(self, name: str) -> list[int]:
        """Ranks of the job that hold a parameter, and this rank's place among stages."""
        return sorted({self.rank_of(s) for s in self.holders[name]})

    def place(self, model: nn.Module, choices: Mapping[str, ParamChoice]) -> None:
        """Parameters, spread over the whole mesh until now, go to their stages. Collective."""
        groups = self.groups
        for name, p in model.named_parameters():
            assert isinstance(p, DTensor)
            mine = self.held(name)
            choice = choices.get(name)
            how = dtensor_placements(choice.storage, groups.mesh) if choice is not None else None
            there = [self._moved(p.detach(), mine, how)]
            if p.grad is not None:
                there.append(self._moved(p.grad.detach(), mine, how))
            p.grad = None
            _torch.move_parameter(p, there[0])
            if mine and len(there) > 1:
                p.grad = there[1]
        self._settled(model)

    def follow(self, division: Division, model: nn.Module) -> None:
        """Stages are those of a division that was made ahead: from here on parameters are known to lie on them, and whoever calls this moves them there."""
        self.cut, self.holders = division.cut, dict(division.holders)
        self._settled(model)

    def _settled(self, model: nn.Module) -> None:
        named = list(model.named_parameters(remove_duplicate=False))
        self.away = frozenset(n for n, _ in named if not self.held(n))
        self.away_ids = frozenset(id(p) for n, p in named if n in self.away)
        self.model, self.placed = weakref.ref(model), True
        _torch.norms_over(self)

    def leave(self) -> None:
        """The model goes over to another mesh."""
        self.model = lambda: None

    # ---- norms of gradients (`_torch.clipping.Stage`) ------------------------------------------------------------

    def counted(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Of gradients those that this rank is the first to hold; None where they are of another model."""
        model = self.model()
        if model is None:
            return None
        names = {id(p.grad): n for n, p in model.named_parameters() if n not in self.away and p.grad is not None}
        if tensors and not any(id(t) in names for t in tensors):
            return None
        return [t for t in tensors if id(t) not in names or self.lists.where[self.holders[names[id(t)]][0]] == self.rank]

    def total(self, norm: torch.Tensor, order: float) -> torch.Tensor:
        """The norm of what has `norm` on each stage."""
        by, whole = {math.inf: dist.ReduceOp.MAX, -math.inf: dist.ReduceOp.MIN}.get(order, dist.ReduceOp.SUM), norm.to(self.groups.device)
        whole = whole.clone() if math.isinf(order) or order == 0 else whole**order
        dist.all_reduce(whole, by, group=self.axis)
        return whole if math.isinf(order) or order == 0 else whole ** (1 / order)

    # ---- places --------------------------------------------------------------------------------------------------

    def followed(self, t: DTensor, p: DTensor) -> DTensor | None:
        """What a tensor that lies on the whole mesh, such as an optimizer's state, becomes where its parameter `p` went; None where that is not here. Collective."""
        here = id(p) not in self.away_ids
        moved = self._moved(t, here, p.placements)
        return moved if here else None

    def _moved(self, t: torch.Tensor, mine: bool, how: Any) -> DTensor:
        assert isinstance(t, DTensor)
        mesh, order = self.groups.device_mesh, order_of(t)
        how = how if how is not None else self.whole_on_a_stage(tuple(t.shape))
        for axis in reversed(range(t.device_mesh.ndim)):  # one after the other: torch warns of several at once
            t = t.redistribute(placements=[Replicate() if i >= axis else p for i, p in enumerate(t.placements)])
        if not mine:
            return self.nothing(t, how)
        local = cut_box(laid(_torch.local_tensor(t), order), local_box(tuple(t.shape), mesh, how))
        return _torch.dtensor(local, mesh, how, tuple(t.shape), order)

    def whole_on_a_stage(self, shape: tuple[int, ...]) -> tuple[DPlacement, ...]:
        """How a parameter lies that no program reads."""
        return dtensor_placements(Placement.of(shape), self.groups.mesh)

    def nothing(self, t: torch.Tensor, how: tuple[DPlacement, ...]) -> DTensor:
        """In place of what other stages hold: one number, so that nothing is held, and what is computed with it is seen to be wrong."""
        mesh, shape = self.groups.device_mesh, tuple(t.shape)
        one = torch.full((), float("nan") if t.is_floating_point() else 0, dtype=t.dtype, device=self.groups.device)
        return _torch.dtensor(one.expand([n for _, n, _ in local_box(shape, mesh, how)]), mesh, how, shape, order_of(t))


def _aliases(model: nn.Module) -> list[list[str]]:
    """Names of each parameter that has several."""
    found: dict[int, list[str]] = {}
    for n, p in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(p), []).append(n)
    return [names for names in found.values() if len(names) > 1]


class StagedStep(Step):
    """The steps of a rank's stages, of one captured call; `Step` but for running: `autopar.runtime.executor` does that. before: the program and its plan as they are undivided."""

    def __init__(
        self, pipeline: Division, parts: Separate, before: tuple[Captured, Graph, Plan], groups: Groups, settings: Settings, kind: str
    ) -> None:
        self.pipeline, self.parts_of_program, self.before = pipeline, parts, before
        self.captured, self.graph, self.plan = parts.captured, parts.graph, parts.plan
        self.groups, self.settings = groups, settings
        self.general, self.units, self.stage = None, (), None
        self._checked: list[bool] = []
        self._halves: dict[int, HalvedBackward] = {}
        self._cut: dict[tuple[bool, bool], Stages] = {}
        self._kind = kind
        self.steps: dict[int, Step] = {}
        self.also(pipeline.mine)
        self.plan = next(iter(self.steps.values())).plan.answering_as(parts.plan)

    def also(self, stages: Iterable[int]) -> bool:
        """Compiles those of these stages that are not there; whether any was missing."""
        missing, plan = [s for s in stages if s not in self.steps], self.parts_of_program.plan
        for s in missing:
            kind = f"{self._kind}-stage-{s}"
            self.steps[s] = Step(self.captured, self.graph, plan, self.groups, self.settings, kind, self._joint(s))
        return bool(missing)

    def ready(self) -> None:
        """Compiles now what a call's schedule would compile when it is run: of each stage backward in each way that gradients are added, in one or in halves."""
        lists = self.pipeline.lists
        number = 1 if self.captured.samples is None else lists.micro_batches
        for s, step in self.steps.items():
            if step.base.backward is None:
                continue
            kinds = {a.kind for a in lists.ranks[lists.where[s]] if a.stage == s}
            adds = any(r.kind == "grad" for r in step.base.backward_outputs)
            for sync, accumulated in dict.fromkeys((i == number - 1, adds and i > 0) for i in range(number)):
                if WEIGHT in kinds:
                    self.halves(s).weight_of(sync, accumulated)
                if BACKWARD in kinds:
                    step.backward_of(sync, accumulated)
            if step.is_gathered_once and number > 1:
                _ = step.later

    def bound(self, groups: Groups, once: CompileOnce | None) -> None:
        """The same step on other groups of the same sizes."""
        super().bound(groups, once)
        for step in self.steps.values():
            step.bound(groups, once)

    def _joint(self, stage: int) -> Any:
        def of(sync: bool, accumulated: bool) -> Sharded:
            return self.cut(sync, accumulated).graphs[stage]

        return of

    def cut(self, sync: bool, accumulated: bool) -> Stages:
        """The program on all stages."""
        key = sync, accumulated
        if key not in self._cut:
            whole = joint(self.captured, self.graph, self.parts_of_program.plan, self.groups, self.settings, sync, accumulated, Dump(""))
            self._cut[key] = cut(whole, self.parts_of_program.stages, self.pipeline.lists.stages, self.parts_of_program.holders)
        return self._cut[key]

    def halves(self, stage: int) -> HalvedBackward:
        """Its backward in two, for schedules that have I and W."""
        if stage not in self._halves:
            self._halves[stage] = HalvedBackward(self.steps[stage])
        return self._halves[stage]

    @cached_property
    def crossing(self) -> Stages:
        """What crosses cuts, and where results are: the same whatever becomes of gradients."""
        return self.cut(True, False)

    @property
    def gradients(self) -> tuple[str, ...]:
        """Of which parameters there are any, on whatever stage."""
        results = _torch.results_of(self.captured.gm.graph)
        return tuple(r.name for r, n in zip(self.captured.outputs, results, strict=True) if r.kind == "grad" and n is not None)

    def output_like(self, role: Role) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape, on a rank, and dtype of a result; None where it is no tensor."""
        results = zip(self.captured.outputs, _torch.results_of(self.captured.gm.graph), strict=True)
        n = next(n for r, n in results if r == role)
        if not isinstance(n, fx.Node):
            return None
        return self.plan.outputs[role.index].local_shape(self.plan.mesh), n.meta["val"].dtype

    @property
    def has_backward(self) -> bool:
        return any(r.kind == "grad" for r in self.captured.outputs)


def staged(pipeline: Division, captured: Captured, graph: Graph, plan: Plan) -> Separate:
    """The program with a parameter for each stage that reads one."""
    return separate(captured, graph, plan, pipeline.where(graph, captured))
