"""The verbs. `compile` is: capture -> describe -> plan -> passes -> lower -> step, at the first call of each kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.elastic.attach import attach, refuse
from autopar.elastic.newcomer import imagined_mesh, joins, refuse_apart
from autopar.elastic.options import Elastic
from autopar.errors import AutoparError, MeshError
from autopar.hardware.cluster import Cluster
from autopar.pipeline import Lists, scheduled
from autopar.plan.plan import Plan
from autopar.planner.axes import PIPELINE
from autopar.planner.imbalance import EVEN, refuse_more
from autopar.planner.imbalance import checked as checked_load
from autopar.planner.layout import Layout
from autopar.planner.loss_head import checked as checked_form
from autopar.planner.micro_batches import AUTO
from autopar.planner.offload import Offload
from autopar.planner.precision import Precision
from autopar.planner.request import PlanRequest
from autopar.runtime.artifacts import folder_of
from autopar.runtime.buckets import checked
from autopar.runtime.config import Config
from autopar.runtime.micro_batches import checked as checked_number
from autopar.runtime.module import ParallelModule
from autopar.runtime.staged_calls import mesh_of, schedule_of
from autopar.search.of_devices import best_for, checked_auto, checked_mesh


def compile(
    model: nn.Module,
    mesh: DeviceMesh | tuple[int, ...] | Mapping[str, int] | str | None = None,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    example_inputs: Mapping[str, object] | tuple[object, ...] | None = None,
    inputs: str = "global",
    outputs: str = "loss",
    plan: Plan | str | os.PathLike[str] | None = None,
    layout: str | Layout | None = None,
    memory: float | str | None = None,
    offload: Offload | str | bool | None = None,
    cluster: str | Cluster | None = None,
    precision: Precision | str | torch.dtype | None = None,
    optimizer: str | type[torch.optim.Optimizer] = "adamw",
    grad_accumulation: int = 1,
    micro_batches: int | str | None = None,
    backend: str = "inductor",
    options: Mapping[str, float] | None = None,
    dynamic: bool | None = None,
    buckets: Sequence[int] | None = None,
    bucket_collectives: bool = True,
    schedule: str | os.PathLike[str] | Lists | None = None,
    virtual_stages: int | None = None,
    loss_head: str = "auto",
    elastic: Elastic | None = None,
    imbalance: float = EVEN,
    artifacts: str | os.PathLike[str] | None = None,
) -> ParallelModule:
    """Makes `model` train on `mesh` as it would on one device.

    mesh: a DeviceMesh, or axis sizes ((2, 4) or {"dp": 2, "tp": 4}); default: the given plan's, else all processes on one axis. "auto": as is
        fastest for example_inputs, or else for the first training call, whose batch is all ranks': axes, a pipeline and its schedule if that pays, and micro_batches where nothing is said of them.
    loss_fn: `loss_fn(model(*inputs), target)`; the call is then `model(*inputs, target=...)` or `model(*inputs, target)` and returns the loss.
    example_inputs: arguments of a first call (a dict of keywords, or a tuple), to compile at once instead of at the first step.
    inputs: "global": every rank passes the same whole batch; "local": its own part, the `data_rank`-th of `data_world`. Those two are known at
        once: they are the given plan's or layout's, and all ranks of the mesh where a plan is yet to be made.
    outputs: "loss": a call computes the scalar `loss` of the model's output, and the rest when that is first asked for; "all": everything, at once.
    plan: a Plan or the path of a plan's file, of this program and mesh. Default: the first training step is planned.
    layout: a hand layout instead: "ddp" | "fsdp" | "tp" | "fsdp+tp" | "fsdp+ep" | Layout(...).
    memory: what a plan may use of a device, in bytes; "fastest", as by default: what the device has, less a reserve; "least": the plan of the
        smallest peak instead of the fastest one.
    offload: where activations may be kept besides the device: "host", False, or Offload(host=True, nvme="/a/directory"); default
        nowhere.
    cluster: what to plan for, a name such as "h100:4x8", a file or a Cluster; default: this machine.
    precision: "bf16" (compute and gather in bf16, parameters and reductions in fp32) or Precision(param=, reduce=).
    optimizer: name or class the memory is planned for; checked at its first step.
    grad_accumulation: gradients are reduced at every m-th backward.
    micro_batches: a training call is run as so many micro-batches, one after the other, whose losses and gradients add up to the batch's, so that the activations of one
        live at a time; "auto": as many as is fastest, by the planner; of a pipeline then its schedule, too, where none is said. Default: the given plan's, else 1. Evaluation is run whole.
    backend: "inductor", or "aot_eager" for debugging.
    dynamic: whether sizes of inputs vary from call to call, so that one program is compiled for all of them: None: those that were seen to, or are marked by
        torch._dynamo.mark_dynamic (whose `max` is the size that is planned for); True: all, from the first call on; False: none, each size has a program.
    buckets: lengths that batches are padded to, behind their last token, such as (512, 1024): for models that have a program for every length. Loss and
        gradients stay what they are; where it is not known how to pad an argument the call is refused.
    bucket_collectives: whether small gathers of parameters and reductions of gradients that are needed together are joined, as far as the cluster's links make that
        worth the copies.
    schedule: of a pipeline, which a mesh with an axis "pp" has: "gpipe", "1f1b" (default), "interleaved", "zb-h1", "zbv", "dualpipev", or the path of a .csv in torch's notation. A training call then
        runs as micro_batches (default: two for each rank along pp) on stages that are cut from the graph, forwards and backwards; `.backward()` hands out the gradients.
    virtual_stages: of an interleaved pipeline, how many stages each rank has; default 2.
    loss_head: whether a linear layer under a cross-entropy makes all its logits ("plain") or makes them tile by tile, and again in backward ("chunked"); "auto": by the planner,
        as is faster or fits, and "plain" in a hand layout. Where a step is asked for its logits it has them.
    elastic: what of a run started by `python -m autopar.run` is to be survived, for a training loop by `autopar.elastic.Session`; default: nothing, at no cost.
    imbalance: of routed experts that are split over ranks, rows of the fullest rank over the mean, which is what is priced (1.0: even
        load); a given plan has its own. A rank that gets more warns of it, once.
    artifacts: a folder where plans and what was compiled for this program are kept: the first run, or `autopar compile`, writes them, later ones compile nothing that is
        there, on any machine of the same kind. It holds code that is run: only files are read that nobody else can have written.
    options: of the solver: "seconds" it may take (60), relative "gap" at which it stops (0.01).

    Collective: all ranks call it alike, and a rank with other arguments, another model or another program is refused on all. One rank plans.

    Returns a ParallelModule: parameters are DTensors under the model's own names. Raises AutoparError (see errors.py), InfeasibleError when no
    plan keeps to the memory.
    """
    if not isinstance(model, nn.Module):
        raise AutoparError(f"autopar.compile needs an nn.Module, not {type(model).__name__}")
    if backend not in ("inductor", "aot_eager"):
        raise AutoparError(f"unknown backend {backend!r}", fix='use "inductor" or "aot_eager"')
    if outputs not in ("loss", "all"):
        raise AutoparError(f"unknown outputs {outputs!r}", fix='use "loss" or "all"')
    if dynamic not in (None, True, False):
        raise AutoparError(
            f"dynamic={dynamic!r} is neither None, True nor False", fix="leave it out: sizes that were seen to vary are dynamic then"
        )
    if not isinstance(bucket_collectives, bool):
        raise AutoparError(
            f"bucket_collectives={bucket_collectives!r} is neither True nor False", fix="lengths that batches are padded to are buckets="
        )
    checked_load(imbalance, 1)
    lengths = checked(buckets)
    if lengths is not None and loss_fn is not None:
        raise AutoparError(
            "buckets= cannot pad the target of a loss_fn: it is not known what that ignores",
            fix="let the model compute its loss, or pad batches yourself",
        )
    if layout is not None and plan is not None:
        raise AutoparError("layout= and plan= both say how to split the model", fix="pass one of them, or neither to have it planned")
    folder = folder_of(artifacts, backend)
    request = replace(PlanRequest.of(plan, memory, cluster, options, offload, imbalance), kept_in=folder)
    number = checked_number(micro_batches, outputs, layout is not None, None if request.plan is None else request.plan.micro_batches)
    find: Callable[..., Plan] | None = None
    where = None if isinstance(mesh, str) else mesh
    others = {"layout": layout, "plan": plan, "elastic": elastic}
    if isinstance(mesh, str):
        checked_mesh(mesh, inputs, {**others, "schedule": schedule, "virtual_stages": virtual_stages})
        find = best_for
    elif micro_batches == AUTO and PIPELINE in (axes := _axes(where)) and not isinstance(schedule, Lists):
        _device_mesh(where)  # says what is wrong with it
        checked_auto(inputs, others)
        find = partial(best_for, mesh=axes, schedule=None if schedule is None else os.fspath(schedule), virtual_stages=virtual_stages)
        schedule = virtual_stages = None
    if find is not None:
        find = partial(
            find, loss_fn=loss_fn, cluster=cluster, precision=precision, optimizer=optimizer, memory=memory, offload=offload, options=options,
            micro_batches=1 if outputs == "all" else micro_batches, grad_accumulation=grad_accumulation, loss_head=loss_head,
            imbalance=imbalance,
        )  # fmt: skip
        where = None
    if where is None and request.plan is not None:
        where = mesh_of(request.plan)
    if elastic is None:
        refuse_apart()
    device_mesh = imagined_mesh(where) if elastic is not None and joins() else _device_mesh(where)
    refuse_more(imbalance, device_mesh.size(), f"{device_mesh.size()} ranks")
    lists = schedule_of(device_mesh, schedule, virtual_stages, number, outputs, request.plan)
    config = Config(
        loss_fn, inputs, layout, Precision.of(precision), optimizer, grad_accumulation, backend, outputs, request, dynamic, lengths,
        bucket_collectives, number if lists is None else lists.micro_batches, lists, checked_form(loss_head), folder,
        None if find is None else partial(find, device_mesh),
    )  # fmt: skip
    if elastic is not None:
        refuse(inputs, request.plan is not None)
    module = ParallelModule(model, device_mesh, config)
    if elastic is not None:
        asked, number_of = "1f1b" if schedule is None else schedule, 0 if lists is None else lists.micro_batches
        attach(
            module,
            elastic,
            lambda ranks: scheduled(asked if ranks > 1 else "1f1b", ranks, number_of, virtual_stages if ranks > 1 else None),
        )
    if example_inputs is not None:
        if isinstance(example_inputs, tuple):
            module.prepare(*example_inputs)
        else:
            module.prepare(**example_inputs)
    return module


def _axes(mesh: DeviceMesh | tuple[int, ...] | Mapping[str, int] | None) -> dict[str, int]:
    """Sizes of named axes."""
    if isinstance(mesh, DeviceMesh):
        return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    return dict(mesh) if isinstance(mesh, Mapping) else {}


def _device_mesh(mesh: DeviceMesh | tuple[int, ...] | Mapping[str, int] | None) -> DeviceMesh:
    if isinstance(mesh, DeviceMesh):
        return mesh
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group()
        else:
            dist.init_process_group("gloo" if not torch.cuda.is_available() else None, store=dist.HashStore(), rank=0, world_size=1)
    world = dist.get_world_size()
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    if mesh is None:
        sizes, names = (world,), ("dp",)
    elif isinstance(mesh, Mapping):
        sizes, names = tuple(mesh.values()), tuple(mesh)
    else:
        sizes = (mesh,) if isinstance(mesh, int) else tuple(mesh)
        names = ("dp", "tp")[: len(sizes)] if len(sizes) <= 2 else tuple(f"axis{i}" for i in range(len(sizes)))
    total = 1
    for s in sizes:
        total *= s
    if total != world:
        raise MeshError(
            f"a mesh of {' x '.join(map(str, sizes))} needs {total} processes, the world has {world}",
            fix="start as many processes (torchrun --nproc-per-node), or make the mesh smaller",
        )
    device = "cuda" if torch.cuda.is_available() and dist.get_backend() != "gloo" else "cpu"
    return init_device_mesh(device, sizes, mesh_dim_names=names)
