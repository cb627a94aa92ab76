"""`autopar.plan`: a plan without the cluster. The model may lie on the meta device; nothing is computed and no process group is needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.build import Precision, refuse_unknown_random
from autopar.capture import Call, capture, off_cache
from autopar.cluster import Cluster
from autopar.describe import describe
from autopar.errors import AutoparError, MeshError
from autopar.formulate.problem import Setting
from autopar.graph import DTYPE_BYTES
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.optimizers import STATE_TENSORS
from autopar.plan import Plan
from autopar.planning import plan_graph
from autopar.propagate import propagate
from autopar.solver.solve import Limits


def plan(
    model: nn.Module,
    inputs: Mapping[str, Any],
    cluster: str | Cluster,
    mesh: str | Mapping[str, int] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    precision: Precision | str | torch.dtype | None = None,
    optimizer: str = "adamw",
    layout: str | Layout | None = None,
    memory: float | None = None,
    options: Mapping[str, float] | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Plan:
    """The best plan of one training step of `model` on `cluster`.

    inputs: keyword arguments of a call, tensors or shapes (a shape is taken for token ids, int64). mesh: "32x8" or axis sizes by name; default the
    cluster's nodes x devices. memory: budget of a device in bytes; default what it has, less a reserve. layout: a hand layout's plan
    instead, without predictions. options: "seconds" and "gap" of the solver. progress: called with a stage's name and its seconds.

    Raises InfeasibleError when nothing fits, CaptureError, MeshError, ClusterError.
    """
    tell = progress or (lambda stage, seconds: None)
    where = Cluster.of(cluster)
    axes = mesh_axes(mesh, where)
    if optimizer not in STATE_TENSORS:
        raise AutoparError(f"unknown optimizer {optimizer!r}", fix=f"use one of {', '.join(STATE_TENSORS)}")
    start = time.perf_counter()
    tensors = {k: v if isinstance(v, torch.Tensor) else torch.empty(tuple(v), dtype=torch.int64, device="meta") for k, v in inputs.items()}
    call = Call.of((), off_cache(model, tensors))
    p = Precision.of(precision)
    captured = capture(model.train(), call, tuple((tuple(t.shape), t.dtype) for t in call.tensors), loss_fn=loss_fn, cast=p.param)
    refuse_unknown_random(captured.gm)
    graph = describe(captured)
    tell("capture", time.perf_counter() - start)
    params = dict(model.named_parameters(remove_duplicate=False))
    trainable = frozenset(n for n in graph.params if params[n].requires_grad)
    if layout is not None:
        return propagate(graph, Layout.of(layout, Mesh.of(axes)), axes, trainable)
    stored = max((DTYPE_BYTES[str(q.dtype).removeprefix("torch.")] for q in params.values()), default=4)
    setting = Setting(
        trainable,
        "" if p.reduce is None else str(p.reduce).removeprefix("torch."),
        state_bytes=4.0 * STATE_TENSORS[optimizer],
        master_bytes=float(stored),
        budget_bytes=float(memory if memory is not None else where.device.usable_bytes),
    )
    return plan_graph(graph, axes, where, setting, Limits(**(options or {})), tell).plan


def mesh_axes(mesh: str | Mapping[str, int] | None, cluster: Cluster) -> dict[str, int]:
    """Axis sizes by name; axes without names are dp, tp or axis0, axis1, ..."""
    if isinstance(mesh, Mapping):
        axes = dict(mesh)
    else:
        sizes = [n for n in (cluster.nodes, cluster.devices_per_node) if n > 1] or [1]
        if mesh is not None:
            try:
                sizes = [int(n) for n in mesh.lower().split("x")]
            except ValueError:
                raise MeshError(f"{mesh!r} is not a mesh", fix='write sizes such as "32x8"') from None
        names = ("dp", "tp") if len(sizes) <= 2 else tuple(f"axis{i}" for i in range(len(sizes)))
        axes = dict(zip(names, sizes, strict=False))
    if any(n < 1 for n in axes.values()):
        raise MeshError(f"a mesh axis has at least one device: {axes}", fix="write positive sizes")
    return axes
