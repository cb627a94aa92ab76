"""A module goes over to the mesh of those that are left."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh

from autopar.runtime.build import Builder
from autopar.runtime.module import ParallelModule


def remesh(model: ParallelModule, ranks: int) -> None:
    """On a mesh of all processes that there are now, with the axis of the one before. Parameters still lie where they did: `State.put` moves them. Collective."""
    old, sizes = model._builder, model._programs.sizes
    (name,) = old.groups.axes
    mesh = init_device_mesh(old.device_mesh.device_type, (ranks,), mesh_dim_names=(name,))
    model._lie_on(Builder(old.model, mesh, model._config))
    model._programs.sizes = sizes  # which of them vary is known already
