"""`autopar.plan`: a plan without the cluster. The model may lie on the meta device; nothing is computed and no process group is needed.

The time to capture does not grow with depth: copies of the module with few layers are captured (`tile.py`, `depth_reduced.py`), and the whole module only where
they do not show what it is. The plan names the operators that were captured; `refit` gives it the names of a capture of the whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import nn

from autopar.capture.capture import Call, Captured, Shapes, capture, off_cache
from autopar.capture.depth_reduced import reduced_depth
from autopar.capture.describe import describe
from autopar.capture.fusions.table import fused, logits_bytes
from autopar.capture.in_subprocess import beside
from autopar.capture.micro_batches import WholeBatch, samples_of
from autopar.capture.randomness import refuse_unknown_random
from autopar.capture.tile import Both, expand_params, layer_periods, least_depth, tiled
from autopar.cost.optimizers import kind_of
from autopar.errors import AutoparError, CaptureError
from autopar.graph.graph import Graph, Tensor
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.planner.axes import mesh_axes
from autopar.planner.explain import Explanation, explain_graph
from autopar.planner.formulation.instead import Instead
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.found import Found
from autopar.planner.frontier import Frontier, frontier_graph
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.layout import Layout
from autopar.planner.loss_head import AUTO as ANY_FORM
from autopar.planner.loss_head import CHUNKED, PLAIN, Form, better, is_chunked, may_matter
from autopar.planner.loss_head import checked as checked_form
from autopar.planner.memory import Memory
from autopar.planner.meshes import best_of, others
from autopar.planner.micro_batches import AUTO, candidates, checked, fastest, from_the_middle, of_the_call
from autopar.planner.more_micro_batches import bound_of_more
from autopar.planner.offload import Offload
from autopar.planner.other_form import instead_of
from autopar.planner.planning import fsdp_tp, least_of, plan_graph, within
from autopar.planner.precision import Precision
from autopar.planner.refit import modules_of, served
from autopar.planner.request import limits_of, training_config
from autopar.planner.roomy import roomy
from autopar.planner.stages import WHOLE_AXES, Stages
from autopar.planner.storage import batch_size
from autopar.solver.fold import Folded, fold
from autopar.solver.solve import Limits
from autopar.text.stages import Begun

FIRST_MESH = 0.8  # of the time that there is, for the first of several meshes
Captures = dict[int, WholeBatch]


@dataclass(frozen=True)
class Task:
    """A step that is to be planned. form: of its program (`loss_head`); other: the same step, of another form."""

    model: nn.Module
    folded: Folded
    mesh_axes: dict[str, int]
    cluster: Cluster
    training: TrainingConfig
    form: str = PLAIN
    other: Task | None = None

    def on(self, axes: Mapping[str, int]) -> Task:
        """The same on another mesh of as many devices."""
        return replace(self, mesh_axes=dict(axes), other=None if self.other is None else self.other.on(axes))

    @property
    def forms(self) -> tuple[Task, ...]:
        return (self,) if self.other is None else (self, self.other)


def plan(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor | Sequence[int]],
    cluster: str | Cluster,
    mesh: str | Mapping[str, int] | None = None,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    precision: Precision | str | torch.dtype | None = None,
    optimizer: str | type[torch.optim.Optimizer] = "adamw",
    grad_accumulation: int = 1,
    micro_batches: int | str = 1,
    layout: str | Layout | None = None,
    memory: float | str | None = None,
    offload: Offload | str | bool | None = None,
    options: Mapping[str, float] | None = None,
    progress: Callable[[str, float], None] | None = None,
    in_subprocess: bool = False,
    loss_head: str = "auto",
) -> Plan:
    """The best plan of one training step of `model` on `cluster`.

    inputs: keyword arguments of a call, tensors or shapes (a shape is taken for token ids, int64). mesh: "32x8" or axis sizes by name; default the
    cluster's nodes x devices, or these cut elsewhere, where that is faster (`autopar.planner.meshes`). optimizer: a name of `autopar.cost.optimizers.KINDS` or a class. grad_accumulation: calls for each of its steps; times are of
    one call, with its share of the reduction of gradients and of that step. micro_batches: that a call is run as, one after the other; "auto": as many as is fastest
    (`autopar.planner.micro_batches`). memory: budget of a device in bytes; "fastest", as by default: what it has, less a reserve; "least": the plan of the smallest
    peak instead of the fastest one. offload: where activations may be kept besides the device: "host",
    False or an `Offload`; default nowhere. layout: the best plan that is this hand
    layout. loss_head: whether a linear layer under a cross-entropy makes all its logits ("plain"), or makes them tile by tile and again in backward ("chunked"); "auto": both
    are planned where that may matter (`autopar.planner.loss_head`). options: "seconds" from the call to the plan, "gap", "memory_bytes" of this process. progress: called with a stage's name and its seconds (`autopar.text.stages` says with what else). in_subprocess: captures two depths of the model at
    once, one in a forked process: not where other threads run or CUDA is in use.

    Raises InfeasibleError when nothing fits, CaptureError, MeshError, ClusterError, LayoutError.
    """
    on_progress = _Stages(progress)
    captures: Captures = {}
    least = Memory.of(memory).least
    number = checked(micro_batches)
    if least and number == AUTO:
        raise AutoparError(
            'memory="least" asks for the smallest peak, which more micro-batches make smaller', fix="pass a number of micro_batches"
        )

    def captured(m: int) -> Task:
        return task(
            model, inputs, cluster, mesh, loss_fn, precision, optimizer, grad_accumulation, memory, offload, on_progress, in_subprocess, m,
            None if number == 1 else captures, loss_head,
        )  # fmt: skip

    batch = batch_size(tuple(Tensor("", shape, "") for shape in shapes_of(inputs))) or 1
    planner = _Planner(captured, batch, limits_of(options), on_progress, layout, least)
    where = Cluster.of(cluster)
    axes = mesh_axes(mesh, where)
    try:
        if mesh is None and layout is None and not least:
            made = planner.best_of(axes, list(others(where)), number)
        else:
            made = planner.plan(axes, number)
    except InfeasibleError as e:
        raise e.of_one_micro_batch() if number == 1 else e from None
    on_progress.rest()
    return made


class _Planner:
    """Plans of one step on several meshes and as several numbers of micro-batches; each is captured, and planned, once. captured: by number of micro-batches."""

    def __init__(
        self,
        captured: Callable[[int], Task],
        batch: int,
        limits: Limits,
        on_progress: _Stages,
        layout: str | Layout | None,
        least: bool,
    ) -> None:
        self.captured, self.batch, self.limits = cache(captured), batch, limits
        self.on_progress, self.layout, self.least = on_progress, layout, least
        self.has_begun = False
        self.made: dict[tuple[tuple[int, ...], int], Plan | InfeasibleError] = {}
        self.more: dict[
            tuple[tuple[int, ...], int], Callable[[], float]
        ] = {}  # says what no plan of a multiple of so many micro-batches takes less than

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
        sizes = tuple(axes.values())
        made, _ = fastest(
            from_the_middle(candidates(self.batch), self.first(axes)),
            lambda m: self.captured(m).on(axes),
            lambda m, t: min(self.least_s(m, f) for f in t.forms),
            self.of,
            self.is_late,
            lambda m: self.more[sizes, m]() if (sizes, m) in self.more else 0.0,
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
                self.made[key] = better(forms, self.least, self.limits.gap, self.is_late)
            except InfeasibleError as e:
                self.made[key] = e
        found = self.made[key]
        if isinstance(found, InfeasibleError):
            raise found
        return found

    @staticmethod
    def least_s(m: int, t: Task) -> float:
        return m * least_of(t.folded, t.mesh_axes, t.cluster, t.training)

    def form(self, m: int, t: Task, first: Task, says_other: bool, hand: Layout | None = None) -> Plan:
        """Of one form of the step, `t`, of which `first` is the one that is planned first. Without a limit of time, what is planned first has what capturing it took counted. hand: what
        it is kept to, instead of the layout that was asked for."""
        since = None if self.has_begun and self.limits.in_proportion else self.on_progress.start
        self.has_begun = True
        instead = other_of(t)

        def keep(stages: Stages) -> None:
            if t is first:
                self.more[tuple(t.mesh_axes.values()), m] = cache(lambda: m * bound_of_more(stages, instead))

        found = plan_graph(
            t.folded, t.mesh_axes, t.cluster, t.training, self.limits, self.on_progress, hand or self.layout, self.least, since,
            instead if says_other else None, keep,
        )  # fmt: skip
        training = within(t.training, found.plan) if self.least else t.training
        known = (found.found,) if len(t.mesh_axes) > WHOLE_AXES else ()  # the frontier does not solve the whole program of so many
        made = of_the_call(_of_the_whole(found.plan, t.folded, t.model), m)
        return made.explained_by(
            lambda op, placement: explain_graph(t.folded, t.mesh_axes, t.cluster, training, op, placement, self.limits, None, self.layout),
            lambda points: _frontier(t, points, self.limits, None, self.layout, known=known),
        )


def frontier(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor | Sequence[int]],
    cluster: str | Cluster,
    mesh: str | Mapping[str, int] | None = None,
    *,
    points: int = 20,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    precision: Precision | str | torch.dtype | None = None,
    optimizer: str | type[torch.optim.Optimizer] = "adamw",
    grad_accumulation: int = 1,
    micro_batches: int = 1,
    layout: str | Layout | None = None,
    memory: float | str | None = None,
    offload: Offload | str | bool | None = None,
    options: Mapping[str, float] | None = None,
    progress: Callable[[str, float], None] | None = None,
    in_subprocess: bool = False,
    loss_head: str = "plain",
) -> Frontier:
    """Plans from the fastest to the one of least memory: `plan.frontier()` of what `plan` makes of the same arguments, without making it. mesh: default nodes x devices, also
    where `plan` would take another.

    points: at most so many. memory: no plan that needs more; default any, also more than a device has. loss_head: "plain" or "chunked". options: "seconds" are for all points.
    """
    on_progress = _Stages(progress)
    if checked_form(loss_head) == ANY_FORM:
        raise AutoparError('a frontier is of one program, and loss_head="auto" of two', fix='pass "plain" or "chunked"')
    request = Memory.of(memory)
    if request.least:
        raise AutoparError(
            "a frontier ends at the least memory anyway", fix="leave memory= out, or give the most bytes that a plan may need"
        )
    t = task(
        model, inputs, cluster, mesh, loss_fn, precision, optimizer, grad_accumulation, memory, offload, on_progress, in_subprocess, micro_batches,
        None, loss_head,
    )  # fmt: skip
    most = math.inf if request.budget_bytes is None else request.budget_bytes
    found = _frontier(t, points, limits_of(options), on_progress, layout, most)
    on_progress.rest()
    return found


def explain(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor | Sequence[int]],
    cluster: str | Cluster,
    mesh: str | Mapping[str, int] | None = None,
    *,
    op: str,
    placement: str,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    precision: Precision | str | torch.dtype | None = None,
    optimizer: str | type[torch.optim.Optimizer] = "adamw",
    grad_accumulation: int = 1,
    micro_batches: int = 1,
    layout: str | Layout | None = None,
    memory: float | str | None = None,
    offload: Offload | str | bool | None = None,
    options: Mapping[str, float] | None = None,
    progress: Callable[[str, float], None] | None = None,
    in_subprocess: bool = False,
    loss_head: str = "auto",
) -> Explanation:
    """Why the plan that `plan` makes of the same arguments does not have `op` at `placement`, or what that would cost. mesh: default nodes x devices, also where `plan`
    would take another.

    op: a module's path, a parameter's or an operator's name, or how one ends: "mlp.gate_proj". placement: what mesh axes split, as
    "tp:out" (a loop, as `print(plan)` or the operator's rule names it), "Shard(1) over tp" (a dim of the result or of the parameter) or "Replicate over dp".
    """
    on_progress = _Stages(progress)
    t = task(
        model, inputs, cluster, mesh, loss_fn, precision, optimizer, grad_accumulation, memory, offload, on_progress, in_subprocess, micro_batches,
        None, loss_head,
    )  # fmt: skip
    limits, least = limits_of(options), Memory.of(memory).least

    def planned(t: Task, says_other: bool) -> Plan:
        return plan_graph(
            t.folded, t.mesh_axes, t.cluster, t.training, limits, on_progress, layout, least, None, other_of(t) if says_other else None
        ).plan

    def least_s(t: Task) -> float:
        return least_of(t.folded, t.mesh_axes, t.cluster, t.training)

    if t.other is not None:
        made = better(tuple(Form(f.form, partial(planned, f), partial(least_s, f)) for f in t.forms), least, limits.gap)
        t = t.other if is_chunked(made) else t
    training = t.training
    if least:
        training = within(training, plan_graph(t.folded, t.mesh_axes, t.cluster, training, limits, on_progress, layout, True).plan)
    found = explain_graph(t.folded, t.mesh_axes, t.cluster, training, op, placement, limits, on_progress, layout)
    on_progress.rest()
    return found


def other_of(t: Task) -> Instead | None:
    """What the other form, if there is one, has in place of some of `t`'s operators."""
    return None if t.other is None else instead_of(t.folded, t.other.folded, t.mesh_axes, t.cluster, t.training)


class _Stages:
    """Tells stages, and at the end what none of them had a name for: listed stages last as long as the whole."""

    def __init__(self, progress: Callable[[str, float], None] | None) -> None:
        self.progress = progress or (lambda stage, seconds: None)
        self.start, self.told = time.perf_counter(), 0.0

    def __call__(self, stage: str, seconds: float) -> None:
        self.told += seconds
        self.progress(stage, seconds)

    def rest(self) -> None:
        self.progress("shrinking, rules, applying", max(0.0, time.perf_counter() - self.start - self.told))


def task(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor | Sequence[int]],
    cluster: str | Cluster,
    mesh: str | Mapping[str, int] | None,
    loss_fn: Callable[..., torch.Tensor] | None,
    precision: Precision | str | torch.dtype | None,
    optimizer: str | type[torch.optim.Optimizer],
    grad_accumulation: int,
    memory: float | str | None,
    offload: Offload | str | bool | None,
    on_progress: Callable[[str, float], None],
    in_subprocess: bool = False,
    micro_batches: int = 1,
    captures: Captures | None = None,
    loss_head: str = PLAIN,
) -> Task:
    """Checks the arguments of `plan` and captures the model, at the size of a micro-batch (the largest, where they differ). captures: of the whole batch, by the
    parameters of the module that was captured: those of other numbers of micro-batches are made of the same."""
    where = Cluster.of(cluster)
    axes = mesh_axes(mesh, where)
    budget_bytes = Memory.of(memory).budget_bytes
    kind_of(optimizer)
    checked_form(loss_head)
    if grad_accumulation < 1:
        raise AutoparError(f"grad_accumulation must be at least 1, not {grad_accumulation}")
    p = Precision.of(precision)
    tensors = {k: v if isinstance(v, torch.Tensor) else torch.empty(tuple(v), dtype=torch.int64, device="meta") for k, v in inputs.items()}
    params = dict(model.named_parameters(remove_duplicate=False))

    seen: dict[int, dict[str, Graph]] = {}  # the forms of what was captured

    def captured(module: nn.Module, form: str) -> Graph:
        size = len(list(module.parameters()))
        if size not in seen:
            seen[size] = forms(captured_whole(module))
        return seen[size][form]

    def forms(made: Captured) -> dict[str, Graph]:
        if loss_head != ANY_FORM:
            return {loss_head: describe(fused(made) if loss_head == CHUNKED else made)}
        matters = may_matter(logits_bytes(made), math.prod(axes.values()), budget, Memory.of(memory).least)
        return {PLAIN: describe(made), **({CHUNKED: describe(fused(made))} if matters else {})}

    def at_once(first: Callable[[], Graph], second: Callable[[], Graph]) -> tuple[Graph, Graph]:
        """As `beside`, whose copy tells all forms that it saw."""
        (a, told), b = beside(lambda: (first(), seen), second)
        seen.update(told)
        return a, b

    def captured_whole(module: nn.Module) -> Captured:
        module.train()
        call = Call.of((), off_cache(module, tensors))
        shapes = tuple((tuple(t.shape), t.dtype) for t in call.tensors)

        def captured_at(shapes: Shapes) -> Captured:
            return capture(module, call, shapes, loss_fn=loss_fn, cast=p.param)

        if micro_batches == 1 and captures is None:
            found = captured_at(shapes)
        else:
            batch = batch_size(tuple(Tensor("", s, "") for s, _ in shapes)) or 1
            kept = {} if captures is None else captures
            whole = kept.setdefault(len(list(module.parameters())), WholeBatch(shapes, batch, 1))
            samples = samples_of(batch, micro_batches, math.prod(axes.values()))[0]
            found = whole.alone(captured_at) if micro_batches == 1 else whole.part(samples, captured_at)
        refuse_unknown_random(found.gm)
        return found

    on_progress(Begun("capture"), 0.0)
    start = time.perf_counter()
    budget = where.device.usable_bytes if budget_bytes is None else budget_bytes

    def of(form: str) -> Task:
        folded = program(model, partial(captured, form=form), at_once if in_subprocess and not seen else None)
        made = training_config(
            {n: q.dtype for n, q in params.items()},
            frozenset(n for n in folded.graph.params if params[n].requires_grad),
            p.reduce,
            optimizer,
            budget,
            grad_accumulation,
            micro_batches,
        )
        return Task(model, folded, axes, where, Offload.of(offload, where).within(made, where), form)

    found = of(PLAIN if loss_head == ANY_FORM else loss_head)
    # Where `program` has its capture from elsewhere nothing was seen here, and there is no other form to plan.
    if loss_head == ANY_FORM and seen and all(CHUNKED in s for s in seen.values()):
        found = replace(found, other=of(CHUNKED))
    on_progress("capture", time.perf_counter() - start)
    return found


def shapes_of(inputs: Mapping[str, torch.Tensor | Sequence[int]]) -> list[tuple[int, ...]]:
    return [tuple(v.shape) if isinstance(v, torch.Tensor) else tuple(v) for v in inputs.values()]


def program(model: nn.Module, captured: Callable[[nn.Module], Graph], both: Both | None = None) -> Folded:
    """The fold of `captured(model)`, from shallower copies of the module where they suffice; its note says which."""
    lists = layer_periods(model)
    depths = {path: r.layers for path, r in lists.items() if r.layers > least_depth(*r)}
    periods, heads = ({path: getattr(lists[path], what) for path in depths} for what in ("period", "head"))
    if not depths:
        odd = [path for path, r in lists.items() if r.layers > least_depth(r.layers, 1, 0)]
        why = f"captured in full: the layers of {', '.join(odd)} do not repeat often enough" if odd else ""
        return replace(fold(captured(reduced_depth(model, {}))), note=why)
    try:
        return tiled(lambda layers: captured(reduced_depth(model, layers)), depths, periods, both, heads)
    except CaptureError as e:  # a forward may want all of its layers
        why = f"captured in full: a copy with fewer layers cannot be captured ({e.what})"
        return replace(fold(captured(reduced_depth(model, {}))), note=why)


def _frontier(
    t: Task,
    points: int,
    limits: Limits,
    progress: Callable[[str, float], None] | None,
    layout: str | Layout | None,
    most_bytes: float = math.inf,
    known: Sequence[Found] = (),
) -> Frontier:
    return frontier_graph(
        t.folded, t.mesh_axes, t.cluster, t.training, points, limits, progress, layout, most_bytes, known,
        lambda made: _of_the_whole(made, t.folded, t.model),
    )  # fmt: skip


def _of_the_whole(made: Plan, folded: Folded, model: nn.Module) -> Plan:
    """`made` for all parameters of `model`, of which `folded` may have captured few; what collectives serve by names that any capture has."""
    params = dict(model.named_parameters())
    stands = expand_params(folded, {n: tuple(p.shape) for n, p in params.items()})
    return replace(
        made,
        params={n: replace(made.params[like], trainable=params[n].requires_grad) for n, like in stands.items()},
        collectives=served(made, folded),
        modules=modules_of(folded.graph),
        solver={**made.solver, **({"capture": folded.note} if folded.note else {})},
    )
