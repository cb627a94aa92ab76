"""Steps for other numbers of ranks: for fewer, made before any is lost, so that a loss compiles nothing, and for more, where processes may join.

Survivors are renumbered from 0, and graphs are the same text on every rank: one step for n - 1 ranks serves, whoever is lost. It is made of what was captured for n, by
the same hand layout or the planner, for groups that do not exist yet; placeholders of their size have their names, since a compiler asks for a group's size. After a loss the names
get real groups. Steps of a size that is left are kept for when it comes again.

Of a pipeline a process compiles the stages that may become its own: a rank moves down by one for each that is lost before it, and up for each that joins. Which stage reads which parameters is known by
then, so that what moves after a loss goes straight to its stage.

A call whose program is for several sizes, or one of micro-batches of two sizes, is not made ahead: it is captured and compiled when it comes, and counted.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from autopar import _torch
from autopar.capture.capture import Captured
from autopar.distributed.agreement import all_gathered
from autopar.distributed.groups import Groups, prefix_of
from autopar.elastic.meshes import axes_for, ranks_of
from autopar.errors import AutoparError
from autopar.graph.graph import Graph
from autopar.graph.mesh import Mesh
from autopar.passes.sharding.groups import group_name
from autopar.passes.stages.separate import owner
from autopar.pipeline import Lists
from autopar.plan.plan import Plan
from autopar.planner.axes import PIPELINE
from autopar.planner.layout import Layout
from autopar.planner.micro_batches import AUTO
from autopar.planner.propagate import propagate
from autopar.planner.request import following
from autopar.runtime.build import Builder
from autopar.runtime.module import ParallelModule
from autopar.runtime.pipeline import Seen, Settings
from autopar.runtime.programs import Program
from autopar.runtime.stages import Division, StagedStep, staged
from autopar.runtime.step import Step
from autopar.solver.fold import fold
from autopar.text.progress import told

Scheduled = Callable[[int], Lists]  # a schedule of so many ranks of a pipeline


class Placeholder(Groups):
    """The groups of a mesh that does not exist yet, of a pipeline those of a stage. axes: sizes of the whole; asked: axes that a step has collectives over, in order."""

    def __init__(self, like: Groups, axes: dict[str, int]) -> None:
        self.axes = {a: n for a, n in axes.items() if a != PIPELINE} or {"dp": 1}  # as `stage_mesh`
        self.mesh = Mesh.of(self.axes)
        self.ranks = list(range(math.prod(axes.values())))
        self.here = self.ranks[: self.mesh.size]
        self.prefix = prefix_of(self.ranks, self.axes, like.device_mesh.device_type)
        self.asked: list[tuple[str, ...]] = []
        self.held: dict[tuple[str, ...], Any] = {}
        self.tells, self.talks, self.alone = dist.get_rank() == 0, False, True

    @property
    def rank(self) -> int:
        return 0 if self.tells else 1

    def ensure(self, axes: tuple[str, ...]) -> str:
        name = group_name(self.prefix, axes)
        if axes not in self.asked:
            self.asked.append(axes)
        self.held[axes] = _torch.placeholder_group(name, self.mesh.sizes_product(axes))  # a name goes when groups are left
        return name


@dataclass
class Ready:
    """What was made ahead for a number of ranks. kinds: of calls, each with its program; division: where it is a pipeline."""

    groups: Placeholder
    division: Division | None
    kinds: list[tuple[Any, Program]] = field(default_factory=list)


class Ahead:
    """Of one module. made: how many steps; left_out: of how many programs there are none; seconds: that making them took. smallest: number of ranks to be ready for; largest: the same, where processes may join; axes: those that meshes of other sizes follow; place: of this process among
    `largest` (its rank when all are there); default: its rank now."""

    def __init__(
        self,
        model: ParallelModule,
        smallest: int,
        largest: int = 0,
        axes: Mapping[str, int] | None = None,
        scheduled: Scheduled | None = None,
        place: int | None = None,
    ) -> None:
        self.model, self.smallest, self.largest = model, smallest, max(largest, len(model._builder.groups.ranks))
        self.place = model._builder.groups.rank if place is None else place
        whole = model._builder.groups.whole
        self.axes = dict(axes or zip(whole.mesh_dim_names or (), whole.shape, strict=True))
        self.scheduled = scheduled
        self.ready: dict[int, Ready] = {}
        self.plans: dict[int, Plan] = {}  # where there is no hand layout
        self.given: set[int] = set()  # sizes whose plans the run has told this process, not applied yet
        self.seen: list[Program] = []  # programs that were made ahead already, or cannot be
        self.made, self.left_out, self.seconds = 0, 0, 0.0
        self._check_sizes(smallest)

    def _check_sizes(self, smallest: int) -> None:
        """Raises AutoparError where the layout, or the schedule, has no form on some number of ranks down to `smallest`, or up to `largest`: now, not when it comes."""
        builder = self.model._builder
        n = len(builder.groups.ranks)
        if smallest < 1:
            raise AutoparError(
                f"survive={n - smallest} of {n} processes leaves none",
                where="autopar.compile, elastic=",
                fix=f"survive={n - 1} at most, or more processes",
            )
        layout = builder.config.layout
        for other in range(max(n, self.largest), smallest - 1, -1):
            try:
                self.lists_for(other)
                if layout is not None:  # else they are planned once there is a program
                    Layout.of(layout, Mesh.of({a: size for a, size in self.axes_for(other).items() if a != PIPELINE}))
            except AutoparError as e:
                raise AutoparError(
                    f"there is no plan for {other} processes: {e.what}", where=e.where or "autopar.compile, elastic=", fix=e.fix
                ) from e

    def lists_for(self, ranks: int) -> Lists | None:
        """The schedule of a pipeline of so many ranks."""
        axes = self.axes_for(ranks)
        return None if self.scheduled is None or PIPELINE not in axes else self.scheduled(axes[PIPELINE])

    def axes_for(self, ranks: int) -> dict[str, int]:
        """The mesh of so many ranks."""
        return axes_for(self.axes, ranks)

    def stages_of(self, ranks: int, lists: Lists) -> tuple[int, ...]:
        """That this process may have when so many ranks are there."""
        axes = self.axes_for(ranks)
        inner = math.prod(list(axes.values())[list(axes).index(PIPELINE) + 1 :])
        along = {r // inner % axes[PIPELINE] for r in ranks_of(self.place, self.largest, ranks)}
        return tuple(sorted(s for r in along for s in lists.of_rank(r)))

    def _ready(self, ranks: int) -> Ready:
        if ranks not in self.ready:
            lists = self.lists_for(ranks)
            division = None if lists is None else Division(lists, self.stages_of(ranks, lists))
            self.ready[ranks] = Ready(Placeholder(self.model._builder.groups, self.axes_for(ranks)), division)
        return self.ready[ranks]

    def follow(self, plans: Mapping[int, Plan]) -> None:
        """Of a process that joins, before it has steps: the plans that the run has, for the size that the module lies on and for others."""
        model, size = self.model, len(self.model._builder.groups.ranks)
        self.plans, self.given = dict(plans), set(plans) - {size}
        if size in plans:
            config = replace(model._config, request=replace(model._config.request, plan=plans[size]))
            model._lie_on(Builder(model._builder.model, model._builder.groups.whole, config))

    def make(self) -> None:
        """Of the programs that the module has by now and that are new, the steps for all other numbers of ranks. All ranks call it alike."""
        programs = [(kind, p) for kind, held in self.model._programs.kinds.items() for p in held if not any(p is q for q in self.seen)]
        programs.sort(key=lambda x: not x[1].step.has_backward)  # those that train are planned, others follow
        if not programs:
            return
        begun, builder, size = time.perf_counter(), self.model._builder, len(self.model._builder.groups.ranks)
        sizes = [n for n in range(self.largest, self.smallest - 1, -1) if n != size]
        with told(f"steps for {', '.join(map(str, sizes))} processes made ahead", builder.groups.rank == 0 and len(sizes) > 0):
            for kind, program in programs:
                self.seen.append(program)
                step = program.step
                if step.has_backward and builder.config.layout is None:
                    assert builder.plan is not None
                    self.plans.setdefault(size, builder.plan if isinstance(step, StagedStep) else step.plan)
                if self._is_left_out(program):
                    self.left_out += 1
                    continue
                if isinstance(step, StagedStep) and (lists := builder.config.schedule) is not None:
                    step.also(self.stages_of(size, lists))  # of one that joins, the stages that it may join
                    step.ready()
                for n in sizes:
                    self._ready(n).kinds.append((kind, replace(program, step=self._step(step, self._ready(n)), sized={})))
                    self.made += 1
        self.seconds += time.perf_counter() - begun

    def _is_left_out(self, program: Program) -> bool:
        samples, number = program.step.captured.samples, self.model._builder.micro_batches
        if self.model._config.micro_batches == AUTO:  # which may be another number on another mesh
            return samples is not None
        return program.is_general or (samples is not None and (not number or samples.of % number != 0))

    def _step(self, old: Step, ready: Ready) -> Step:
        """`old` for the mesh of `ready`."""
        builder, groups = self.model._builder, ready.groups
        before = old.before if isinstance(old, StagedStep) else (old.captured, old.graph, old.plan)
        plan = self._plan(old.has_backward, before, ready)
        links = None if groups.mesh.size == 1 else builder.links_of(groups.mesh)
        settings: Settings = replace(old.settings, links=links, store=builder.store(plan))
        step: Step
        if ready.division is None:
            step = Step(*before[:2], plan, groups, settings, "")
            for variant in old.backwards:
                step.backward_of(*variant)
            if step.is_gathered_once and old._later is not None:
                _ = step.later
        else:
            step = self._staged((*before[:2], plan), ready, ready.division, settings)
        step.program = old.program
        return step

    def _staged(self, before: tuple[Captured, Graph, Plan], ready: Ready, division: Division, settings: Settings) -> StagedStep:
        parts = staged(division, *before)
        division.holding(self.model._builder.model, parts)
        stored = {owner(n): dtype for n, dtype in settings.storage.items()}
        # Ranks compile different stages, so each its own.
        settings = replace(settings, storage={n: stored[owner(n)] for n in parts.graph.params}, once=None)
        step = StagedStep(division, parts, before, ready.groups, settings, "")
        step.ready()
        n = len(ready.groups.ranks)
        if step.has_backward and n in self.plans:
            self.plans[n] = division.told(self.plans[n], step)
        return step

    def _plan(self, trains: bool, before: tuple[Captured, Graph, Plan], ready: Ready) -> Plan:
        """By the same hand layout; else by the planner, for the first program that trains, which others follow. before: a program, with its plan on the mesh that there is. Collective.
        Raises AutoparError where there is none."""
        builder, groups, n = self.model._builder, ready.groups, len(ready.groups.ranks)
        captured, graph, old = before
        trainable = frozenset(name for name, c in old.params.items() if c.trainable)
        if builder.config.layout is not None:
            return propagate(graph, Layout.of(builder.config.layout, groups.mesh), groups.axes, trainable)
        first = self.plans.get(n)
        if first is not None and n not in self.given:
            return propagate(graph, following(first), groups.axes, trainable, first.params)
        if not trains:
            return propagate(graph, builder.first_on(groups.mesh), groups.axes, trainable)
        planning = builder.planning_for(groups.axes, first, self.lists_for(n))
        try:
            made = planning.make_plan(Seen(captured, graph, fold(graph)), *builder.parameters(graph))
        except AutoparError as e:
            fewer = len(builder.groups.ranks) - n - 1
            raise AutoparError(
                f"there is no plan for {n} processes, which may be left: {e.what}",
                where=e.where or "autopar.compile, elastic=",
                fix=f"{e.fix}; or survive={fewer} losses" if fewer > 0 else e.fix,
            ) from e
        self.plans[n] = made
        self.given.discard(n)
        return made

    def keep(self) -> None:
        """Before the mesh is left: the steps that there are for its size, apart from its groups, which end."""
        model, groups = self.model, self.model._builder.groups
        if not model._programs.kinds:
            return
        ready = self._ready(len(groups.ranks))
        if (pipeline := model._builder.pipeline) is not None and ready.division is not None and ready.division.cut is None:
            ready.division.cut, ready.division.holders = pipeline.cut, pipeline.holders
        ready.groups.asked = sorted({*ready.groups.asked, *(axes for axes in groups.made if axes[:1] != ("between",))})
        for kind, programs in model._programs.kinds.items():
            for program in programs:
                if self._is_left_out(program):
                    continue
                program.step.bound(ready.groups, None)
                if not any(program is p for _, p in ready.kinds):
                    ready.kinds.append((kind, program))

    def common(self) -> None:
        """Of the programs that there are, those stay that all ranks have, with the same text: one that joined has fewer, or others. Collective."""
        kinds, groups = self.model._programs.kinds, self.model._builder.groups
        texts = {id(p): _text(kind, p) for kind, programs in kinds.items() for p in programs}
        shared = set.intersection(*map(set, all_gathered(groups, sorted(texts.values()))))
        for kind, programs in list(kinds.items()):
            programs[:] = sorted((p for p in programs if texts[id(p)] in shared), key=lambda p: texts[id(p)])
            for p in programs:
                p.step.first_run()  # checked on some of them, perhaps, and so on none any more
            if not programs:
                del kinds[kind]
        self.model._programs.sizes = {}  # which sizes vary, one that joined has not seen

    def take(self, joined: bool = False) -> bool:
        """On the mesh that the module lies on now: the steps that were made for its size, bound to its groups. False where there are none. joined: some ranks may have others than
        the rest. Collective."""
        builder = self.model._builder
        pipeline, ready, whole = builder.pipeline, self.ready.get(len(builder.groups.ranks)), True
        assert ready is None or ready.groups.prefix == builder.groups.prefix
        if ready is not None and pipeline is not None:
            for step in (p.step for _, p in ready.kinds):
                assert isinstance(step, StagedStep)
                whole = whole and not step.also(pipeline.mine)
        asked = [] if ready is None else ready.groups.asked
        if joined or pipeline is not None:  # stages have other collectives
            asked = sorted({tuple(axes) for theirs in all_gathered(builder.groups, asked) for axes in theirs})
        for axes in asked:
            builder.groups.ensure(axes)
        if ready is None:
            return False
        for kind, program in ready.kinds:
            program.step.bound(builder.groups, builder.once)
            self.model._programs.kinds.setdefault(kind, []).append(program)
            self.seen.append(program)
        if pipeline is not None and ready.kinds:
            assert ready.division is not None
            pipeline.follow(ready.division, builder.model)
        return bool(ready.kinds) and whole

    def adopt(self) -> None:
        """The plan of the mesh that the module lies on now is that of the steps that there are, and says where parameters are stored."""
        builder = self.model._builder
        steps = [p.step for programs in self.model._programs.kinds.values() for p in programs]
        params = {n: c for s in steps for n, c in (s.before[2] if isinstance(s, StagedStep) else s.plan).params.items()}
        for s in sorted(steps, key=lambda s: s.has_backward):
            builder.plan = replace(s.plan, params=params).answering_as(s.plan)
            if isinstance(s, StagedStep) and builder.pipeline is not None:
                builder.plan = builder.pipeline.told(builder.plan, s)
            builder.planned = builder.planned or s.has_backward


def _text(kind: Any, program: Program) -> str:
    """The same on two ranks where it is the same program, compiled alike."""
    step = program.step
    stored = [f"{n}: {c.storage}" for n, c in sorted(step.plan.params.items())]
    if isinstance(step, StagedStep):  # of which each rank has some stages compiled
        said, graphs = [step.pipeline.lists.text()], [s.gm for s in step.crossing.graphs]
    else:
        halves = [step.base.forward, *(parts.backward for _, (parts, _) in sorted(step.backwards.items()))]
        said, graphs = [repr(sorted(step.backwards))], [gm for gm in halves if gm is not None]
    text = "\n".join([repr(kind), repr(program.shapes), *said, *stored, *(gm.code for gm in graphs)])
    return hashlib.sha256(text.encode()).hexdigest()
