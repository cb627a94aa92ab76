"""A step that is to be planned: the model's program as it is captured, folded, on a mesh of a described cluster.

The time to capture does not grow with depth: copies of the module with few layers are captured (`tile.py`, `depth_reduced.py`), and the whole module only where
they do not show what it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

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
from autopar.planner.formulation.instead import Instead
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.found import Found
from autopar.planner.frontier import Frontier, frontier_graph
from autopar.planner.imbalance import EVEN, check_experts
from autopar.planner.layout import Layout
from autopar.planner.loss_head import AUTO as ANY_FORM
from autopar.planner.loss_head import CHUNKED, PLAIN, may_matter
from autopar.planner.loss_head import checked as checked_form
from autopar.planner.memory import Memory
from autopar.planner.offload import Offload
from autopar.planner.other_form import instead_of
from autopar.planner.precision import Precision
from autopar.planner.refit import modules_of, served
from autopar.planner.request import training_config
from autopar.planner.storage import batch_size
from autopar.solver.fold import Folded, fold
from autopar.solver.solve import Limits
from autopar.text.stages import Begun

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
    imbalance: float = EVEN,
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
        check_experts(folded.graph, imbalance)
        made = training_config(
            {n: q.dtype for n, q in params.items()},
            frozenset(n for n in folded.graph.params if params[n].requires_grad),
            p.reduce,
            optimizer,
            budget,
            grad_accumulation,
            micro_batches,
            imbalance=imbalance,
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


def other_of(t: Task) -> Instead | None:
    """What the other form, if there is one, has in place of some of `t`'s operators."""
    return None if t.other is None else instead_of(t.folded, t.other.folded, t.mesh_axes, t.cluster, t.training)


def of_the_whole(made: Plan, folded: Folded, model: nn.Module) -> Plan:
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


def frontier_of(
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
        lambda made: of_the_whole(made, t.folded, t.model),
    )  # fmt: skip
