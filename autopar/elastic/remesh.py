"""A module goes over to the mesh of those that are left."""

from __future__ import annotations

from collections.abc import Mapping

from autopar import _torch
from autopar.runtime.build import Builder
from autopar.runtime.module import ParallelModule


def remesh(model: ParallelModule, axes: Mapping[str, int]) -> None:
    """On a mesh of all processes that there are now, with these axes. Parameters still lie where they did: `State.put` moves them. Collective."""
    old, sizes = model._builder, model._programs.sizes
    mesh = _torch.mesh_of_all(old.device_mesh.device_type, dict(axes))
    builder = Builder(old.model, mesh, model._config)
    builder.opened, builder.chunked = old.opened, old.chunked
    model._lie_on(builder)
    model._programs.sizes = sizes  # which of them vary is known already
