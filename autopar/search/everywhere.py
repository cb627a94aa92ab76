"""`autopar.plan`: where no mesh is asked for, pipelines are among what is chosen from.

    1. the best plan without a pipeline                                   (`autopar.planner.offline`, over the cluster's meshes)
    2. hand layouts with a pipeline that are faster, by the same prices   (`autopar.search`, best first, with the plan's time as what is to be beaten)
    3. of the best of them the mesh and the number of micro-batches: planned, with free choice of all else, the schedule included (`autopar.planner.schedules`)

So no hand layout with a pipeline is faster than the answer, but for those of which there was no time to look, which it says; of models with routed experts, whose layouts are
many, the most likely are looked at (`autopar.search.best_first`) for as long as the first took. The second is left out where it could save little: a plan
takes no longer than its work, what it makes again for want of memory, and what communication adds; a pipeline takes nothing away but of the last two.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.capture.experts import has_experts
from autopar.errors import AutoparError
from autopar.graph.graph import Tensor
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.planner import offline
from autopar.planner.axes import PIPELINE, said
from autopar.planner.imbalance import EVEN
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.layout import Layout
from autopar.planner.memory import Memory
from autopar.planner.meshes import SAME, may_be_better
from autopar.planner.micro_batches import AUTO
from autopar.planner.offload import Offload
from autopar.planner.precision import Precision
from autopar.planner.request import limits_of
from autopar.planner.storage import batch_size
from autopar.planner.task import shapes_of
from autopar.search.api import search
from autopar.search.result import Ranked
from autopar.text.times import format_time

TRIED = 3  # meshes and numbers of micro-batches of the hand layouts that are faster
PAYS = 60.0 / 5000  # seconds of a step, which a minute of planning is worth: as much is saved in so many steps
AGAIN = 0.25  # of a step at most, that making again for want of memory takes: forward is a third of it
LOOKS_S = 30.0  # at least, for layouts that share experts
TOLD = "pipelines"  # of a plan's solver: what was tried

Inputs = Mapping[str, torch.Tensor | Sequence[int]]


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
    schedule: str | None = None,
    virtual_stages: int | None = None,
    imbalance: float = EVEN,
) -> Plan:
    """The best plan of one training step of `model` on `cluster`.

    inputs: keyword arguments of a call, tensors or shapes (a shape is taken for token ids, int64). mesh: "32x8" or axis sizes by name; default the
    cluster's nodes x devices, or these cut elsewhere, where that is faster (`autopar.planner.meshes`), or, with micro_batches="auto", stages of a pipeline (above). optimizer: a name of `autopar.cost.optimizers.KINDS` or a class. grad_accumulation: calls for each of its steps; times are of
    one call, with its share of the reduction of gradients and of that step. micro_batches: that a call is run as, one after the other; "auto": as many as is fastest
    (`autopar.planner.micro_batches`). memory: budget of a device in bytes; "fastest", as by default: what it has, less a reserve; "least": the plan of the smallest
    peak instead of the fastest one. offload: where activations may be kept besides the device: "host",
    False or an `Offload`; default nowhere. layout: the best plan that is this hand
    layout. loss_head: whether a linear layer under a cross-entropy makes all its logits ("plain"), or makes them tile by tile and again in backward ("chunked"); "auto": both
    are planned where that may matter (`autopar.planner.loss_head`). options: "seconds" from the call to the plan, "gap", "memory_bytes" of this process. progress: called with a stage's name and its seconds (`autopar.text.stages` says with what else). in_subprocess: captures two depths of the model at
    once, one in a forked process: not where other threads run or CUDA is in use. schedule, virtual_stages: of the pipeline that a mesh with an axis "pp" is, as for
    `autopar.compile` (`autopar.planner.pipelined`). imbalance: of routed experts that are split over ranks, rows of the fullest
    rank over the mean, which is what is priced (`autopar.planner.imbalance`); 1.0: even load.

    Raises InfeasibleError when nothing fits, CaptureError, MeshError, ClusterError, LayoutError; AutoparError for an imbalance that cannot be.
    """
    how: dict[str, Any] = {
        "loss_fn": loss_fn, "precision": precision, "optimizer": optimizer, "grad_accumulation": grad_accumulation, "micro_batches": micro_batches,
        "layout": layout, "memory": memory, "offload": offload, "options": options, "progress": progress, "in_subprocess": in_subprocess, "loss_head": loss_head,
        "schedule": schedule, "virtual_stages": virtual_stages, "imbalance": imbalance,
    }  # fmt: skip
    if mesh is not None or not _is_free(how):
        return offline.plan(model, inputs, cluster, mesh, **how)
    began, where = time.perf_counter(), Cluster.of(cluster)
    best: Plan | None = None
    lacking: InfeasibleError | None = None
    try:
        best = offline.plan(model, inputs, where, **how)
    except InfeasibleError as e:
        lacking = e
    took_s, limits = time.perf_counter() - began, limits_of(how.get("options"))
    if where.size == 1 or (best is not None and may_save_s(best) < PAYS):
        return _or_raise(best, lacking)
    if not limits.in_proportion and best is not None and limits.seconds - took_s < took_s:
        return told(best, "not tried, for want of time")

    def late() -> bool:
        return not limits.in_proportion and time.perf_counter() - began > limits.seconds

    try:
        left_s = math.inf if limits.in_proportion else limits.seconds - took_s
        found = faster(model, inputs, where, best, how, min(max(LOOKS_S, took_s), left_s / 2))
    except InfeasibleError:
        return _or_raise(best, lacking)
    except AutoparError as e:  # what has no layers, or no sequence
        return told(_or_raise(best, lacking), f"not tried: {e.what}")
    if not found:
        return told(_or_raise(best, lacking), f"no hand layout takes less than {format_time(_seconds(best))}")
    tried: list[str] = []
    asked = {str(a): a for a in (asked_of(r, batch_of(inputs)) for r in found)}
    for axes, number in list(asked.values())[:TRIED]:
        name = f"{said(axes)}, {number} micro-batches"
        if late():
            tried.append(f"{name}: not tried, for want of time")
            continue
        try:
            made = offline.plan(model, inputs, where, axes, **{**how, "micro_batches": number})
        except AutoparError as e:
            tried.append(f"{name}: {'does not fit' if isinstance(e, InfeasibleError) else 'no plan was found'}")
            continue
        schedule = "" if made.pipeline is None else f" by {made.pipeline.schedule}"
        tried.append(f"{name}: {format_time(made.predicted['step_time_s'])}{schedule}")
        if best is None or made.predicted["step_time_s"] < (1 - SAME) * best.predicted["step_time_s"]:
            best = made
    return told(_or_raise(best, lacking), f"tried, each with a bound of its own: {'; '.join(tried)}")


def _is_free(how: Mapping[str, Any]) -> bool:
    """Whether all that a pipeline needs chosen is left to the planner."""
    asked = (how.get(k) for k in ("layout", "schedule", "virtual_stages"))
    is_free = all(x is None for x in asked) and how.get("grad_accumulation", 1) == 1
    return is_free and how.get("micro_batches", 1) == AUTO and not Memory.of(how.get("memory")).least


def may_save_s(plan: Plan) -> float:
    """Of a step, at most, that a pipeline may take away."""
    if not may_be_better(plan):
        return 0.0
    step_s = plan.predicted["step_time_s"]
    again_s = AGAIN * step_s if plan.recompute or plan.offload else 0.0
    return min(step_s, plan.predicted.get("exposed_s", 0.0) + again_s)


def faster(model: nn.Module, inputs: Inputs, where: Cluster, best: Plan | None, how: Mapping[str, Any], seconds: float) -> list[Ranked]:
    """Hand layouts with a pipeline on all devices that take less than `best`. seconds: to look at those of routed experts, of which none splits the sequence: on the
    same mesh the planner does, where that is faster."""
    depths = [k for k in range(2, where.size + 1) if where.size % k == 0]
    shared: dict[str, Any] = (
        {"options": {"cp": (1,)}, "seconds": seconds} if has_experts(model) else {"options": {"ep": (1,), "expert_tp": (None,)}}
    )
    shared["options"] |= {"pp": depths, "offload": bool(how.get("offload")), "idle": False}
    same = {k: how[k] for k in ("loss_fn", "precision", "optimizer", "in_subprocess", "imbalance")}
    memory = how.get("memory")
    return search(
        model, inputs, where, global_batch=batch_of(inputs), top_k=2 * TRIED, memory=None if isinstance(memory, str) else memory,
        below_s=_seconds(best), **shared, **same,
    )  # fmt: skip


def asked_of(r: Ranked, batch: int) -> tuple[dict[str, int], int]:
    """Mesh and number of micro-batches of a hand layout. Replicas and shards of the sequence are one axis, and neighbours with data that share experts another: the planner
    splits what it will."""
    lay = r.layout
    data = r.cluster.size // (lay.pp * lay.tp)
    axes = {PIPELINE: lay.pp, "dp": data // lay.sharing, "ep": lay.sharing, "tp": lay.tp}
    axes = {n: k for n, k in axes.items() if k > 1 or n in (PIPELINE, "dp")}
    return axes, batch // (lay.micro_batch * (data // lay.cp))


def batch_of(inputs: Inputs) -> int:
    return batch_size(tuple(Tensor("", shape, "") for shape in shapes_of(inputs))) or 1


def told(plan: Plan, what: str) -> Plan:
    return replace(plan, solver={**plan.solver, TOLD: what}).answering_as(plan)


def _seconds(best: Plan | None) -> float:
    return float("inf") if best is None else float(best.predicted["step_time_s"])


def _or_raise(best: Plan | None, lacking: InfeasibleError | None) -> Plan:
    if best is None:
        assert lacking is not None
        raise lacking
    return best
