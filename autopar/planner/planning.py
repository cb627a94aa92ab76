"""From a captured graph to a plan: formulate, solve, apply. Needs no process group and no weights."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.triton import told_of
from autopar.errors import AutoparError, LayoutError
from autopar.graph.graph import Graph
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.planner import budgets
from autopar.planner.axes import better_batches, divides_poorly
from autopar.planner.best_cut import WORTH
from autopar.planner.budgets import GRACE
from autopar.planner.expert_axes import exchanged_rows
from autopar.planner.figures import figures, once_s
from autopar.planner.formulation.apply import apply, blocking
from autopar.planner.formulation.instead import Instead
from autopar.planner.formulation.layouts import by_role, forbidden
from autopar.planner.formulation.lower_bound import least_s
from autopar.planner.formulation.names import Names
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.found import Found, better
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.layout import Layout
from autopar.planner.loss_head import OTHER_FORM
from autopar.planner.none_faster import NoneFasterError
from autopar.planner.other_form import bound_instead
from autopar.planner.profiling.buckets import estimated
from autopar.planner.profiling.profile import profile
from autopar.planner.refit import modules_of
from autopar.planner.stages import Stages
from autopar.planner.storage import batch_size
from autopar.planner.tags import binding, unmet, untagged
from autopar.rules.grammar import Rule
from autopar.solver.fold import Folded, fold, grouped, handed_on_bytes
from autopar.solver.problem import Problem
from autopar.solver.solve import Infeasible, Limits, NoAnswer, NoneFaster, Solution
from autopar.solver.watch import watching
from autopar.text.sizes import format_bytes
from autopar.text.stages import Begun

TOGETHER = 2, 3, 4  # layers that are taken as one where nothing fits otherwise, or nothing good
LARGE_GAP = 0.02  # a gap, relative, from which that is tried
LARGEST = 1500  # kinds of operators in a program of such
LEAST_S = 10.0  # for an answer little above the smallest peak, where nothing else is within the budget
PATIENT_S = 40.0  # where nobody said how much time there is: better late than no plan
HAND_GAP = 0.002  # relative: of what is nearer to its bound nothing is asked
SAME = 1e-4  # relative: what is faster by less is not looked for
HAND_S, HAND_LEAST_S = 20.0, 5.0  # what it may take, and without which it is not begun
GROUPED_S = 30.0  # for one of them, at most


@dataclass(frozen=True)
class Step:
    """A step that is planned, on a mesh. hand: the layout that its plans are, if any; stages: what solves it."""

    folded: Folded
    mesh: Mesh
    cluster: Cluster
    training: TrainingConfig
    hand: Layout | None
    stages: Stages

    @staticmethod
    def of(
        graph: Graph | Folded,
        mesh_axes: Mapping[str, int],
        cluster: Cluster,
        training: TrainingConfig,
        limits: Limits | None,
        progress: Callable[[str, float], None] | None,
        layout: str | Layout | None,
        since: float | None = None,
    ) -> Step:
        mesh = Mesh.of(dict(mesh_axes))
        on_progress = progress or (lambda stage, seconds: None)
        on_progress(Begun("fold"), 0.0)
        start = time.perf_counter()
        folded = fold(graph) if isinstance(graph, Graph) else graph
        on_progress("fold", time.perf_counter() - start)
        hand = None if layout is None else Layout.of(layout, mesh)
        if hand is not None:
            training = replace(training, keeps_gathered=not hand.reshard_after_forward)

        def restrict(problem: Problem, names: Names, rules: Mapping[str, Rule], on: Mesh) -> Problem:
            assert hand is not None
            return replace(problem, forbidden=problem.forbidden | forbidden(hand, problem, names, rules, on, mesh))

        kept_to = None if hand is None else restrict
        stages = Stages(folded, mesh if hand is None else by_role(hand, mesh), cluster, training, limits, on_progress, kept_to, since)
        return Step(folded, mesh, cluster, training, hand, stages)

    @contextlib.contextmanager
    def in_time(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as e:
            raise AutoparError(
                f"The solver found no plan: {e}",
                where=f"{len(self.folded.count)} kinds of operators on {' x '.join(map(str, self.mesh.parents.values()))} devices",
                fix="give it more time (--time-limit), fewer layers (--layers) or a mesh with fewer axes",
            ) from e

    def grouped(self, short_bytes: float) -> Iterator[Step]:
        """With a few neighbouring layers as one, so that what these hand to each other may be made again too: less memory, a larger program. Nothing where all that
        layers hand on is less than what is missing."""
        s, small = self.stages, len(self.folded.count)
        for together in TOGETHER if short_bytes < handed_on_bytes(self.folded) else ():
            folded = grouped(self.folded, together)
            if folded is not None and small < len(folded.count) <= LARGEST and not s.is_late:
                spent_s = time.perf_counter() - s.start
                limits = replace(s.limits, seconds=min(s.limits.seconds, spent_s + GROUPED_S), in_proportion=False)
                larger = Stages(folded, s.mesh, s.cluster, s.training, limits, s.on_progress, s.restrict, s.start)
                yield replace(self, folded=folded, stages=larger)

    def beside_hand(self, done: Found) -> Found:
        """`done`, or the best plan that is FSDP, or FSDP and tensor parallelism, where that is faster: a program with less to choose, whose memory is better used in the same time.
        Only where the gap allows it."""
        every = tuple(n for n, size in self.mesh.parents.items() if size > 1)
        done = self.beside(done, HAND_GAP, Layout(data=every, shard=every))
        return self.beside(done, LARGE_GAP, fsdp_tp(every)) if len(every) > 1 else done

    def beside(self, done: Found, gap: float, hand: Layout) -> Found:
        """`done`, or the best plan that is `hand`, where that is faster, and a gap of more than `gap` allows it."""
        s, found = self.stages, done.answer
        if not isinstance(found, Solution) or found.gap <= gap or time.perf_counter() + HAND_LEAST_S > s.until:
            return done
        hand = replace(hand, reshard_after_forward=not s.training.keeps_gathered)
        spent_s = time.perf_counter() - s.start
        limits = replace(
            s.limits, seconds=min(s.limits.seconds, spent_s + HAND_S), in_proportion=False, below_s=(1 - SAME) * found.objective_s
        )
        try:
            other = Step.of(self.folded, self.mesh.parents, self.cluster, s.training, limits, s.on_progress, hand, s.start).stages.run()
        except (NoneFaster, TimeoutError, LayoutError):
            return done
        if not isinstance(other.answer, Solution) or other.answer.objective_s >= found.objective_s:
            return done
        bound_s = min(found.bound_s, other.answer.objective_s)
        return replace(other, answer=replace(other.answer, bound_s=bound_s, seconds=found.seconds + other.answer.seconds))

    def untagged(self) -> Step:
        """Without the tags of the user's."""
        s = self.stages
        free = replace(self.folded, graph=untagged(self.folded.graph))
        return replace(self, folded=free, stages=Stages(free, s.mesh, s.cluster, s.training, s.limits, s.on_progress, s.restrict))


@dataclass(frozen=True)
class Planned:
    """found: what the plan was made of, step: of which."""

    plan: Plan
    solution: Solution
    found: Found
    step: Step


def fsdp_tp(axes: Sequence[str]) -> Layout:
    """Tensors split over the last axis, data and what is stored over the others; what is gathered may be kept."""
    return Layout(data=tuple(axes[:-1]), shard=tuple(axes[:-1]), tensor=tuple(axes[-1:]), reshard_after_forward=False)


def plan_graph(
    graph: Graph | Folded,
    mesh_axes: Mapping[str, int],
    cluster: Cluster,
    training: TrainingConfig,
    limits: Limits | None = None,
    progress: Callable[[str, float], None] | None = None,
    layout: str | Layout | None = None,
    least: bool = False,
    since: float | None = None,
    instead: Instead | None = None,
    asks: Callable[[Stages], None] | None = None,
) -> Planned:
    """The best plan for `graph` on a mesh of `cluster`'s devices, under `training.budget_bytes`.

    graph: as captured, or folded already (from shallow captures of a deep program: `autopar.capture.tile`). layout: the best plan that is this hand
    layout (`autopar.planner.formulation.layouts` says what that leaves to choose). least: not the fastest plan, but that of the smallest peak.
    limits: where they end before there is an answer, axes are merged or a hand layout is taken, which has one soon. since: when planning began
    (`time.perf_counter`), if before this call. instead: the plan says what no plan takes less than with
    other operators for some (`loss_head.OTHER_FORM`). asks: of more micro-batches, of the programs that were solved, whether there is a plan or none.

    Raises InfeasibleError naming the position of the step that does not fit, by how much, and what would help; LayoutError when the model
    or the mesh does not allow the layout; NoneFasterError where something faster was asked for (`Limits.below_s`) and not found.
    """
    step = Step.of(graph, mesh_axes, cluster, training, limits, progress, layout, since)
    step.stages.bounds_more = asks is not None

    def solved(step: Step) -> Found:
        return budgets.least(step.stages) if least else step.stages.run()

    with step.in_time():
        try:
            done = solved(step)
        except NoneFaster as e:
            if asks is not None:
                asks(step.stages)
            raise NoneFasterError(e.bound_s, 0.0 if instead is None else bound_instead(step.stages, instead)) from None
        except TimeoutError as e:
            if not least and step.stages.limits.may_fail:
                raise NoneFasterError(max(0.0, e.bound_s) if isinstance(e, NoAnswer) else 0.0) from None
            if least:
                raise
            patience_s = PATIENT_S if step.stages.limits.in_proportion else LEAST_S
            with watching(until=time.perf_counter() + max(patience_s, step.stages.limits.seconds)):
                done = budgets.within_budget(step.stages)
    for larger in step.grouped(done.answer.shortfall_bytes if isinstance(done.answer, Infeasible) else 0.0):
        if not least and isinstance(done.answer, Solution) and done.answer.gap <= max(LARGE_GAP, step.stages.limits.gap):
            break
        try:
            other = solved(larger)
        except (NoneFaster, TimeoutError):
            break
        if not (_smaller if least else better)(other.answer, done.answer):
            break  # nor would more of them
        step, done = larger, other
    if layout is None and not least:
        done = step.beside_hand(done)
    found = done.answer
    if asks is not None:
        asks(step.stages)
    if isinstance(found, Infeasible):
        said = binding(step.folded.graph)
        # Are the tags what needs the memory?
        if said and _least_bytes(step.untagged(), solved) >= found.least_bytes:
            said = ""
        raise does_not_fit(found, step, said)
    plan = plan_of(step, done, min(training.budget_bytes, cluster.device.memory_bytes))
    if instead is not None:
        plan = replace(plan, solver={**plan.solver, OTHER_FORM: bound_instead(step.stages, instead)})
    return Planned(plan, found, done, step)


def least_of(graph: Folded, mesh_axes: Mapping[str, int], cluster: Cluster, training: TrainingConfig) -> float:
    """Seconds that no plan of `graph` takes less than: soon known, and far from what a plan takes."""
    v = Stages(graph, Mesh.of(dict(mesh_axes)), cluster, training).view()
    return least_s(v.shrunk, v.rules, v.cost)


def _smaller(a: Solution | Infeasible, b: Solution | Infeasible) -> bool:
    """Whether `a` needs less memory than `b`, by what is worth a larger program."""

    def peak(x: Solution | Infeasible) -> float:
        return max(x.price.row_bytes, default=0.0) if isinstance(x, Solution) else x.least_bytes

    return peak(a) < peak(b) * (1 - WORTH)


def does_not_fit(found: Infeasible, step: Step, tags: str = "") -> InfeasibleError:
    """tags: those that need the memory, for people. Where the batch cannot be split over the mesh, that is what is wrong, and no device would be large enough."""
    batch, axes = batch_size(step.folded.graph.inputs), step.mesh.parents
    poorly = divides_poorly(batch, axes)
    if poorly and batch is not None:
        remedy = f"a batch of {better_batches(batch, axes)}, or a mesh whose sizes divide {batch}"
    else:
        remedy = f"{format_bytes(found.least_bytes)} a device would do; or more devices, a smaller batch or shorter sequences"
    return InfeasibleError(
        constraint=f"memory, {found.position}" + (f", with {tags}" if tags else "") + (f"; {poorly}" if poorly else ""),
        shortfall_bytes=int(found.shortfall_bytes),
        remedy=("fewer tags, which need the more memory: " if tags else "") + remedy,
        may_be_parted=not poorly and (batch or 1) > 1,
    )


def _least_bytes(step: Step, solved: Callable[[Step], Found]) -> float:
    """What a device must have; the budget, if that suffices."""
    try:
        answer = solved(step).answer
    except TimeoutError:
        return math.inf
    return step.training.budget_bytes if isinstance(answer, Solution) else answer.least_bytes


def within(training: TrainingConfig, plan: Plan) -> TrainingConfig:
    """`training` with the budget that `plan` needs."""
    return replace(training, budget_bytes=plan.predicted["peak_memory_bytes"] * (1 + GRACE))


def plan_of(step: Step, done: Found, budget_bytes: float) -> Plan:
    """What was found, as a plan."""
    found, folded = done.answer, step.folded
    assert isinstance(found, Solution)
    plan = apply(folded, done.shrunk, done.rules, step.mesh, step.training, done.problem, done.names, found.decision)
    stages = dict(zip((f"{s}_s" for s in done.problem.stages), found.price.stage_s, strict=True))
    told = profile(done.formulated, done.problem, found.decision)
    rerun = {done.names.reruns[i] for i in found.decision.rerun}
    hidden = done.formulated.times.hidden(found.decision.strategies, rerun)
    return replace(
        plan,
        layout=plan.layout if step.hand is None else step.hand.name,
        profile=told,
        cluster=step.cluster.name,
        modules=modules_of(folded.graph),
        unmet=unmet(folded.graph, plan.kept),
        predicted={
            "step_time_s": found.objective_s,
            **stages,
            **(once_s(done.problem, found.decision) if step.training.in_a_row > 1 else {}),
            **figures(folded, step.mesh, step.cluster, done.problem, found.decision, found.objective_s, hidden),
            "peak_memory_bytes": max(found.price.row_bytes),
            "blocking_collectives": blocking(done.problem, done.names, found.decision, done.formulated.wires),
            "budget_bytes": budget_bytes,
            **estimated(told, done.formulated.cost),
            **exchanged_rows(folded.graph, plan.ops, step.mesh),
        },
        solver={
            "objective_s": found.objective_s,
            "bound_s": found.bound_s,
            "gap": found.gap,
            "stopped_by": found.stopped_by,
            "seconds": found.seconds,
            "variables": found.variables,
            "rows": found.rows,
            **told_of(((op, plan.ops[op.name].strategy, n) for op, n in folded.counted()), step.mesh, step.cluster.device.why_no_triton),
        },
    )
