"""A model goes over to the mesh of a plan that was made for its first training call (`autopar.compile(model, "auto")`)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.distributed.failures import during
from autopar.distributed.shards import on_mesh
from autopar.plan.plan import Plan
from autopar.runtime.build import Builder
from autopar.runtime.config import Config
from autopar.runtime.staged_calls import mesh_of, schedule_of


def on_the_mesh_of(plan: Plan, old: Builder) -> tuple[Builder, Config]:
    """The builder of `plan`, with all parameters and gradients of the model of `old` on its mesh, where they are until the plan is used. In place: optimizers keep their references, and their state
    follows at their next step. Collective. Raises AutoparError."""
    mesh = mesh_of(plan)
    device_mesh = init_device_mesh(old.device_mesh.device_type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    config = old.config
    lists = schedule_of(device_mesh, None, None, plan.micro_batches, config.outputs, plan)
    config = replace(config, request=replace(config.request, plan=plan), micro_batches=plan.micro_batches, schedule=lists, find=None)
    builder = Builder(old.model, device_mesh, config)
    whole = builder.device_mesh if builder.pipeline is None else builder.groups.whole
    with torch.no_grad(), during("compile: parameters moving to the mesh that was planned", builder.groups.ranks):
        for name, p in old.model.named_parameters():
            assert isinstance(p, DTensor)
            how = builder.placements(name, tuple(p.shape))
            there, grad = on_mesh(p.detach(), whole, how), p.grad
            p.grad = None
            _torch.move_parameter(p, there)
            if isinstance(grad, DTensor):
                p.grad = on_mesh(grad, whole, how)
    return builder, config
