"""Plans of one step on several meshes and as several numbers of micro-batches, of which the fastest is wanted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from autopar.plan.plan import Plan
from autopar.planner.explain import explain_graph
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.layout import Layout
from autopar.planner.loss_head import Form, better
from autopar.planner.meshes import best_of
from autopar.planner.micro_batches import candidates, fastest, from_the_middle, of_the_call
from autopar.planner.more_micro_batches import bound_of_more
from autopar.planner.none_faster import NoneFasterError
from autopar.planner.patience import Patience
from autopar.planner.planning import Planned, fsdp_tp, least_of, plan_graph, within
from autopar.planner.progress import Progress
from autopar.planner.roomy import roomy
from autopar.planner.stages import WHOLE_AXES, Stages
from autopar.planner.task import Task, frontier_of, of_the_whole, other_of
from autopar.solver.solve import Limits

FIRST_MESH = 0.8  # of the time that there is, for the first of several meshes


class Planner:
    """Plans of one step on several meshes and as several numbers of micro-batches; each is captured, and planned, once. captured: by number of micro-batches."""

    def __init__(
        self,
        captured: Callable[[int], Task],
        batch: int,
        limits: Limits,
        on_progress: Progress,
        layout: str | Layout | None,
        least: bool,
    ) -> None:
        self.captured, self.batch, self.limits = cache(captured), batch, limits
        self.on_progress, self.layout, self.least = on_progress, layout, least
        self.has_begun = self.is_counting = False  # is_counting: whether more micro-batches may be faster
        self.each_s = math.inf  # what a program may take, where there is no limit and a plan already
        self.best_s = math.inf  # of a call, of what was planned so far
        self.made: dict[tuple[tuple[int, ...], int], Plan | InfeasibleError | NoneFasterError] = {}
        self.more: dict[
            tuple[tuple[int, ...], int], Callable[[], float] | float
        ] = {}  # says what no plan of a multiple of so many micro-batches takes less than
        self.keeps_solved = False
        self.solved: dict[
            tuple[tuple[int, ...], int, str], Planned
        ] = {}  # what a plan was made of, by mesh, micro-batches and form; if that is wanted

    def best_of(self, first: Mapping[str, int], rest: Sequence[dict[str, int]], number: int | str) -> Plan:
        """On the best of several meshes: the first one has not all of the time."""
        whole = self.limits

        def planned(axes: Mapping[str, int], number: int | str) -> Plan:
            self.limits = replace(whole, seconds=FIRST_MESH * whole.seconds) if rest and axes is first and number == asked else whole
            try:
                return self.plan(axes, number)
            finally:
                self.limits = whole

        asked = number
        return best_of(first, rest, planned, number, self.left_s, self.by_hand)

    def left_s(self) -> float:
        return math.inf if self.limits.in_proportion else self.on_progress.start + self.limits.seconds - time.perf_counter()

    def is_late(self, needs_s: float = 0.0) -> bool:
        return self.left_s() < needs_s

    def by_hand(self, axes: Mapping[str, int], number: int | str) -> Plan:
        """The best plan of data and tensor parallelism on a mesh, which is soon found."""
        assert isinstance(number, int)
        t = self.captured(number).on(axes)
        made = self.form(number, t, t, False, fsdp_tp(tuple(axes)))
        bound_s = min(self.least_s(number, t), made.predicted["step_time_s"])  # of all plans there, not of this layout's
        return replace(made, solver={**made.solver, "bound_s": bound_s, "gap": 1 - bound_s / made.predicted["step_time_s"]}).answering_as(
            made
        )

    def plan(self, axes: Mapping[str, int], number: int | str) -> Plan:
        """On a mesh, as so many micro-batches, or as many as is fastest (AUTO)."""
        if isinstance(number, int):
            return self.of(number, self.captured(number).on(axes))
        sizes, patience, self.is_counting = tuple(axes.values()), Patience(), True

        def of(m: int, t: Task) -> Plan:
            made = self.of(m, t)
            patience.start()
            self.each_s = patience.each_s
            return made

        def is_late(needs_s: float) -> bool:
            return patience.is_over(needs_s) if self.limits.in_proportion else self.is_late(needs_s)

        made, _ = fastest(
            from_the_middle(candidates(self.batch), self.first(axes)),
            lambda m: self.captured(m).on(axes),
            lambda m, t: min(self.least_s(m, f) for f in t.forms),
            of,
            is_late,
            partial(self.more_s, sizes),
            self.limits.gap,
            lambda: min(self.least_s(1, f) for f in self.captured(1).on(axes).forms),
        )
        return made

    def first(self, axes: Mapping[str, int]) -> int:
        """The number of micro-batches that is planned first."""
        t = self.captured(1).on(axes)
        return min(roomy(candidates(self.batch), f.folded, math.prod(axes.values()), f.training, self.batch) for f in t.forms)

    def of(self, m: int, t: Task) -> Plan:
        """As `m` micro-batches, of which `t` is one."""
        key = tuple(t.mesh_axes.values()), m
        if key not in self.made:
            forms = tuple(Form(f.form, partial(self.form, m, f, t), partial(self.least_s, m, f)) for f in t.forms)
            try:
                self.made[key] = better(forms, self.least, self.limits.gap, self.is_late, self.below_s)
            except (InfeasibleError, NoneFasterError) as e:
                self.made[key] = e
        found = self.made[key]
        if not isinstance(found, Plan):
            raise found
        return found

    @property
    def below_s(self) -> float:
        """Of a call: what is slower is of no use beside what was planned already. Half of the gap that a plan may have is not worth another program."""
        return math.inf if self.least else self.best_s * (1 - self.limits.gap / 2)

    def more_s(self, sizes: tuple[int, ...], m: int) -> float:
        """What no plan of more micro-batches than `m`, on a mesh of these sizes, takes less than. What it is found from is large, and not kept."""
        found = self.more.get((sizes, m), 0.0)
        self.more[sizes, m] = bound_s = found if isinstance(found, float) else found()
        return bound_s

    @staticmethod
    def least_s(m: int, t: Task) -> float:
        return m * least_of(t.folded, t.mesh_axes, t.cluster, t.training)

    def form(self, m: int, t: Task, first: Task, says_other: bool, hand: Layout | None = None) -> Plan:
        """Of one form of the step, `t`, of which `first` is the one that is planned first. Without a limit of time, what is planned first has what capturing it took counted. hand: what
        it is kept to, instead of the layout that was asked for."""
        since = None if self.has_begun and self.limits.in_proportion else self.on_progress.start
        self.has_begun = True
        instead = other_of(t)
        has_plan = hand is None and any(isinstance(p, Plan) for p in self.made.values())
        limits = replace(self.limits, may_fail=has_plan and not self.least, below_s=self.below_s / m)
        if has_plan and limits.in_proportion:
            limits = replace(limits, seconds=min(limits.seconds, self.each_s))

        def keep(stages: Stages) -> None:
            if t is first:
                self.more[tuple(t.mesh_axes.values()), m] = lambda: (
                    m * bound_of_more(stages, instead, self.best_s * (1 - self.limits.gap) / m)
                )

        try:
            found = plan_graph(
                t.folded, t.mesh_axes, t.cluster, t.training, limits, self.on_progress, hand or self.layout, self.least, since,
                instead if says_other else None, keep if self.is_counting else None,
            )  # fmt: skip
        except NoneFasterError as e:
            raise NoneFasterError(m * e.bound_s, m * e.other_form_s) from None
        if self.keeps_solved:
            self.solved[tuple(t.mesh_axes.values()), m, t.form] = found
        self.best_s = min(self.best_s, m * found.plan.predicted["step_time_s"])
        training = within(t.training, found.plan) if self.least else t.training
        known = (found.found,) if len(t.mesh_axes) > WHOLE_AXES else ()  # the frontier does not solve the whole program of so many
        made = of_the_call(of_the_whole(found.plan, t.folded, t.model), m)
        return made.explained_by(
            lambda op, placement: explain_graph(t.folded, t.mesh_axes, t.cluster, training, op, placement, self.limits, None, self.layout),
            lambda points: frontier_of(t, points, self.limits, None, self.layout, known=known),
        )
