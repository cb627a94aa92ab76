"""Hand layouts: which mesh axes carry data, shard storage, or split tensors.

    ddp      batch over all axes, parameters replicated
    fsdp     batch over all axes, parameters, gradients and optimizer state sharded over all axes (ZeRO-3)
    tp       tensors split over all axes, batch replicated (Megatron-style column/row pairs, found from the graph)
    fsdp+tp  the axis named tp/tensor/model (else the last one) splits tensors, the others are fsdp

On a one-axis mesh `fsdp+tp` gives the axis's smallest prime factor to tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import LayoutError
from autopar.mesh import Mesh

NAMES = ("ddp", "fsdp", "tp", "fsdp+tp")
_TENSOR_NAMES = ("tp", "tensor", "model")


@dataclass(frozen=True)
class Layout:
    """data: axes the batch is split over; shard: axes parameters are stored split over (a subset of data: HSDP when proper);
    tensor: axes ops are split over by their parameters' dims. Axis names are the user's (or refined ones, such as "dp.1").
    reshard_after_forward: gather parameters again in backward (False keeps the gathered copy)."""

    data: tuple[str, ...] = ()
    shard: tuple[str, ...] = ()
    tensor: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    name: str = "custom"

    @staticmethod
    def of(layout: str | Layout, mesh: Mesh) -> Layout:
        """`layout` with all axes refined and checked against `mesh`."""
        if isinstance(layout, str):
            layout = _named(layout, mesh)
        refined = Layout(
            _refine(layout.data, mesh), _refine(layout.shard, mesh), _refine(layout.tensor, mesh), layout.reshard_after_forward, layout.name
        )
        both = set(refined.data) & set(refined.tensor)
        if both:
            raise LayoutError(f"axes {sorted(both)} are both data and tensor axes", fix="give each mesh axis one role in Layout(...)")
        return refined


def _named(name: str, mesh: Mesh) -> Layout:
    axes = tuple(mesh.parents)
    if name == "ddp":
        return Layout(data=axes, name=name)
    if name == "fsdp":
        return Layout(data=axes, shard=axes, name=name)
    if name == "tp":
        return Layout(tensor=axes, name=name)
    if name == "fsdp+tp":
        if len(axes) == 1:
            refined = mesh.children(axes[0])
            return Layout(data=refined[:-1], shard=refined[:-1], tensor=refined[-1:], name=name)
        tensor = next((a for a in axes if a in _TENSOR_NAMES), axes[-1])
        data = tuple(a for a in axes if a != tensor)
        return Layout(data=data, shard=data, tensor=(tensor,), name=name)
    raise LayoutError(f"unknown layout {name!r}", fix=f"use one of {', '.join(NAMES)}, or autopar.Layout(data=..., shard=..., tensor=...)")


def _refine(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    out: list[str] = []
    for a in axes:
        if a in mesh.parents:
            out += mesh.children(a)
        elif a in mesh.names:
            out.append(a)
        else:
            raise LayoutError(f"the mesh has no axis {a!r}", where=f"mesh axes {dict(mesh.parents)}", fix="name axes as in mesh_dim_names")
    return mesh.sort(tuple(a for a in out if mesh.axis_size(a) > 1))
