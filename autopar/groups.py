"""Process groups over mesh axes, under names that are the same on every rank.

Every rank must ask for the same axes in the same order (all apply one plan), as torch.distributed.new_group requires.
"""

from __future__ import annotations

import hashlib

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar import _torch
from autopar.errors import MeshError
from autopar.mesh import Mesh
from autopar.passes.shard import group_name


class Groups:
    """The groups of one device mesh."""

    def __init__(self, device_mesh: DeviceMesh) -> None:
        names = device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(device_mesh.ndim))
        self.device_mesh = device_mesh
        self.axes = {n: device_mesh.size(i) for i, n in enumerate(names)}
        self.mesh = Mesh.of(self.axes)
        self.ranks = [int(r) for r in device_mesh.mesh.flatten().tolist()]
        if self.ranks != sorted(self.ranks):
            raise MeshError("the mesh lists ranks out of order", where=f"mesh {self.ranks}", fix="use init_device_mesh, or ascending ranks")
        key = f"{self.ranks}{self.axes}"
        self.prefix = "autopar." + hashlib.sha256(key.encode()).hexdigest()[:8]
        self.made: dict[tuple[str, ...], dist.ProcessGroup | None] = {}

    @property
    def rank(self) -> int:
        """This process's position in the mesh."""
        return self.ranks.index(dist.get_rank()) if dist.is_initialized() else 0

    @property
    def coordinates(self) -> dict[str, int]:
        return self.mesh.coordinates(self.rank)

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """The group of the whole mesh; makes it on first use (collective)."""
        axes = tuple(a.name for a in self.mesh.axes if a.size > 1)
        self.ensure(axes)
        return self.made[axes]

    def ensure(self, axes: tuple[str, ...]) -> str:
        """The name of the group over `axes`; makes it on first use (collective)."""
        name = group_name(self.prefix, axes)
        if axes in self.made:
            return name
        mine: dist.ProcessGroup | None = None
        parents = [p for p in self.mesh.parents if self.mesh.children(p) == axes]
        if len(axes) == len([a for a in self.mesh.axes if a.size > 1]) and len(self.ranks) == dist.get_world_size():
            mine = dist.group.WORLD
        elif parents:
            mine = self.device_mesh.get_group(parents[0])
        else:
            timeout = _torch.default_timeout(self.device_mesh.device_type)  # else torch takes its own, of half an hour
            for group in self.mesh.groups(axes):
                ranks = [self.ranks[i] for i in group]
                made = dist.new_group(ranks, timeout=timeout)
                if dist.get_rank() in ranks:
                    mine = made
        assert mine is not None
        _torch.alias_process_group(name, _torch.orderly(name, mine) if self.device_mesh.device_type == "cpu" else mine)
        self.made[axes] = mine
        return name
