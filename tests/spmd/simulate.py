"""Runs the rewritten graphs of a model for all ranks of a mesh in one process, and the same steps on one device.

The graphs are those of `autopar.compile` (captured, planned, sharded, partitioned); torch's LocalTensorMode gives the collectives their
meaning. Parameters are cut by the plan's storage placements, gradients put together from all ranks' results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar import _torch
from autopar.capture.capture import Call, Captured, Role, capture, off_cache
from autopar.capture.describe import describe
from autopar.capture.fusions.table import fused
from autopar.distributed.shards import cut, join
from autopar.graph.graph import Graph
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.kernels.random import EagerRandom
from autopar.passes.manager import joint_passes, run_passes
from autopar.passes.offload import offload
from autopar.passes.partition import Parts, partition
from autopar.passes.shard import accumulated_grads, shard
from autopar.passes.sharding.emit import Options
from autopar.passes.sharding.groups import group_name, group_names
from autopar.passes.stay import later
from autopar.plan.plan import Plan
from autopar.planner.formulation.overlap_windows import window_of
from autopar.planner.layout import Layout
from autopar.planner.propagate import propagate
from autopar.runtime.lower import eager_module
from autopar.solver.fold import fold
from tests.spmd.exchange import exchanges

STORE = "simulated"  # of activations kept away from the device; a test whose plan has some opens it


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        _torch.unalias_process_groups()
        dist.destroy_process_group()


@dataclass
class Simulated:
    """A model's step on simulated ranks."""

    captured: Captured
    graph: Graph
    plan: Plan
    parts: Parts
    mesh: Mesh
    collectives: tuple[Any, ...]
    accumulated: Mapping[str, tuple[Placement, torch.dtype]]

    def values(
        self,
        params: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        tensors: tuple[torch.Tensor, ...],
        seed: tuple[int, int],
    ) -> dict[Role, Any]:
        """What the graphs are given, by role, on all ranks."""
        mesh, n = self.mesh, self.mesh.size
        at = [mesh.coordinates(r) for r in range(n)]

        def spread(t: torch.Tensor, placement: Any) -> LocalTensor:
            return LocalTensor({r: cut(t, placement, mesh, at[r]).clone() for r in range(n)})

        values: dict[Role, Any] = {}
        for role in {*self.parts.forward_inputs, *self.parts.backward_inputs}:
            if role.kind == "param":
                c = self.plan.params[role.name]
                whole = params[role.name].detach()
                padded = torch.full(c.padded, 7.0, dtype=whole.dtype)  # what lies in the padding must not matter
                padded[tuple(slice(0, s) for s in c.shape)] = whole
                values[role] = spread(padded, c.storage)
            elif role.kind == "buffer":
                values[role] = LocalTensor({r: buffers[role.name].clone() for r in range(n)})
            elif role.kind == "input":
                values[role] = spread(tensors[role.index], self.plan.inputs[role.index])
            elif role.kind == "coordinate":
                values[role] = LocalTensor({r: torch.tensor(at[r][role.name]) for r in range(n)})
            elif role.kind == "seed":
                values[role] = LocalTensor({r: torch.tensor(seed) for r in range(n)})
            elif role.kind == "accumulated":
                lies, dtype = self.accumulated[role.name]
                values[role] = LocalTensor({r: torch.zeros(lies.local_shape(mesh), dtype=dtype) for r in range(n)})
            elif role.kind == "tangent":
                values[role] = LocalTensor({r: torch.ones((), dtype=tensor_dtype(self.captured)) for r in range(n)})
        return values

    def run(
        self,
        params: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        tensors: tuple[torch.Tensor, ...],
        seed: tuple[int, int],
        stays: list[Any] | None = None,
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(outputs, gradients by name, buffer updates) of one step, whole tensors in and out. stays: filled with what stays for later micro-batches; of one of these, with it."""
        mesh, n = self.mesh, self.mesh.size
        values = self.values(params, buffers, tensors, seed)
        with torch.no_grad(), LocalTensorMode(n), exchanges(mesh):
            k = len(self.parts.forward_outputs)
            if stays:
                assert self.parts.later is not None
                given = [*stays, *(values[r] for r in self.parts.forward_inputs)]
                out = fx.Interpreter(eager_module(self.parts.later.forward)).run(*given)
                there, made = iter(stays), iter(out[k:])
                results, saved = out[:k], [next(there if i in self.parts.stays else made) for i in range(len(self.parts.saved))]
            else:
                out = fx.Interpreter(eager_module(self.parts.forward)).run(*[values[r] for r in self.parts.forward_inputs])
                results, saved = out[:k], out[k:]
            if stays is not None:
                stays[:] = [saved[i] for i in self.parts.stays]
            grads_out = ()
            if self.parts.backward is not None:
                grads_out = fx.Interpreter(eager_module(self.parts.backward)).run(*saved, *[values[r] for r in self.parts.backward_inputs])
        outputs: list[torch.Tensor] = []
        updates: dict[str, torch.Tensor] = {}
        grads: dict[str, torch.Tensor] = {}
        for role, t in zip(self.parts.forward_outputs, results, strict=True):
            ranks = _ranks(t, n)
            if role.kind == "output":
                outputs.append(join(ranks, self.plan.outputs[role.index], mesh))
            elif role.kind == "buffer_update":
                assert all(torch.equal(ranks[r], ranks[0]) for r in range(n)), f"replicas of buffer {role.name} differ"
                updates[role.name] = ranks[0]
        for role, t in zip(self.parts.backward_outputs, grads_out, strict=True):
            if role.kind == "grad" and t is not None:
                c = self.plan.params[role.name]
                whole = join(_ranks(t, n), c.storage, mesh)
                grads[role.name] = whole[tuple(slice(0, s) for s in c.shape)]
        return outputs, grads, updates


def _ranks(t: Any, n: int) -> dict[int, torch.Tensor]:
    return {r: t._local_tensors[r] if isinstance(t, LocalTensor) else t for r in range(n)}


def tensor_dtype(captured: Captured) -> torch.dtype:
    dtype: torch.dtype = next(
        x.meta["val"].dtype for x, r in zip(captured.gm.graph.nodes, captured.inputs, strict=False) if r.kind == "tangent"
    )
    return dtype


@dataclass
class Prepared:
    """A captured model: what all meshes and layouts share."""

    model: nn.Module
    captured: Captured
    graph: Graph
    tensors: tuple[torch.Tensor, ...]


def prepare(model: nn.Module, kwargs: dict[str, Any], loss_fn: Any = None, grad: bool = True, fuses: bool = False) -> Prepared:
    """fuses: with operators of ours where there are patterns."""
    call = Call.of((), off_cache(model, kwargs))
    shapes = tuple((tuple(t.shape), t.dtype) for t in call.tensors)
    captured = capture(model, call, shapes, loss_fn=loss_fn, grad=grad)
    captured = fused(captured) if fuses else captured
    return Prepared(model, captured, describe(captured), call.tensors)


def simulated(
    p: Prepared,
    mesh_axes: dict[str, int],
    layout: str | Layout | Plan,
    fuses: bool = True,
    reduce: torch.dtype | None = None,
    accumulates: tuple[bool, bool] = (True, False),
) -> Simulated:
    """Must run inside `fake_world` of the mesh's size. reduce: the dtype that gradients are reduced in; accumulates: whether they are, and added to those of earlier micro-batches."""
    mesh = Mesh.of(mesh_axes)
    trainable = frozenset(n for n, q in p.model.named_parameters() if q.requires_grad)
    plan = layout if isinstance(layout, Plan) else propagate(p.graph, Layout.of(layout, mesh), mesh_axes, trainable)
    storage = {n: q.dtype for n, q in p.model.named_parameters()}
    options = Options(torch.device("cpu"), storage, "sim", reduce, *accumulates)
    sharded = run_passes(shard(p.captured, p.graph, plan, options), "sim", joint_passes(fuses))
    for axes in group_names(sharded.gm, "sim"):
        for ranks in mesh.groups(axes):
            group = dist.new_group(ranks)
            if 0 in ranks:
                _torch.alias_process_group(group_name("sim", axes), group)
    parts = partition(
        sharded,
        reshard_after_forward=plan.reshard_after_forward,
        recompute=plan.recompute,
        gathered=plan.gathered_once,
        once=plan.gathered_once_a_call,
    )
    if plan.offload:
        parts = offload(parts, STORE, window_of(p.graph, fold(p.graph).stacks), p.captured.fake_mode)
    parts = replace(parts, later=later(parts) if parts.stays else None)
    return Simulated(p.captured, p.graph, plan, parts, mesh, sharded.collectives, accumulated_grads(p.graph, plan, reduce, storage))


def one_device(model: nn.Module, kwargs: dict[str, Any], seed: tuple[int, int], loss_fn: Any = None) -> torch.Tensor:
    """The loss of plain eager PyTorch, its random ops replaced by ours."""
    kwargs = dict(kwargs)
    with EagerRandom(*seed):
        if loss_fn is not None:
            target = kwargs.pop("target")
        loss: torch.Tensor = model(**kwargs).loss if loss_fn is None else loss_fn(model(**kwargs), target)
        return loss
