"""A module's tensors, each once with every place that holds it, and the part of a tensor that a rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from autopar.tensors.memory_format import inverse, laid, order_of

Box = tuple[tuple[int, int, int], ...]  # (start, length, step) a dim


def local_box(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> Box:
    """The part of a tensor that this rank holds: chunks of ceil(N / W), axis by axis, as DTensor cuts."""
    cuts = [(p.dim, mesh.size(axis), mesh.get_local_rank(axis)) for axis, p in enumerate(placements) if isinstance(p, Shard)]
    return tuple((a, n, 1) for a, n in chunk(shape, cuts))


def chunk(shape: Sequence[int], cuts: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int], ...]:
    """(start, length) a dim of what is left of a tensor after cuts: a dim, into how many, and which of them."""
    start, size = [0] * len(shape), list(shape)
    for dim, ways, index in cuts:
        most = -(-size[dim] // ways)
        begin = min(most * index, size[dim])
        start[dim] += begin
        size[dim] = min(most, size[dim] - begin)
    return tuple(zip(start, size, strict=True))


def cut_box(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of `whole` in storage of its own, unless it is all of it, in the format of the whole."""
    part = whole[tuple(slice(a, a + n) for a, n, _ in box)]
    order = order_of(whole)
    if part.shape == whole.shape:
        return laid(part, order)
    return part.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse(order))


@dataclass
class Owned:
    """A parameter or buffer under its first name, and every (module, attribute) that holds it."""

    name: str
    tensor: torch.Tensor
    owners: list[tuple[nn.Module, str]]

    @property
    def is_param(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    def set(self, value: torch.Tensor) -> None:
        for m, attr in self.owners:
            setattr(m, attr, value)  # not _parameters[attr]: recurrent layers keep a second list, which their __setattr__ updates


def owned_by(module: nn.Module, prefix: str = "") -> list[Owned]:
    found: dict[int, Owned] = {}
    for path, m in module.named_modules(prefix=prefix):
        for attr, t in [*m._parameters.items(), *m._buffers.items()]:
            if t is not None:
                found.setdefault(id(t), Owned(f"{path}.{attr}" if path else attr, t, [])).owners.append((m, attr))
    return list(found.values())
