"""Where a parameter, its gradient and its optimizer state may be stored: one plain DTensor placement on each of the user's axes.

That spans DDP (replicated), FSDP and ZeRO-3 (sharded over every axis), HSDP (over some), and a tensor-parallel dim where it is computed.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from autopar.graph.graph import Tensor
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement


@dataclass(frozen=True)
class Storage:
    """padded: the shape rounded up so that it divides; placement: over it; label: such as "dp:S(0)"."""

    padded: tuple[int, ...]
    placement: Placement
    label: str


def storages(t: Tensor, mesh: Mesh) -> list[Storage]:
    """Every placement whose dims divide; where no dim divides over all axes, dim 0 padded over all of them."""
    parents = [p for p, n in mesh.parents.items() if n > 1]
    out = []
    dims: list[int | None] = [None, *[d for d in range(min(2, len(t.shape))) if t.shape[d] > 1]]
    for picks in itertools.product(dims, repeat=len(parents)):
        found = _split(t.shape, dict(zip(parents, picks, strict=True)), mesh)
        if found is not None:
            label = " ".join(f"{p}:S({d})" for p, d in zip(parents, picks, strict=True) if d is not None) or "R"
            out.append(Storage(t.shape, found, label))
    whole = math.prod(mesh.parents[p] for p in parents)
    if t.shape and t.numel >= whole and all(math.prod(mesh.axis_size(s.axis) for s in o.placement.splits) < whole for o in out):
        padded = (-(-t.shape[0] // whole) * whole, *t.shape[1:])
        found = _split(padded, dict.fromkeys(parents, 0), mesh)
        assert found is not None
        out.append(Storage(padded, found, " ".join(f"{p}:S(0)" for p in parents) + " padded"))
    return out


def _split(shape: tuple[int, ...], picks: dict[str, int | None], mesh: Mesh) -> Placement | None:
    where: dict[str, tuple[int, int]] = {}
    left = list(shape)
    for parent, dim in picks.items():
        for c in mesh.children(parent) if dim is not None else ():
            if mesh.axis_size(c) > 1:
                assert dim is not None
                if left[dim] % mesh.axis_size(c):
                    return None
                left[dim] //= mesh.axis_size(c)
                where[c] = (dim, left[dim])
    return Placement.of(shape, where)
