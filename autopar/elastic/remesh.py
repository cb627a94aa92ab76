"""A module goes over to the mesh of those that are left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch.distributed.device_mesh import init_device_mesh

from autopar import _torch
from autopar.pipeline import Lists
from autopar.runtime.build import Builder
from autopar.runtime.module import ParallelModule


def remesh(model: ParallelModule, axes: Mapping[str, int], schedule: Lists | None = None) -> None:
    """On a mesh of all processes that there are now, with these axes. schedule: of a pipeline. Parameters still lie where they did: `State.put` moves them. Collective."""
    old, sizes = model._builder, model._programs.sizes
    if old.pipeline is not None:
        old.pipeline.leave()
    with _torch.noted():
        mesh = init_device_mesh(old.device_mesh.device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        builder = Builder(old.model, mesh, replace(model._config, schedule=schedule))
    builder.opened, builder.chunked = old.opened, old.chunked
    model._lie_on(builder)
    model._programs.sizes = sizes  # which of them vary is known already
