"""Plans of pipelines that are made without the cluster: what the mesh's axis `pp` makes of a step.

    stages       the schedule's; a stage's mesh is the other axes, on as many devices side by side, so `pp` is the mesh's first axis
    program      one micro-batch on a stage's mesh, as `staged.py` scales memory: one program for all stages, whose layers are cut afterwards (`cuts.py`)
    times        each stage takes what the plan's timeline says of its layers; between stages goes what later layers read of earlier ones, as the plan has it split, over the slowest
                 link that stages are neighbours over; the schedule is replayed with that
    memory       of each rank, by the layers of its stages and the micro-batches that it has in flight; where stages of 1F1B leave some empty, they keep more and have more layers
                 (`stage_policies.py`)

A program that was folded of fewer layers than the model has is cut as the whole: a layer is as the one that was captured in its place.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from torch import nn

from autopar.capture.tile import expand_params
from autopar.cost import Cost
from autopar.errors import AutoparError, LayoutError, MeshError
from autopar.graph.graph import Graph, Op
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.pipeline import Lists, scheduled
from autopar.plan.plan import Plan
from autopar.planner.axes import PIPELINE as AXIS
from autopar.planner.axes import said
from autopar.planner.cuts import LAYER, Cut, cut_work, free_ops, layers, of_enough, producers, readers_of, units, work_of
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.layer_figures import LayerFigures, held_elements
from autopar.planner.layout import Layout
from autopar.planner.loss_head import CHUNKED, PLAIN, is_chunked
from autopar.planner.micro_batches import candidates, of_the_call
from autopar.planner.over_meshes import Planner
from autopar.planner.planning import Planned
from autopar.planner.progress import Progress
from autopar.planner.schedules import better, fastest, fits
from autopar.planner.stage_policies import StagePolicies
from autopar.planner.staged import held_share, of_a_stage, of_the_pipeline, part_of_state
from autopar.planner.task import Task, of_the_whole
from autopar.rules import lookup
from autopar.rules.strategy import placements
from autopar.solver.fold import Folded
from autopar.solver.solve import Limits
from autopar.text.sizes import format_bytes
from autopar.text.times import format_time

AGAIN = 3  # times that a plan is made of less memory, where a rank needs more than there is
TIGHT = 0.95  # of the memory: a plan that needs less would keep no more on any stage
NEARLY = 0.995  # of the memory that would do if all of it were activations


@dataclass(frozen=True)
class Pipelined:
    """lists: what every rank does; axes: of a stage's mesh, which `stage` of the devices of `whole` make; room: of the memory, what a plan of a stage's mesh may take: ranks are not alike."""

    lists: Lists
    axes: dict[str, int]
    stage: Cluster
    whole: Cluster
    room: float = 1.0

    @staticmethod
    def of(axes: Mapping[str, int], cluster: Cluster, schedule: str | None, virtual_stages: int | None, micro_batches: int) -> Pipelined:
        """axes: of the whole mesh. Raises MeshError, LayoutError."""
        lists = scheduled(schedule or "1f1b", axes[AXIS], micro_batches, virtual_stages)
        return Pipelined(lists, inner(axes), part_of(axes, cluster), cluster)

    def of_a_stage(self, t: Task) -> Task:
        """`t`, of a micro-batch on a stage's mesh, in a stage's part of memory."""
        training = of_a_stage(t.training, len(self.lists.ranks), self.lists.stages, self.lists.most_in_flight)
        training = replace(training, budget_bytes=training.budget_bytes * self.room)
        return replace(t, training=training, other=None if t.other is None else self.of_a_stage(t.other))

    def told(
        self, plan: Plan, graph: Graph, work: LayerWork, figures: LayerFigures | None, budget_bytes: float, planned: Lists | None = None,
        stages: tuple[tuple[int, ...], ...] = (),
    ) -> Plan:  # fmt: skip
        """`plan`, of all micro-batches on a stage's mesh as if that had all layers, as that of the pipeline. figures: of its layers; budget_bytes: of a device; planned: the schedule that it was made for,
        default this one; stages: layers of each, by number, default such that the slowest is as fast as can be. Raises LayoutError."""
        of_enough(work.layers, self.lists.stages)
        seconds = (work.forward, work.backward) if figures is None else (figures.forward_s, figures.backward_s)
        cut = cut_work(work.layers, [f + b for f, b in zip(*seconds, strict=True)], self.lists.stages)
        if stages:
            cut = Cut(tuple(tuple(work.layers[i] for i in mine) for mine in stages))
        sent = self.sent_bytes(plan, graph, work, cut)
        forward, backward = (of_stages(cut, work.layers, half) for half in seconds)
        behind, alone = (of_stages(cut, work.layers, half) for half in (work.backward, work.weight))
        # The first stage sends no gradients: all of its backward is W.
        weight = [1.0, *(w / b if b else 0.0 for w, b in zip(alone[1:], behind[1:], strict=True))]
        made = of_the_pipeline(plan, self.lists, cut.stages, (forward, backward), sent, self.hop_s(sent), weight, planned)
        if figures is not None:
            of_layer = cut.of_layer
            ranks = figures.rank_bytes([of_layer[layer] for layer in work.layers], self.lists)
            made = replace(
                made,
                pipeline=None if made.pipeline is None else replace(made.pipeline, peak_bytes=tuple(ranks)),
                predicted={**made.predicted, "peak_memory_bytes": max(ranks), "budget_bytes": budget_bytes},
            ).answering_as(made)
        told = dict(made.solver)
        if "loss_head" in told:  # its figures are of the mesh alone
            told["loss_head"] = CHUNKED if is_chunked(plan) else PLAIN
        if "step_time_s" in made.predicted and "objective_s" in told and "bound_s" in told:
            # The bound is of this pipeline's program alone; it is as far from the plan as it was.
            step_s = made.predicted["step_time_s"]
            told |= {"objective_s": step_s, "bound_s": step_s * min(1.0, float(told["bound_s"]) / float(told["objective_s"]))}
        return replace(made, cluster=self.whole.name, solver=told).answering_as(made)

    def hop_s(self, sent: Sequence[float]) -> tuple[float, ...]:
        """By rank, what it hands to the next one takes: of its stages the most."""
        ranks = len(self.lists.ranks)
        if ranks == 1:
            return (0.0,)
        mesh = Mesh.of({AXIS: ranks, **self.axes})
        cost = Cost(self.whole, mesh)
        most = [max((b for s, b in enumerate(sent) if self.lists.where[s] == r), default=0.0) for r in range(ranks)]
        return tuple(cost.collective("send", mesh.children(AXIS), b).seconds for b in most)

    def sent_bytes(self, plan: Plan, graph: Graph, work: LayerWork, cut: Cut) -> list[float]:
        """By stage, of a micro-batch, what each of its devices hands to the next stage."""
        after = work.handed_on(graph, lambda op: self.shares(plan, op))
        ends = [work.like[stage[-1]] for stage in cut.stages]
        return [after[min(end, len(after) - 1)] if after else 0.0 for end in ends[:-1]] + [0.0]

    def shares(self, plan: Plan, op: Op) -> list[float]:
        """Of each of an operator's results the share that a device has."""
        choice = plan.ops.get(op.name)
        if choice is None:
            return [1.0] * len(op.outputs)
        shapes = tuple(None if t is None else t.shape for t in op.outputs)
        made = placements(lookup(op), choice.strategy, tuple(t.shape for t in op.inputs), shapes, choice.partial)[1]
        return [1.0 if p is None else p.share(plan.mesh) for p in made]


@dataclass(frozen=True)
class Alike:
    """plan: of a stage's mesh, with the same policies on all stages; task: what it is of; training: for the whole of a device's memory; solved: what it was made of."""

    pipelined: Pipelined
    plan: Plan
    task: Task
    training: TrainingConfig
    solved: Planned | None
    work: LayerWork

    def told(self, lists: Lists) -> Plan:
        """As that of the pipeline, by a schedule. Raises LayoutError."""
        p = self.pipelined
        return replace(p, lists=lists).told(self.plan, self.task.folded.graph, self.work, self.figures, self.budget_bytes, p.lists)

    def by_stage(self, lists: Lists) -> Plan | None:
        """With layers dealt to the stages with policies of their own, where that can be, and memory decides about policies."""
        told = self.told(lists)
        is_tight = self.plan.predicted.get("peak_memory_bytes", 0.0) > TIGHT * self.plan.predicted.get("budget_bytes", 0.0)
        if not (is_tight or not fits(told)) or self.policies is None or told.pipeline is None or not told.pipeline.hop_s or told.offload:
            return None
        weight = [w / b if b else 0.0 for w, b in zip(told.pipeline.weight_s, told.pipeline.backward_s, strict=True)]
        found = self.policies.find(lists, told.pipeline.hop_s, weight)
        if found is None:
            return None
        made = of_the_call(of_the_whole(found.plan, self.task.folded, self.task.model), lists.micro_batches)
        return replace(self.pipelined, lists=lists).told(
            made, self.task.folded.graph, self.work, found.figures, self.budget_bytes, stages=found.stages
        )

    @cached_property
    def figures(self) -> LayerFigures | None:
        """Of the plan's layers, whatever the schedule."""
        return self.work.figures(self.plan, part_of_state(self.pipelined.lists))

    @property
    def budget_bytes(self) -> float:
        return min(self.training.budget_bytes, self.pipelined.whole.device.memory_bytes)

    @cached_property
    def policies(self) -> StagePolicies | None:
        if self.solved is None:
            return None
        return StagePolicies(
            self.solved, self.task.folded, self.training, self.work.layers, self.work.figures, len(self.pipelined.lists.ranks)
        )


@dataclass
class Asked:
    """A pipeline that is asked for, and what its stages are planned with. captured: so many micro-batches, on a cluster and a mesh."""

    captured: Callable[[int, Cluster, Mapping[str, int]], Task]
    batch: int
    limits: Limits
    on_progress: Progress
    layout: str | Layout | None
    least: bool
    has_begun: bool = False

    def plan(
        self,
        model: nn.Module,
        axes: Mapping[str, int],
        cluster: Cluster,
        schedule: str | None,
        virtual_stages: int | None,
        number: int | str,
    ) -> Plan:
        """number: of micro-batches, or AUTO. Raises MeshError, LayoutError, InfeasibleError."""
        part_of(axes, cluster)  # says what is wrong with the mesh before anything is captured

        def of(m: int) -> Plan:
            if self.batch % m:
                raise LayoutError(
                    f"{self.batch} samples do not make {m} micro-batches of one size, as a pipeline takes them",
                    where="micro-batches",
                    fix="make their number one that divides the batch",
                )
            p = Pipelined.of(axes, cluster, schedule, virtual_stages, m)
            alike = self.alike(p, m, model)
            first = alike.told(p.lists)
            if schedule is not None or virtual_stages is not None:
                found = first
                if not self.least and (other := alike.by_stage(p.lists)) is not None and better(other, first):
                    found = other
            else:
                kinds = {op.name: lookup(op).kind for op in alike.task.folded.graph.ops}
                found = fastest(
                    first, p.lists, len(alike.work.layers), kinds, alike.told, (lambda x: None) if self.least else alike.by_stage,
                    lambda x: self.fitting(self.alike(replace(p, lists=x), m, model), m, model),
                )  # fmt: skip
            return found if fits(found) else self.fitting(alike, m, model)

        if isinstance(number, int):
            return of(number)
        late = self.on_progress.start + self.limits.seconds
        numbers = [m for m in candidates(self.batch) if self.batch % m == 0]
        return best_number(numbers, axes[AXIS], of, lambda: not self.limits.in_proportion and time.perf_counter() > late - self.longest_s())

    def alike(self, p: Pipelined, m: int, model: nn.Module) -> Alike:
        """A plan of a stage's mesh, as if that had all layers. Raises InfeasibleError."""
        captured = cache(lambda k: self.captured(k, p.stage, p.axes))
        planner = Planner(lambda k: p.of_a_stage(captured(k)), self.batch, self.limits, self.on_progress, self.layout, self.least)
        planner.has_begun, self.has_begun, planner.keeps_solved = self.has_begun, True, True
        try:
            made = planner.plan(p.axes, m)
        except InfeasibleError as e:
            raise e.of_one_micro_batch() from None
        t = planner.captured(m)
        t = t.other if t.other is not None and is_chunked(made) else t
        solved = planner.solved.get((tuple(t.mesh_axes.values()), m, t.form))
        whole = captured(m)
        training = (whole.other if whole.other is not None and t.form == whole.other.form else whole).training
        return Alike(p, made, t, training, solved, LayerWork.of(t.folded, model))

    def fitting(self, alike: Alike, m: int, model: nn.Module) -> Plan:
        """The plan that has the same policies on all stages, of less memory where one of the ranks needs more than there is. Raises InfeasibleError."""
        p, told = alike.pipelined, alike.told(alike.pipelined.lists)
        for _ in range(AGAIN):
            if fits(told):
                return told
            budget, used = told.predicted["budget_bytes"], alike.plan.predicted["peak_memory_bytes"] * held_share(p.lists)
            p = replace(p, room=min(p.room, used / budget) * budget / told.predicted["peak_memory_bytes"] * NEARLY)
            alike = self.alike(p, m, model)
            told = alike.told(p.lists)
        if fits(told):
            return told
        assert told.pipeline is not None
        peaks, budget = told.pipeline.peak_bytes, told.predicted["budget_bytes"]
        raise InfeasibleError(
            constraint=f"memory of rank {peaks.index(max(peaks))} of the pipeline",
            shortfall_bytes=int(max(peaks) - budget),
            remedy=f"{format_bytes(max(peaks))} a device would do; or more stages, smaller micro-batches or shorter sequences",
        )

    def longest_s(self) -> float:
        """What planning another number may take: half of what all have taken so far."""
        return (time.perf_counter() - self.on_progress.start) / 2


def inner(axes: Mapping[str, int]) -> dict[str, int]:
    """The axes of a stage's mesh."""
    return {n: s for n, s in axes.items() if n != AXIS} or {"dp": 1}


def part_of(axes: Mapping[str, int], cluster: Cluster) -> Cluster:
    """The devices of a stage, side by side. Raises MeshError."""
    if next(iter(axes)) != AXIS:
        raise MeshError(
            f"the axis {AXIS!r} is not the first of the mesh {said(axes)}",
            where="mesh",
            fix=f"write it first: stages lie on devices side by side, such as {AXIS}=2,dp=4",
        )
    size, per_node = math.prod(inner(axes).values()), cluster.devices_per_node
    if size % per_node == 0:
        return cluster.part(size // per_node, per_node)
    if per_node % size == 0:
        return cluster.part(1, size)
    raise MeshError(
        f"a stage of {size} devices is neither a part of a node of {per_node} nor several whole ones",
        where=f"mesh {said(axes)}",
        fix=f"make {AXIS} a size that divides the nodes, or a node's devices",
    )


def of_stages(cut: Cut, layers: Sequence[str], work: Sequence[float]) -> list[float]:
    stage = cut.of_layer
    found = [0.0] * len(cut.stages)
    for layer, w in zip(layers, work, strict=True):
        found[stage[layer]] += w
    return found


@dataclass(frozen=True)
class LayerWork:
    """layers: of the whole model, in order; forward, backward: what each has to do; weight: of backward what makes gradients of parameters alone, which no other layer waits for; like: the number of the captured layer in whose place each is."""

    layers: tuple[str, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    like: Mapping[str, int]
    unit: Mapping[str, int]  # operator of forward -> number of its captured layer
    folded: Folded
    model: nn.Module

    def figures(self, plan: Plan, part: float = 1.0) -> LayerFigures | None:
        """What each layer takes by `plan`, of all of them on one mesh, which counts so much of their state; None where it has no profile."""
        if plan.profile is None or not self.layers:
            return None
        whole = of_the_whole(plan, self.folded, self.model)
        held = held_elements(whole, self.folded.graph, self.layers, self.unit, max(self.like.values()))
        return LayerFigures.of(plan, self.folded, self.layers, (self.forward, self.backward), held, part)

    @property
    def both(self) -> list[float]:
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]

    @staticmethod
    def of(folded: Folded, model: nn.Module) -> LayerWork:
        graph = folded.graph
        free = free_ops(graph)
        captured = layers(graph, free)
        number = {layer: i for i, layer in enumerate(captured)}
        unit = units(graph, free, number)
        behind = layers_behind(graph, free, number, unit)
        waited = waited_for(graph, behind)
        ahead, back, alone = ([0.0] * len(captured) for _ in range(3))
        for op in graph.ops:
            if op.direction == "forward" and op.name in unit:
                ahead[unit[op.name]] += work_of(op)
            elif op.name in behind:
                back[behind[op.name]] += work_of(op)
                alone[behind[op.name]] += 0.0 if op.name in waited else work_of(op)
        whole, like = in_the_whole(folded, model, captured)
        forward, backward, weight = ([half[like[layer]] for layer in whole] for half in (ahead, back, alone))
        # What comes before the layers and after them is in the first and the last that were captured.
        for at, of in ((0, 0), (-1, len(captured) - 1)):
            if whole and like[whole[at]] != of:
                for half, seen in ((forward, ahead), (backward, back), (weight, alone)):
                    half[at] += max(0.0, seen[of] - seen[like[whole[at]]])
        return LayerWork(tuple(whole), tuple(forward), tuple(backward), tuple(weight), like, unit, folded, model)

    def handed_on(self, graph: Graph, shares: Callable[[Op], list[float]]) -> list[float]:
        """By captured layer but the last, bytes on a device of what later ones read of it and those before it. shares: of each result of an operator."""
        ops = {op.name: op for op in graph.ops}
        last: dict[tuple[str, int], int] = {}  # result -> the last layer that reads it
        place = {t.name: (op.name, i) for op in graph.ops for i, t in enumerate(op.outputs) if t is not None}
        for op in graph.ops:
            for t in op.inputs:
                key = place.get(t.name)
                if key is not None and key[0] in self.unit and op.name in self.unit:
                    last[key] = max(last.get(key, 0), self.unit[op.name])
        found = [0.0] * max(0, 1 + max(self.unit.values(), default=0))
        for (name, i), end in last.items():
            made = ops[name].outputs[i]
            assert made is not None
            mine = made.nbytes * shares(ops[name])[i] if end > self.unit[name] else 0.0
            for layer in range(self.unit[name], end):
                found[layer] += mine
        return found[:-1]


def layers_behind(graph: Graph, free: frozenset[str], number: Mapping[str, int], unit: Mapping[str, int]) -> dict[str, int]:
    """The layer of every operator of backward that is not free: its module's, else the earliest of what it reads of backward, else that of the operator of forward whose module it names, else the last.
    number: of layers; unit: of operators of forward."""
    if not number:
        return {}
    of_module = {op.module: unit[op.name] for op in graph.ops if op.direction == "forward" and op.name in unit}
    found: dict[str, int] = {}
    for op in graph.ops:
        if op.direction == "backward" and op.name not in free:
            named = LAYER.match(op.module)
            at = number.get(named[1]) if named else None
            default = of_module.get(op.module, len(number) - 1)
            found[op.name] = min((found[a] for a in producers(op) if a in found), default=default) if at is None else at
    return found


def waited_for(graph: Graph, behind: Mapping[str, int]) -> set[str]:
    """Operators of backward from which one of an earlier layer follows. behind: the layer of each."""
    readers, found = readers_of(graph), set[str]()
    for op in reversed(graph.ops):
        at = behind.get(op.name)
        if at is not None and any(r in found or behind.get(r, at) < at for r in readers.get(op.name, ())):
            found.add(op.name)
    return found


def in_the_whole(folded: Folded, model: nn.Module, captured: Sequence[str]) -> tuple[list[str], dict[str, int]]:
    """The model's layers in order, and for each the number of the captured one that it is as."""
    number = {layer: i for i, layer in enumerate(captured)}
    params = {n: tuple(p.shape) for n, p in model.named_parameters()}
    like: dict[str, int] = {}
    for name, stands in expand_params(folded, params).items():
        full, short = LAYER.match(name), LAYER.match(stands)
        if full and short and short[1] in number:
            like.setdefault(full[1], number[short[1]])
    if set(like) <= set(number):  # captured whole
        return list(captured), dict(number)
    lists: dict[str, list[str]] = {}
    for layer in like:
        lists.setdefault(layer.rpartition(".")[0], []).append(layer)
    order = dict.fromkeys(layer.rpartition(".")[0] for layer in captured)
    return [layer for path in order for layer in sorted(lists.get(path, ()), key=lambda x: int(x.rpartition(".")[2]))], like


def best_number(numbers: Sequence[int], ranks: int, planned: Callable[[int], Plan], is_late: Callable[[], bool]) -> Plan:
    """The fastest plan over numbers of micro-batches, from four a rank on to more, or where that is no faster to fewer, as long as that is faster. Raises what the first raises where none fits."""
    order = sorted(numbers)
    at = next((i for i, m in enumerate(order) if m >= 4 * ranks), len(order) - 1)
    made: dict[int, Plan] = {}
    errors: list[AutoparError] = []

    def takes(i: int) -> float:
        m = order[i]
        if m not in made:
            try:
                made[m] = planned(m)
            except AutoparError as e:
                errors.append(e)
                return math.inf
        return made[m].predicted["step_time_s"]

    best = at
    takes(at)
    for step in (1, -1):
        if best != at:
            break
        i = at + step
        while 0 <= i < len(order) and not (made and is_late()) and (takes(i) < takes(best) or not made):
            best = i
            i += step
    if not made:
        raise errors[0]
    found = min(made.values(), key=lambda p: p.predicted["step_time_s"])
    tried = "; ".join(f"{m}: {format_time(p.predicted['step_time_s'])}" for m, p in sorted(made.items()))
    return replace(found, solver={**found.solver, "micro_batches": tried}).answering_as(found)
