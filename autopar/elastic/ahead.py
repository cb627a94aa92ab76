"""Steps for other numbers of ranks: for fewer, made before any is lost, so that a loss compiles nothing, and for more, where processes may join.

Survivors are renumbered from 0, and graphs are the same text on every rank: one step for n - 1 ranks serves, whoever is lost. It is made of what was captured for n, by
the same hand layout, for groups that do not exist yet; placeholders of their size have their names, since a compiler asks for a group's size. After a loss the names
get real groups. Steps of a size that is left are kept for when it comes again. A call whose program is for several sizes, or a micro-batch, is not made ahead: it is captured and compiled when it comes, and counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from autopar import _torch
from autopar.distributed.agreement import all_gathered
from autopar.distributed.groups import Groups, prefix_of
from autopar.elastic.meshes import axes_for
from autopar.errors import AutoparError
from autopar.graph.mesh import Mesh
from autopar.passes.sharding.groups import group_name
from autopar.pipeline import Lists
from autopar.plan.plan import Plan
from autopar.planner.axes import PIPELINE
from autopar.planner.layout import Layout
from autopar.planner.propagate import propagate
from autopar.planner.request import following
from autopar.runtime.build import Builder
from autopar.runtime.module import ParallelModule
from autopar.runtime.pipeline import Seen, Settings
from autopar.runtime.programs import Program
from autopar.runtime.step import Step
from autopar.solver.fold import fold
from autopar.text.progress import told

Scheduled = Callable[[int], Lists]  # a schedule of so many ranks of a pipeline


class Placeholder(Groups):
    """The groups of a mesh that does not exist yet. axes: its sizes; asked: axes that a step has collectives over, in order."""

    def __init__(self, like: Groups, axes: dict[str, int]) -> None:
        self.axes = axes
        self.mesh = Mesh.of(self.axes)
        self.here = self.ranks = list(range(self.mesh.size))
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
    """What was made ahead for a number of ranks. kinds: of calls, each with its program."""

    groups: Placeholder
    kinds: list[tuple[Any, Program]] = field(default_factory=list)


class Ahead:
    """Of one module. smallest: number of ranks to be ready for; largest: the same, where processes may join; axes: those that meshes of other sizes follow."""

    def __init__(
        self,
        model: ParallelModule,
        smallest: int,
        largest: int = 0,
        axes: Mapping[str, int] | None = None,
        scheduled: Scheduled | None = None,
    ) -> None:
        self.model, self.smallest, self.largest = model, smallest, max(largest, len(model._builder.groups.ranks))
        whole = model._builder.groups.whole
        self.axes = dict(axes or zip(whole.mesh_dim_names or (), whole.shape, strict=True))
        self.scheduled = scheduled
        self.ready: dict[int, Ready] = {}
        self.plans: dict[int, Plan] = {}  # where there is no hand layout
        self.given: set[int] = set()  # sizes whose plans the run has told this process, not applied yet
        self.seen: list[Program] = []  # programs that were made ahead already, or cannot be
        self.made, self.left_out = 0, 0
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

    def follow(self, plans: Mapping[int, Plan]) -> None:
        """Of a process that joins, before it has steps: the plans that the run has, for the size that the module lies on and for others."""
        model, size = self.model, self.model._builder.mesh.size
        self.plans, self.given = dict(plans), set(plans) - {size}
        if size in plans:
            config = replace(model._config, request=replace(model._config.request, plan=plans[size]))
            model._lie_on(Builder(model._builder.model, model._builder.device_mesh, config))

    def make(self) -> None:
        """Of the programs that the module has by now and that are new, the steps for all other numbers of ranks. All ranks call it alike."""
        programs = [(kind, p) for kind, held in self.model._programs.kinds.items() for p in held if not any(p is q for q in self.seen)]
        programs.sort(key=lambda x: not x[1].step.has_backward)  # those that train are planned, others follow
        if not programs:
            return
        builder = self.model._builder
        sizes = [n for n in range(self.largest, self.smallest - 1, -1) if n != builder.mesh.size]
        with told(f"steps for {', '.join(map(str, sizes))} processes made ahead", builder.groups.rank == 0 and len(sizes) > 0):
            for kind, program in programs:
                self.seen.append(program)
                if program.step.has_backward and builder.config.layout is None:
                    self.plans.setdefault(builder.mesh.size, program.step.plan)
                if program.is_general or program.step.captured.samples is not None or builder.pipeline is not None:
                    self.left_out += 1
                    continue
                for n in sizes:
                    ready = self.ready.setdefault(n, Ready(Placeholder(builder.groups, self.axes_for(n))))
                    ready.kinds.append((kind, replace(program, step=self._step(program.step, ready.groups), sized={})))
                    self.made += 1

    def _step(self, old: Step, groups: Placeholder) -> Step:
        """`old` for the mesh of `groups`."""
        builder = self.model._builder
        plan = self._plan(old, groups)
        links = None if groups.mesh.size == 1 else builder.links_of(groups.mesh)
        settings: Settings = replace(old.settings, links=links, store=builder.store(plan))
        step = Step(old.captured, old.graph, plan, groups, settings, "")
        step.program = old.program
        for variant in old.backwards:
            step.backward_of(*variant)
        return step

    def _plan(self, old: Step, groups: Placeholder) -> Plan:
        """By the same hand layout; else by the planner, for the first program that trains, which others follow. Collective. Raises AutoparError where there is none."""
        builder, n = self.model._builder, groups.mesh.size
        trainable = frozenset(name for name, c in old.plan.params.items() if c.trainable)
        if builder.config.layout is not None:
            return propagate(old.graph, Layout.of(builder.config.layout, groups.mesh), groups.axes, trainable)
        first = self.plans.get(n)
        if first is not None and n not in self.given:
            return propagate(old.graph, following(first), groups.axes, trainable, first.params)
        if not old.has_backward:
            return propagate(old.graph, builder.first_on(groups.mesh), groups.axes, trainable)
        planning = builder.planning_for(groups.axes, first)
        try:
            made = planning.make_plan(Seen(old.captured, old.graph, fold(old.graph)), *builder.parameters(old.graph))
        except AutoparError as e:
            raise AutoparError(
                f"there is no plan for {n} processes, which may be left: {e.what}",
                where=e.where or "autopar.compile, elastic=",
                fix=f"{e.fix}; or survive={builder.mesh.size - n - 1} losses" if builder.mesh.size - n > 1 else e.fix,
            ) from e
        self.plans[n] = made
        self.given.discard(n)
        return made

    def keep(self) -> None:
        """Before the mesh is left: the steps that there are for its size, apart from its groups, which end."""
        model, groups = self.model, self.model._builder.groups
        if model._builder.pipeline is not None:
            return
        ready = self.ready.setdefault(groups.mesh.size, Ready(Placeholder(groups, dict(groups.axes))))
        ready.groups.asked = sorted({*ready.groups.asked, *(axes for axes in groups.made if axes[:1] != ("between",))})
        for kind, programs in model._programs.kinds.items():
            for program in programs:
                step = program.step
                if program.is_general or step.captured.samples is not None:
                    continue
                step.groups, step.settings = ready.groups, replace(step.settings, once=None)
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
        ready = self.ready.get(builder.mesh.size)
        assert ready is None or ready.groups.prefix == builder.groups.prefix
        asked = [] if ready is None else ready.groups.asked
        if joined:
            asked = sorted({tuple(axes) for theirs in all_gathered(builder.groups, asked) for axes in theirs})
        for axes in asked:
            builder.groups.ensure(axes)
        if ready is None:
            return False
        for kind, program in ready.kinds:
            step = program.step
            step.groups, step.settings = builder.groups, replace(step.settings, once=builder.once)
            self.model._programs.kinds.setdefault(kind, []).append(program)
            self.seen.append(program)
        return bool(ready.kinds)

    def adopt(self) -> None:
        """The plan of the mesh that the module lies on now is that of the steps that there are, and says where parameters are stored."""
        builder = self.model._builder
        steps = [p.step for programs in self.model._programs.kinds.values() for p in programs]
        params = {n: c for s in steps for n, c in s.plan.params.items()}
        for s in sorted(steps, key=lambda s: s.has_backward):
            builder.plan = replace(s.plan, params=params)
            builder.planned = builder.planned or s.has_backward


def _text(kind: Any, program: Program) -> str:
    """The same on two ranks where it is the same program, compiled alike."""
    step = program.step
    halves = [step.base.forward, *(parts.backward for _, (parts, _) in sorted(step.backwards.items()))]
    stored = [f"{n}: {c.storage}" for n, c in sorted(step.plan.params.items())]
    said = "\n".join(
        [repr(kind), repr(program.shapes), repr(sorted(step.backwards)), *stored, *(gm.code for gm in halves if gm is not None)]
    )
    return hashlib.sha256(said.encode()).hexdigest()
