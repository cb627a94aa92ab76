"""How a module comes by its plan: made here by the integer program, or given and refitted to what was captured.

Everything of the user's that a plan depends on besides the program is a `PlanRequest`. A plan is decided on one rank; it travels as JSON, and all ranks,
the first one too, apply what they read from that text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from autopar.cost.optimizers import kind_of
from autopar.errors import AutoparError, MeshError
from autopar.graph.graph import DTYPE_BYTES, Tensor
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.plan.decisions import ParamChoice
from autopar.plan.plan import Plan
from autopar.planner.explain import explain_graph
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.frontier import frontier_graph
from autopar.planner.imbalance import check_experts
from autopar.planner.kept_plans import kept, key_of
from autopar.planner.layout import Layout
from autopar.planner.memory import Memory
from autopar.planner.offload import Offload
from autopar.planner.other_form import instead_of
from autopar.planner.planning import plan_graph, within
from autopar.planner.refit import modules_of, refit
from autopar.planner.storage import param_choice
from autopar.solver.fold import Folded
from autopar.solver.solve import Limits
from autopar.text.log import log, timed


@dataclass(frozen=True)
class PlanRequest:
    """plan: one that was made before; memory_bytes: budget of a device (None: what it has, less its reserve); least: the plan of the smallest peak, not the
    fastest; cluster: None: this machine; offload, imbalance: as in `autopar.compile`; kept_in: a folder where plans are kept, besides that of this user."""

    plan: Plan | None = None
    memory_bytes: float | None = None
    cluster: Cluster | None = None
    limits: Limits = field(default_factory=Limits)
    offload: Offload | str | bool | None = None
    least: bool = False
    imbalance: float = 1.0
    kept_in: Path | None = None

    @staticmethod
    def of(
        plan: Plan | str | os.PathLike[str] | None,
        memory: float | str | None,
        cluster: str | Cluster | None,
        options: Mapping[str, float] | None,
        offload: Offload | str | bool | None = None,
        imbalance: float = 1.0,
    ) -> PlanRequest:
        """From the arguments of `autopar.compile`; reads a plan's file."""
        if not (plan is None or isinstance(plan, (Plan, str, os.PathLike))):
            what = f"plan= takes an autopar.Plan or the path of a plan file, not {type(plan).__name__}"
            raise AutoparError(what, fix="pass what autopar.plan returns, or the file that it was saved to")
        most = Memory.of(memory)
        limits = limits_of(options)
        given = plan if plan is None or isinstance(plan, Plan) else Plan.load(Path(plan))
        return PlanRequest(
            given, most.budget_bytes, None if cluster is None else Cluster.of(cluster), limits, offload, most.least, imbalance
        )


def limits_of(options: Mapping[str, float] | None) -> Limits:
    """What people say to the solver, checked."""
    given = dict(options or {})
    for key, value in given.items():
        if (
            key not in ("seconds", "gap", "nodes", "memory_bytes")
            or isinstance(value, bool)
            or not isinstance(value, (int, float))
            or value < 0
        ):
            raise AutoparError(
                f"options has {key!r}: {value!r}",
                fix='use options={"seconds": 60, "gap": 0.01, "memory_bytes": 8e9}: the time that planning may take, how far its answer may be from the best, '
                "the memory of the process that plans",
            )
    return Limits(
        given.get("gap", Limits.gap),
        given.get("seconds", Limits.seconds),
        int(given.get("nodes", Limits.nodes)),
        in_proportion="seconds" not in given,
        memory_bytes=given.get("memory_bytes", Limits.memory_bytes),
    )


def refuse_other_mesh(plan: Plan, axes: Mapping[str, int]) -> None:
    """A plan holds for the mesh it was made for: axes, sizes and their order."""
    if list(plan.mesh_axes.items()) != list(axes.items()):
        theirs, ours = _said(plan.mesh_axes), _said(axes)
        raise MeshError(
            f"the plan was made for a mesh of {theirs}, this one is {ours}",
            fix=f"make the mesh as the plan has it (init_device_mesh(..., {tuple(plan.mesh_axes.values())}, mesh_dim_names={tuple(plan.mesh_axes)})), "
            "or leave plan= out to plan for this one",
        )


def _said(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{n}={s}" for n, s in axes.items())


def training_config(
    stored: Mapping[str, torch.dtype],
    trainable: frozenset[str],
    reduce: torch.dtype | None,
    optimizer: str | type,
    budget_bytes: float,
    grad_accumulation: int = 1,
    micro_batches: int = 1,
    joins: bool = True,
    imbalance: float = 1.0,
) -> TrainingConfig:
    """stored: dtypes of the parameters as they are stored; optimizer: a name or a class, one of unknown memory counts as Adam."""
    kind = kind_of(optimizer)
    wide = float(max((DTYPE_BYTES.get(_name(d), 4) for d in stored.values()), default=4))
    return TrainingConfig(
        trainable,
        "" if reduce is None else _name(reduce),
        state_bytes=kind.state_bytes + wide * kind.moments,
        step_bytes=wide * kind.temporaries,
        traffic_bytes=kind.traffic_of(wide),
        master_bytes=wide,
        budget_bytes=budget_bytes,
        micro_batches=grad_accumulation * micro_batches,
        in_a_row=micro_batches,
        joins=joins,
        imbalance=imbalance,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_plan(
    request: PlanRequest, cluster: Cluster | None, folded: Folded, axes: Mapping[str, int], s: TrainingConfig, other: Folded | None = None
) -> Plan:
    """The plan for a captured training step: given, kept from an earlier start, or made. cluster: what to plan for, where no plan is given; other: the same
    step in another form, whose bound the plan says (`loss_head.OTHER_FORM`)."""
    if request.plan is not None:
        return storable(refit(request.plan, folded))
    assert cluster is not None
    check_experts(folded.graph, s.imbalance)
    target = cluster

    def planned() -> Plan:
        with timed("plan"):
            instead = None if other is None else instead_of(folded, other, axes, target, s)
            plan = plan_graph(folded, axes, target, s, request.limits, least=request.least, instead=instead).plan
        log.info("planned for %s: %s; solver: %s", plan.cluster, plan.predicted, plan.solver)
        return finished(plan, folded)

    return kept(lambda: key_of(folded, axes, target, s, request.limits, request.least), folded, axes, planned, request.kept_in)


def finished(plan: Plan, folded: Folded) -> Plan:
    return storable(replace(plan, modules=modules_of(folded.graph)))


def asked(plan: Plan, request: PlanRequest, cluster: Cluster, folded: Folded, axes: Mapping[str, int], s: TrainingConfig) -> Plan:
    """`plan` of `make_plan`, which now answers `explain` and `frontier`."""
    mine = within(s, plan) if request.least else s
    return plan.explained_by(
        lambda op, placement: explain_graph(folded, axes, cluster, mine, op, placement, request.limits),
        lambda points: frontier_graph(folded, axes, cluster, s, points, request.limits, finish=lambda made: finished(made, folded)),
    )


def storable(plan: Plan) -> Plan:
    """Padded parameters are padded over one of the user's axes.

    Over two, DTensor cuts the chunks of the first axis again, so that its shards are not those of one even cut of the padded dim.
    """
    mesh = plan.mesh
    params = {}
    for name, c in plan.params.items():
        if c.padded != c.shape and len({a.parent for a in mesh.axes if a.name in c.storage.where}) > 1:
            c = stored_evenly(c, mesh)
        params[name] = c
    return replace(plan, params=params)


def stored_evenly(c: ParamChoice, mesh: Mesh) -> ParamChoice:
    """`c` stored as hand layouts store it: over the axes that divide a dim, else padded over the widest."""
    every = tuple(a.name for a in mesh.axes if a.size > 1)
    return param_choice(Tensor("", c.shape, c.dtype), c.compute, Layout(data=every, shard=every), mesh, c.trainable)


def following(plan: Plan) -> Layout:
    """The hand layout nearest to `plan`, for calls that it does not cover (other shapes, no gradients): the batch over the same axes, parameters
    stored and computed with as the plan says, other axes split tensors where parameters are."""
    tensor = tuple(a.name for a in plan.mesh.axes if a.size > 1 and a.name not in plan.data_axes)
    return Layout(plan.data_axes, plan.data_axes, tensor, plan.reshard_after_forward, plan.layout)
