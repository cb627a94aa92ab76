"""A parameter's gradient as the parameter is stored: its shard without padding, as a DTensor.

A step hands over one for each parameter, so it has to be cheap: what a DTensor knows besides its shard is found out once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.distributed.groups import Groups
from autopar.distributed.shards import alone, cut, dtensor_placements
from autopar.graph.placement import Placement
from autopar.plan.decisions import ParamChoice


@dataclass(frozen=True)
class _Known:
    """Of the last gradient of a parameter."""

    choice: ParamChoice
    strides: tuple[int, ...]
    dtype: torch.dtype
    spec: Any


class AsStored:
    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self._known: dict[str, _Known] = {}

    def gradient(self, name: str, local: torch.Tensor, choice: ParamChoice) -> DTensor:
        """local: of nobody else's."""
        if choice.padded != choice.shape:
            for s in choice.storage.splits:
                if choice.padded[s.dim] != choice.shape[s.dim]:
                    chunk = local.shape[s.dim]
                    start = self._chunk(choice.storage, s.dim) * chunk
                    local = local.narrow(s.dim, 0, max(0, min(chunk, choice.shape[s.dim] - start)))
        known = self._known.get(name)
        if known is not None and known.choice is choice and known.strides == local.stride() and known.dtype == local.dtype:
            return _torch.wrapped(local, known.spec)
        made = _torch.dtensor(local, self.groups.device_mesh, dtensor_placements(choice.storage, self.groups.mesh), choice.shape)
        self._known[name] = _Known(choice, local.stride(), local.dtype, _torch.dtensor_spec(made))
        return made

    def reduced(self, local: torch.Tensor, p: Placement, choice: ParamChoice, dtype: torch.dtype) -> torch.Tensor:
        """This rank's part of a gradient that lies at `p`, unreduced or on its way: by itself, where no program takes it in. Collective."""
        if p == choice.storage:
            return local.to(dtype)
        axes = (*p.reductions, *(s.axis for s in p.splits))
        mesh, where = self.groups.mesh, self.groups.coordinates
        whole = self.groups.summed(alone(local, p, mesh, where), axes)
        pad = [x for n, m in reversed(list(zip(choice.shape, choice.padded, strict=True))) for x in (0, m - n)]
        whole = torch.nn.functional.pad(whole, pad)
        return cut(whole, choice.storage, mesh, where).to(dtype).contiguous()

    def _chunk(self, p: Placement, dim: int) -> int:
        """Which chunk of `dim` this rank holds."""
        index = 0
        for s in sorted((s for s in p.splits if s.dim == dim), reverse=True):
            index = index * self.groups.mesh.axis_size(s.axis) + self.groups.coordinates[s.axis]
        return index
