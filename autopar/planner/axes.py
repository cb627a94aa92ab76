"""Whether a mesh fits what it is planned for: its axes by name, the devices of its cluster, the batch. No torch, no graph: asked before anything is captured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from autopar.errors import MeshError

if TYPE_CHECKING:
    from autopar.hardware.cluster import Cluster

PIPELINE = "pp"  # the axis that stages of a pipeline lie along
SHOWN = 4  # shapes of a mesh that are proposed


def mesh_axes(mesh: str | Mapping[str, int] | None, cluster: Cluster) -> dict[str, int]:
    """Axis sizes by name; axes without names are dp, tp or axis0, axis1, ..."""
    if isinstance(mesh, Mapping):
        axes = dict(mesh)
    else:
        sizes = [n for n in (cluster.nodes, cluster.devices_per_node) if n > 1] or [1]
        if mesh is not None:
            try:
                sizes = [int(n) for n in mesh.lower().split("x")]
            except ValueError:
                raise MeshError(f"{mesh!r} is not a mesh", fix='write sizes such as "32x8"') from None
        names = ("dp", "tp") if len(sizes) <= 2 else tuple(f"axis{i}" for i in range(len(sizes)))
        axes = dict(zip(names, sizes, strict=False))
    if any(n < 1 for n in axes.values()):
        raise MeshError(f"a mesh axis has at least one device: {axes}", fix="write positive sizes")
    return axes


def refuse_unfilled(axes: Mapping[str, int], cluster: Cluster) -> None:
    """For who names a cluster and a mesh on the command line: devices that idle, or are not there, are a slip there. A program may plan for a part of a cluster."""
    size = math.prod(axes.values())
    if size != cluster.size:
        known = [f"{n}x{cluster.size // n}" for n in (cluster.nodes, 2, 4) if n > 1 and cluster.size % n == 0 and n < cluster.size]
        shapes = list(dict.fromkeys([*known, str(cluster.size)]))[:SHOWN]
        raise MeshError(
            f"the mesh {said(axes)} has {size} devices, not the {cluster.size} of {cluster.name}",
            where="mesh",
            fix=f"make the product of its sizes {cluster.size}, as {' or '.join(shapes)}; or plan for a cluster of {size} devices",
        )


def said(axes: Mapping[str, int]) -> str:
    """ "dp=7 x tp=9"."""
    return " x ".join(f"{n}={s}" for n, s in axes.items())


def ways(batch: int, axes: Mapping[str, int]) -> int:
    """The most devices that a batch can be split over, evenly: axes come apart into their prime factors."""
    return math.gcd(batch, math.prod(axes.values()))


def divides_poorly(batch: int | None, axes: Mapping[str, int]) -> str:
    """What keeps the batch from being split over the mesh, in a clause; "" if nothing does. A batch of nothing, or smaller than the mesh that divides it, is as it should be."""
    size = math.prod(axes.values())
    if not batch or size == 1 or size % batch == 0 or batch % size == 0:
        return ""
    most = ways(batch, axes)
    far = f"at most {most} ways of {size}" if most > 1 else f"over none of {said(axes)}"
    return f"a batch of {batch} can be split {far}"


def better_batches(batch: int, axes: Mapping[str, int]) -> str:
    """The nearest batches that divide over all devices."""
    size = math.prod(axes.values())
    return " or ".join(str(n) for n in dict.fromkeys((batch // size * size, -(-batch // size) * size)) if n)
