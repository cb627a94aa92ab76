"""Makes steps for a ParallelModule, and puts its parameters where the plan stores them.

The first call with a backward makes the plan. Calls before it (evaluation) run with parameters where they were put at first; calls after it that the
plan does not cover (other shapes, no gradients) leave parameters where the plan stores them and split the rest by `propagate`.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Placement as DPlacement

from autopar import _torch
from autopar.capture.capture import Call, Captured, NotGeneralError, Shapes, tensor_named
from autopar.capture.micro_batches import WholeBatch
from autopar.cost import Cost
from autopar.distributed.agreement import Facts, agreed, from_first
from autopar.distributed.failures import during
from autopar.distributed.groups import Groups
from autopar.distributed.shards import dtensor_placements, redistributed
from autopar.errors import AutoparError
from autopar.graph.graph import Graph, Tensor
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.graph.varying import Varying
from autopar.hardware.cluster import Cluster
from autopar.hardware.detect import here, with_triton_of
from autopar.passes.stages.separate import owner
from autopar.pipeline import Lists
from autopar.plan.decisions import ParamChoice
from autopar.plan.plan import Plan
from autopar.plan.schema import canonical, dumps
from autopar.planner.formulation.overlap_windows import window_of
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.layout import Layout
from autopar.planner.loss_head import is_chunked
from autopar.planner.micro_batches import fastest, from_the_middle, of_the_call
from autopar.planner.offload import Offload
from autopar.planner.planning import least_of
from autopar.planner.propagate import propagate
from autopar.planner.request import asked, following, make_plan, refuse_other_mesh, training_config
from autopar.planner.roomy import roomy
from autopar.planner.staged import of_a_stage
from autopar.planner.storage import param_choice
from autopar.runtime.artifacts import CompiledAhead
from autopar.runtime.as_stored import AsStored
from autopar.runtime.compile_cache import CompileOnce
from autopar.runtime.config import Config
from autopar.runtime.expert_load import ExpertLoad
from autopar.runtime.facts import facts
from autopar.runtime.forms import Forms, settled
from autopar.runtime.init import distribute, materialize
from autopar.runtime.inputs import InputReader
from autopar.runtime.larger_calls import larger
from autopar.runtime.links import prices
from autopar.runtime.open_store import OpenStore, opened
from autopar.runtime.pipeline import Seen, Settings, seen
from autopar.runtime.stages import Pipeline, StagedStep, stage_mesh, staged
from autopar.runtime.step import Step
from autopar.solver.fold import Folded
from autopar.text.progress import told


def no_plan() -> AutoparError:
    return AutoparError(
        "there is no plan yet",
        fix="pass example_inputs= to autopar.compile, or run one step: the first training step is captured and planned",
    )


class Builder:
    def __init__(self, model: nn.Module, device_mesh: DeviceMesh, config: Config) -> None:
        self.model, self.config = model, config
        self.device_mesh, whole = stage_mesh(device_mesh)
        _torch.dtensors_beside_tensors()
        self.groups = Groups(self.device_mesh, whole)
        self.mesh, self.axes = self.groups.mesh, self.groups.axes  # that are planned for
        every = tuple(a.name for a in self.mesh.axes if a.size > 1)
        self.device = self.groups.device
        with during("compile", self.groups.ranks):
            self.groups.meet()
            self.layout, self.cluster = agreed(self.groups, self.arguments)
        given = config.request.plan
        # Where a training call runs on several stages, one rank's after another's.
        self.pipeline = (
            None if config.schedule is None else Pipeline(self.groups, config.schedule, None if given is None else given.pipeline)
        )
        # Of a hand layout, of the given plan, or of a plan yet to be made: that one takes local inputs as they come.
        split = self.layout.data if self.layout else given.data_axes if given else every
        self.reader = InputReader(self.groups, config.inputs, split)
        self.first = self.first_on(self.mesh)
        self.plan: Plan | None = None
        self.largest = 0  # elements of an input, of the calls that `too_large` has looked at
        self.planned = self.layout is not None
        # Whether heads under a loss make no logits; None: not known before there is a plan.
        self.chunked = settled(config.loss_head, given, self.planned)
        self.once = CompileOnce(self.groups.id, self.groups.compiling) if config.backend == "inductor" else None
        self.ahead = None if config.artifacts is None else CompiledAhead(model, config, self.groups)
        self.coordinates: dict[str, torch.Tensor] = {}
        self.as_stored = AsStored(self.groups)
        # Of a training call; 0 until it is chosen ("auto").
        chosen = config.micro_batches or (given.micro_batches if given is not None else 1)
        self.micro_batches = chosen if isinstance(chosen, int) else 0
        self.chosen: Plan | None = None  # of as many as were chosen, until it is used
        self.load = ExpertLoad(self.groups.rank)
        self.opened: OpenStore | None = None  # of activations that are away
        self.links: Cost | None = None
        self.links = self.links_of(self.mesh) if self.mesh.size > 1 else None

    def arguments(self) -> tuple[tuple[Layout | None, Cluster | None], Facts]:
        """The hand layout, else what to plan for (neither where a plan is given); and what all ranks must pass alike."""
        request = self.config.request
        layout = None if self.config.layout is None else Layout.of(self.config.layout, self.mesh)
        cluster = request.cluster
        if request.plan is not None:
            refuse_other_mesh(request.plan, self.groups.axes)
        elif layout is None and cluster is None:
            cluster = here(self.device, self.mesh.size)
        return (layout, None if cluster is None else with_triton_of(cluster, self.device)), self.facts()

    def first_on(self, mesh: Mesh) -> Layout:
        """How calls are split before there is a plan."""
        every = tuple(a.name for a in mesh.axes if a.size > 1)
        return Layout(data=every, shard=every, name="fsdp")

    def links_of(self, mesh: Mesh) -> Cost | None:
        """Prices of the cluster this runs on, on a mesh; None where it is none that there is a description of. Collective, where they are not known of one as large."""
        if self.links is not None and self.links.cluster.size >= mesh.size:
            return Cost(self.links.cluster, mesh)
        return prices(self.groups, self.cluster or self.config.request.cluster, self.device, mesh)

    def facts(self) -> Facts:
        """What must be the same on all ranks before parameters are spread."""
        return facts(self.model, self.config, self.groups.axes)

    def of(self, model: nn.Module) -> Builder:
        """For a copy of the model: on the same groups, by the same plan."""
        other = copy.copy(self)
        other.model, other.opened = model, None
        return other

    def planning_for(self, axes: dict[str, int], plan: Plan | None = None, lists: Lists | None = None) -> Builder:
        """That plans for another mesh; only for that. plan: that there is for it already; lists: of a pipeline with such stages. Raises ClusterError where the cluster that was given has fewer."""
        other = copy.copy(self)
        other.axes, other.mesh, other.chosen = axes, Mesh.of(axes), None
        request = self.config.request if plan is None else replace(self.config.request, plan=plan)
        other.config = replace(self.config, request=request, schedule=lists)
        if plan is None:
            other.cluster = with_triton_of(self.config.request.cluster or here(self.device, other.mesh.size), self.device)
        return other

    # ---- parameters ------------------------------------------------------------------------------------------

    def placements(self, name: str, shape: tuple[int, ...]) -> tuple[DPlacement, ...]:
        """Of a parameter, before there is a plan: what is right for all layouts that do not split tensors."""
        layout, mesh = self.first if self.layout is None or self.layout.tensor else self.layout, self.mesh
        if self.pipeline is not None:  # whose stages are not known yet
            whole = self.groups.whole
            mesh = Mesh.of({n: whole.size(i) for i, n in enumerate(whole.mesh_dim_names or ())})
            layout = self.first_on(mesh)
        choice = param_choice(Tensor(name, tuple(shape), "float32"), Placement.of(tuple(shape)), layout, mesh, True)
        return dtensor_placements(choice.storage, mesh)

    def lies(self, name: str, shape: tuple[int, ...]) -> tuple[DeviceMesh, tuple[DPlacement, ...]]:
        """Of a parameter: where the plan stores it, or as before there is one, which is on all of a pipeline's stages."""
        choice = None if self.plan is None else self.plan.params.get(name)
        if self.pipeline is not None and self.pipeline.placed and choice is None:
            return self.device_mesh, self.pipeline.whole_on_a_stage(shape)
        if choice is None or (self.pipeline is not None and not self.pipeline.placed):
            return self.groups.whole, self.placements(name, shape)
        return self.device_mesh, dtensor_placements(choice.storage, self.mesh)

    def distribute(self) -> None:
        """Every parameter becomes a DTensor."""
        whole = self.device_mesh if self.pipeline is None else self.groups.whole
        shared = {id(b): n for n, b in self.model.named_buffers()}
        aliases = [(m, a, shared[id(t)]) for m in self.model.modules() for a, t in vars(m).items() if id(t) in shared]
        # No list of them: it would keep every whole parameter alive while they are cut one by one.
        with during("compile: parameters being spread", self.groups.ranks):
            if any(t.is_meta for t in itertools.chain(self.model.parameters(), self.model.buffers())):
                materialize(self.model, whole, self.placements, torch.initial_seed(), self.device)
            else:
                distribute(self.model, whole, self.placements)
        if self.device.type != "cpu":
            for m in self.model.modules():
                for n, b in m._buffers.items():
                    if b is not None:
                        m._buffers[n] = b.to(self.device)
                for n, t in list(vars(m).items()):
                    if isinstance(t, torch.Tensor):
                        vars(m)[n] = t.to(self.device)
        for m, a, n in aliases:  # plain attributes that are a buffer's other name
            vars(m)[a] = tensor_named(self.model, n)

    def settle(self, choices: dict[str, ParamChoice]) -> None:
        """Moves parameters (and gradients) to the plan's storage, in place: optimizers keep their references."""
        pipeline = self.pipeline
        if pipeline is not None and not pipeline.placed:
            pipeline.place(self.model, choices)
            return
        params = dict(self.model.named_parameters(remove_duplicate=False))
        for name, choice in choices.items():
            if pipeline is not None and name in pipeline.away:
                continue
            p = params[name]
            want = dtensor_placements(choice.storage, self.mesh)
            assert isinstance(p, DTensor)
            if p.placements == want:
                continue
            grad = p.grad
            p.grad = None
            _torch.move_parameter(p, redistributed(p, want))
            if isinstance(grad, DTensor):
                p.grad = grad.redistribute(self.device_mesh, want)

    # ---- steps -----------------------------------------------------------------------------------------------

    def build(
        self,
        call: Call,
        shapes: Shapes,
        grad: bool,
        autocast: torch.dtype | None,
        loss_only: bool,
        varying: tuple[Varying, ...] = (),
        batch: WholeBatch | None = None,
    ) -> Step:
        """Captures and lowers one kind of call; the first one with a backward makes the plan that the others follow.

        batch: that the call is a micro-batch of. varying: sizes of it that the step shall be for all of; NotGeneralError where there is none for them."""
        config = self.config
        ranks, tells = self.groups.ranks, self.groups.rank == 0
        program = self.seen(call, shapes, grad, autocast, loss_only, varying, batch)
        stored, trainable = self.parameters(program.graph)
        fixed = self.plan.params if self.plan and self.planned else {}
        decides = not self.planned and any(o.direction == "backward" for o in program.graph.ops)
        if decides:
            with during("planning", ranks):
                plan, self.chosen = self.chosen or self.make_plan(program, stored, trainable), None
            if self.chunked is None:
                self.chunked = is_chunked(plan)
                program = program.chunked or program if self.chunked else program
        captured, graph, folded = program.captured, program.graph, program.folded
        if not decides:
            plan = propagate(graph, self.layout or self.following, self.groups.axes, trainable, fixed)
            plan = replace(plan, imbalance=self.plan.imbalance if self.plan is not None and self.planned else config.request.imbalance)
        if batch is not None:
            plan = replace(plan, micro_batches=self.micro_batches).answering_as(plan)
        if captured.family is not None:
            made_for = "; ".join(v.said(call.paths) for v in captured.family.varying)
            plan = replace(plan, solver={**plan.solver, "sizes": made_for})
        step: Step
        parts = None
        if self.pipeline is not None:
            parts = staged(self.pipeline, captured, graph, plan)
            self.pipeline.holding(self.model, parts)
            stored = {n: stored[owner(n)] for n in parts.graph.params}
        with during("compile: parameters moving to where the plan has them", ranks):
            self.settle({n: c for n, c in plan.params.items() if n not in fixed})
        kind = ("train" if self.model.training else "eval") + ("" if grad else "-no-grad")
        with during("compile", ranks):
            kept = None
            if self.ahead is not None:
                which = f"{kind}, {autocast}, {loss_only}, {batch and (batch.of, batch.parts)}, {shapes}, {[v.said(call.paths) for v in varying]}"
                kept = self.ahead.program(which, program.text, canonical(plan))
            settings = Settings(
                self.device, stored, config.precision.reduce, config.backend, self.once, self.links, config.bucket_collectives, self.store(plan),
                window_of(graph, folded.stacks), self.load, kept,
            )  # fmt: skip
            with told("forward compiled", tells):
                if self.pipeline is not None and parts is not None:
                    step = StagedStep(self.pipeline, parts, (captured, graph, plan), self.groups, settings, kind)
                elif captured.family is None:
                    step = Step(captured, graph, plan, self.groups, settings, kind)
                else:
                    step = agreed(self.groups, lambda: (self._general(captured, graph, plan, settings, kind), {}))
            step.program = program.text
        if decides or self.plan is None or (self.layout is not None and grad and not self.plan.collectives):
            whole = replace(step.plan, params=plan.params).answering_as(plan)
            self.plan = self.pipeline.told(whole, step) if self.pipeline is not None and isinstance(step, StagedStep) else whole
        else:
            self.plan = replace(self.plan, params={**plan.params, **self.plan.params})
        self.planned = self.planned or decides
        return step

    def seen(
        self,
        call: Call,
        shapes: Shapes,
        grad: bool,
        autocast: torch.dtype | None,
        loss_only: bool,
        varying: tuple[Varying, ...] = (),
        batch: WholeBatch | None = None,
    ) -> Seen:
        """What the model computes of such a call: the same program on all ranks."""
        config = self.config

        def seen_here() -> tuple[Seen, Facts]:
            found = seen(
                self.model, call, shapes,
                loss_fn=config.loss_fn, loss_only=loss_only, grad=grad,
                cast=config.precision.param, autocast=autocast, varying=varying, batch=batch,
            )  # fmt: skip
            found = found.chunked or found if self.chunked else found
            # A plan names operators, so their names must be the same as well.
            return found, {"the program": found.text, "its operators": "\n".join(o.name for o in found.graph.ops)}

        with during("capture", self.groups.ranks), told("captured", self.groups.rank == 0):
            return agreed(self.groups, seen_here)

    def parameters(self, graph: Graph) -> tuple[dict[str, torch.dtype], frozenset[str]]:
        """Of those that a program reads the dtypes, and which are trained."""
        params = dict(self.model.named_parameters(remove_duplicate=False))
        for n, p in params.items():
            if not isinstance(p, DTensor):
                raise AutoparError(
                    f"parameter {n!r} came to the model after autopar.compile, so it is on no mesh",
                    fix="change the model first, then call autopar.compile",
                )
        return {n: params[n].dtype for n in graph.params}, frozenset(n for n in graph.params if params[n].requires_grad)

    def choose(self, numbers: Sequence[int], samples: int, task: Callable[[int], Seen]) -> None:
        """Plans each of these numbers of micro-batches for the call whose program `task` captures, and takes what is fastest: from those on that leave room in memory. samples: of
        all ranks. Collective."""
        began, limits, task = time.perf_counter(), self.config.request.limits, cache(task)

        def is_late(needs_s: float) -> bool:
            late = not limits.in_proportion and time.perf_counter() + needs_s > began + limits.seconds
            return bool(from_first(self.groups, lambda: "late" if late else ""))

        def first() -> str:
            self.micro_batches, whole = 1, task(1)
            s = self.training(*self.parameters(whole.graph))
            forms = Forms(whole, self.chunked, self.mesh.size, s.budget_bytes, self.config.request.least)
            return str(min(roomy(numbers, p.folded, self.mesh.size, s, samples) for p in forms.of.values()))

        def least_s(m: int, found: Seen) -> float:
            self.micro_batches = m
            s = self.training(*self.parameters(found.graph))
            return m * Forms(found, self.chunked, self.mesh.size, s.budget_bytes, self.config.request.least).least_s(
                lambda f: self._least_s(f, s)
            )

        def planned(m: int, found: Seen) -> Plan:
            self.micro_batches = m
            with during("planning", self.groups.ranks):
                return self.make_plan(found, *self.parameters(found.graph))

        try:
            task(1)
            middle = int(from_first(self.groups, first))
            self.chosen, best = fastest(from_the_middle(numbers, middle), task, least_s, planned, is_late, gap=limits.gap)
            self.micro_batches = best.number
        except BaseException:
            self.micro_batches = 0
            raise

    def _general(self, captured: Captured, graph: Graph, plan: Plan, settings: Settings, kind: str) -> Step:
        """A step for all sizes of some dims; NotGeneralError says why there is none."""
        try:
            step = Step(captured, graph, plan, self.groups, settings, kind)
            if step.has_backward and self.config.grad_accumulation == 1:
                step.backward_of(True, False)  # what compiling assumes of sizes is to be known before one is run
        except NotGeneralError:
            raise
        except Exception as e:
            raise NotGeneralError(f"{type(e).__name__}: {next(iter(str(e).splitlines()), '')}") from e
        return step

    @property
    def batch_ranks(self) -> int:
        """Over how many ranks the batch is split; before there is a plan, over how many it may be."""
        return self.data_world if self.planned or self.config.inputs == "local" else self.mesh.size

    def make_plan(self, program: Seen, stored: dict[str, torch.dtype], trainable: frozenset[str]) -> Plan:
        """One rank plans, all apply what it says."""
        request, axes, s = self.config.request, self.axes, self.training(stored, trainable)
        forms = Forms(program, self.chunked, self.mesh.size, s.budget_bytes, request.least)

        def here() -> str:
            def make(f: Folded, other: Folded | None) -> Plan:
                return make_plan(request, self.cluster, f, axes, s, other)

            try:
                return dumps(forms.planned(make, lambda f: self._least_s(f, s), request.limits.gap))
            except InfeasibleError as e:
                raise e.of_one_micro_batch() if self.config.micro_batches is None and self.config.schedule is None else e from None

        made = Plan.loads(from_first(self.groups, here))
        if request.plan is not None or self.cluster is None:
            return made
        return of_the_call(asked(made, request, self.cluster, forms.that(made).folded, axes, s), self.micro_batches)

    def _least_s(self, folded: Folded, s: TrainingConfig) -> float:
        assert self.cluster is not None
        return least_of(folded, self.axes, self.cluster, s)

    def too_large(self, shapes: Shapes) -> str:
        """Of a call larger than the plan was made for, and than any before it, what to tell where it may not fit: activations grow as inputs do."""
        plan = self.plan
        if plan is None or not self.planned or "peak_memory_bytes" not in plan.predicted:
            return ""
        planned = max((math.prod(p.shape) for p in plan.inputs), default=0)
        now = max((math.prod(s) for s, _ in shapes), default=0)
        if not planned or now <= max(planned, self.largest):
            return ""
        self.largest = now
        return larger(plan, planned, now, dict(self.model.named_parameters()), self.mesh, self.training({}, frozenset()).state_bytes)

    def training(self, stored: dict[str, torch.dtype], trainable: frozenset[str]) -> TrainingConfig:
        """What a plan depends on besides the program."""
        request, c = self.config.request, self.config
        budget_bytes = request.memory_bytes or (self.cluster.device.usable_bytes if self.cluster else math.inf)
        s = training_config(
            stored, trainable, c.precision.reduce, c.optimizer, budget_bytes, c.grad_accumulation, self.micro_batches, c.bucket_collectives,
            request.imbalance,
        )  # fmt: skip
        s = replace(s, fuses=c.backend == "inductor")
        if (lists := c.schedule) is not None:
            s = of_a_stage(s, len(lists.ranks), lists.stages, lists.most_in_flight)
        return s if self.cluster is None else Offload.of(request.offload, self.cluster).within(s, self.cluster)

    def store(self, plan: Plan) -> str:
        """The name of the place that keeps activations for this model, opened when a plan first wants one; "" where none does. Collective then."""
        if not plan.offload:
            return ""
        if self.opened is None:
            self.opened = opened(plan, self.cluster or here(self.device, self.mesh.size), self.config.request.offload, self.groups)
        return self.opened.name

    @property
    def following(self) -> Layout:
        """How calls are split that no plan covers."""
        return following(self.plan) if self.plan and self.planned else self.first

    # ---- data ------------------------------------------------------------------------------------------------

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes that the batch is split over; those of local inputs never change."""
        if self.config.inputs == "local" or self.layout is not None or self.config.request.plan is not None:
            return self.reader.data_axes
        if self.plan is None or not self.planned:
            raise no_plan()
        return self.plan.data_axes

    @property
    def data_world(self) -> int:
        return self.mesh.sizes_product(self.data_axes)

    @property
    def data_rank(self) -> int:
        rank = 0
        for a in self.data_axes:
            rank = rank * self.mesh.axis_size(a) + self.groups.coordinates[a]
        return rank

    def coordinate(self, axis: str) -> torch.Tensor:
        if axis not in self.coordinates:
            with torch.inference_mode(False):  # kept: a step that trains cannot save what was made in inference mode
                self.coordinates[axis] = torch.tensor(self.groups.coordinates[axis], dtype=torch.int64, device=self.device)
        return self.coordinates[axis]

    def dtensor(self, local: torch.Tensor, p: Placement) -> DTensor:
        return _torch.dtensor(local, self.device_mesh, dtensor_placements(p, self.mesh), p.shape)

    def gradient(self, name: str, local: torch.Tensor, plan: Plan) -> DTensor:
        return self.as_stored.gradient(name, local, plan.params.get(name) or self.choice(name))

    def reduced(self, name: str, local: torch.Tensor, p: Placement) -> torch.Tensor:
        return self.as_stored.reduced(local, p, self.choice(name), self.model.get_parameter(name).dtype)

    def choice(self, name: str) -> ParamChoice:
        """Of a parameter that some program has."""
        assert self.plan is not None
        return self.plan.params[name]
