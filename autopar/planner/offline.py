"""`autopar.plan`: a plan without the cluster. The model may lie on the meta device; nothing is computed and no process group is needed.

The time to capture does not grow with depth: copies of the module with few layers are captured (`tile.py`, `depth_reduced.py`), and the whole module only where
they do not show what it is. The plan names the operators that were captured; `refit` gives it the names of a capture of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from autopar.errors import AutoparError, MeshError
from autopar.graph.graph import Tensor
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.planner.axes import PIPELINE as AXIS
from autopar.planner.axes import mesh_axes, said
from autopar.planner.explain import Explanation, explain_graph
from autopar.planner.frontier import Frontier
from autopar.planner.imbalance import EVEN
from autopar.planner.imbalance import checked as checked_load
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.layout import Layout
from autopar.planner.loss_head import AUTO as ANY_FORM
from autopar.planner.loss_head import Form, better, is_chunked
from autopar.planner.loss_head import checked as checked_form
from autopar.planner.memory import Memory
from autopar.planner.meshes import others
from autopar.planner.micro_batches import AUTO, checked
from autopar.planner.offload import Offload
from autopar.planner.over_meshes import Planner
from autopar.planner.pipelined import Asked
from autopar.planner.planning import least_of, plan_graph, within
from autopar.planner.precision import Precision
from autopar.planner.progress import Progress
from autopar.planner.request import limits_of
from autopar.planner.storage import batch_size
from autopar.planner.task import Captures, Task, frontier_of, other_of, shapes_of, task


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
    imbalance: float = EVEN,
    schedule: str | None = None,
    virtual_stages: int | None = None,
) -> Plan:
    """As `autopar.plan`, which this is but for pipelines that nobody asked for (`autopar.search.everywhere`)."""
    on_progress = Progress(progress)
    captures: Captures = {}
    least = Memory.of(memory).least
    number = checked(micro_batches)
    if least and number == AUTO:
        raise AutoparError(
            'memory="least" asks for the smallest peak, which more micro-batches make smaller', fix="pass a number of micro_batches"
        )

    where = Cluster.of(cluster)
    axes = mesh_axes(mesh, where)
    checked_load(imbalance, where.size)

    def captured(m: int, on: Cluster = where, mesh: str | Mapping[str, int] | None = mesh) -> Task:
        return task(
            model, inputs, on, mesh, loss_fn, precision, optimizer, grad_accumulation, memory, offload, on_progress, in_subprocess, m,
            None if number == 1 else captures, loss_head, imbalance,
        )  # fmt: skip

    batch = batch_size(tuple(Tensor("", shape, "") for shape in shapes_of(inputs))) or 1
    if AXIS in axes:
        asked = Asked(captured, batch, limits_of(options), on_progress, layout, least)
        made = asked.plan(model, axes, where, schedule, virtual_stages, number)
        on_progress.rest()
        return made
    if schedule is not None or virtual_stages is not None:
        raise MeshError(
            f"a schedule is of a pipeline, and the mesh {said(axes)} has no axis {AXIS!r}",
            where="mesh",
            fix=f"pass a mesh such as {AXIS}=2,dp=4, or leave the schedule out",
        )
    planner = Planner(captured, batch, limits_of(options), on_progress, layout, least)
    try:
        if mesh is None and layout is None and not least:
            made = planner.best_of(axes, list(others(where)), number)
        else:
            made = planner.plan(axes, number)
    except InfeasibleError as e:
        raise e.of_one_micro_batch() if number == 1 else e from None
    on_progress.rest()
    return made


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
    imbalance: float = EVEN,
) -> Frontier:
    """Plans from the fastest to the one of least memory: `plan.frontier()` of what `plan` makes of the same arguments, without making it. mesh: default nodes x devices, also
    where `plan` would take another.

    points: at most so many. memory: no plan that needs more; default any, also more than a device has. loss_head: "plain" or "chunked". options: "seconds" are for all points.
    imbalance: as for `plan`.
    """
    on_progress = Progress(progress)
    if checked_form(loss_head) == ANY_FORM:
        raise AutoparError('a frontier is of one program, and loss_head="auto" of two', fix='pass "plain" or "chunked"')
    request = Memory.of(memory)
    if request.least:
        raise AutoparError(
            "a frontier ends at the least memory anyway", fix="leave memory= out, or give the most bytes that a plan may need"
        )
    checked_load(imbalance, Cluster.of(cluster).size)
    t = task(
        model, inputs, cluster, mesh, loss_fn, precision, optimizer, grad_accumulation, memory, offload, on_progress, in_subprocess, micro_batches,
        None, loss_head, imbalance,
    )  # fmt: skip
    most = math.inf if request.budget_bytes is None else request.budget_bytes
    found = frontier_of(t, points, limits_of(options), on_progress, layout, most)
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
    imbalance: float = EVEN,
) -> Explanation:
    """Why the plan that `plan` makes of the same arguments does not have `op` at `placement`, or what that would cost. mesh: default nodes x devices, also where `plan`
    would take another.

    op: a module's path, a parameter's or an operator's name, or how one ends: "mlp.gate_proj". placement: what mesh axes split, as
    "tp:out" (a loop, as `print(plan)` or the operator's rule names it), "Shard(1) over tp" (a dim of the result or of the parameter) or "Replicate over dp".
    """
    on_progress = Progress(progress)
    checked_load(imbalance, Cluster.of(cluster).size)
    t = task(
        model, inputs, cluster, mesh, loss_fn, precision, optimizer, grad_accumulation, memory, offload, on_progress, in_subprocess, micro_batches,
        None, loss_head, imbalance,
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
