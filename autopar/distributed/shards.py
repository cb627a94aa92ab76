"""Cutting a whole tensor into a rank's shard, putting shards together, and DTensor's words for a placement."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Placement as DPlacement

from autopar import _torch
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.planner.storage import plain_dim
from autopar.tensors.memory_format import laid, order_of
from autopar.tensors.owned import cut_box, local_box


def cut(x: torch.Tensor, p: Placement, mesh: Mesh, coordinates: Mapping[str, int]) -> torch.Tensor:
    """The part of the whole tensor `x` that the rank at `coordinates` holds. A view where it can be."""
    for dim in range(x.dim()):
        digits = p.digits(dim, mesh)
        if all(a is None for _, a in digits):
            continue
        x = x.unflatten(dim, [n for n, _ in digits])
        at = dim
        for _, a in digits:
            if a is None:
                at += 1
            else:
                x = x.select(at, coordinates[a])
        kept = at - dim
        x = x.flatten(dim, at - 1) if kept > 1 else x if kept == 1 else x.unsqueeze(dim)
    return x


def join(shards: Mapping[int, torch.Tensor], p: Placement, mesh: Mesh) -> torch.Tensor:
    """The whole tensor from every rank's shard (rank -> local); Partial axes are reduced."""
    some = shards[0]
    ops: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    out = torch.empty(p.shape, dtype=some.dtype)
    done: dict[tuple[int, ...], torch.Tensor] = {}
    for rank in range(mesh.size):
        c = mesh.coordinates(rank)
        if any(c[a] for a in mesh.names if a not in p.where and a not in p.reductions):
            continue  # a replica
        key = tuple(c[s.axis] for s in p.splits)
        local = shards[rank]
        if key in done:
            (op,) = set(p.reductions.values())
            done[key] = ops[op](done[key], local)
        else:
            done[key] = local
    for key, local in done.items():
        where = dict(zip((s.axis for s in p.splits), key, strict=True))
        cut(out, p, mesh, {a: where.get(a, 0) for a in mesh.names}).copy_(local) if _is_view(p, mesh) else _scatter(
            out, local, p, mesh, where
        )
    return out


def alone(local: torch.Tensor, p: Placement, mesh: Mesh, coordinates: Mapping[str, int]) -> torch.Tensor:
    """The whole tensor with this rank's shard in its place, and zeros elsewhere."""
    out = torch.zeros(p.shape, dtype=local.dtype, device=local.device)
    if _is_view(p, mesh):
        cut(out, p, mesh, coordinates).copy_(local)
    else:
        _scatter(out, local, p, mesh, dict(coordinates))
    return out


def _is_view(p: Placement, mesh: Mesh) -> bool:
    """Whether `cut` is a view: at most one local digit a dim."""
    return all(sum(a is None for _, a in p.digits(d, mesh)) <= 1 for d in range(len(p.shape)))


def _scatter(out: torch.Tensor, local: torch.Tensor, p: Placement, mesh: Mesh, where: dict[str, int]) -> None:
    index = []
    for dim in range(out.dim()):
        i = torch.zeros((), dtype=torch.int64)
        stride = p.shape[dim]
        for n, a in p.digits(dim, mesh):
            stride //= n
            i = i + where[a] * stride if a is not None else (i.unsqueeze(-1) + torch.arange(n) * stride).reshape(-1)
        index.append(i.reshape(-1))
    out[torch.meshgrid(*index, indexing="ij")] = local


def dtensor_placements(p: Placement, mesh: Mesh) -> tuple[DPlacement, ...]:
    """One DTensor placement per user axis; `p` must be plain (see storage.py)."""
    out: list[DPlacement] = []
    for parent in mesh.parents:
        dim = plain_dim(p, parent, mesh)
        out.append(Replicate() if dim is None else Shard(dim))
    return tuple(out)


def on_mesh(t: torch.Tensor, mesh: DeviceMesh, how: tuple[DPlacement, ...]) -> DTensor:
    """The DTensor `t` as it lies on another mesh of the same devices. Collective."""
    assert isinstance(t, DTensor)
    order, shape = order_of(t), tuple(t.shape)
    local = cut_box(laid(t.full_tensor(), order), local_box(shape, mesh, how))
    return _torch.dtensor(local, mesh, how, shape, order)


@torch.no_grad()
def redistributed(t: DTensor, how: tuple[DPlacement, ...]) -> DTensor:
    """The DTensor `t` as it lies otherwise on its mesh. Collective."""
    here = t.detach()
    assert isinstance(here, DTensor)
    there = here.redistribute(t.device_mesh, how)
    local = laid(_torch.local_tensor(there), order_of(t))  # which a redistribution of DTensor's leaves contiguous
    moved: DTensor = _torch.dtensor(local, t.device_mesh, how, tuple(t.shape), order_of(t))
    return moved
