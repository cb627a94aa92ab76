"""What a plan must satisfy beyond its form: whatever it names exists in its own mesh, every placement is one.

Passes and reports rely on these; a plan from a file is checked before anything else sees it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from autopar.errors import AutoparError
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.plan.decisions import CollectiveUse, OpChoice, ParamChoice
from autopar.text.strict_json import short

MAX_DEVICES = 1 << 20
MAX_ELEMENTS = 1 << 63


class PlanError(AutoparError):
    """A plan file is damaged, of another version, or contradicts itself."""


_REMAKE = "make the plan again; if the file was edited by hand, correct it there"


def contradiction(what: str, where: str) -> PlanError:
    return PlanError(f"The plan contradicts itself: {what}", where=where, fix=_REMAKE)


def mesh_of(sizes: list[tuple[str, int]]) -> Mesh:
    """The refined mesh of the user's axes. The product is bounded first: refining factorises every size."""
    names = [n for n, _ in sizes]
    if len(set(names)) != len(names):
        raise contradiction(f"two mesh axes have one name, among {short(', '.join(names))}", "mesh")
    if math.prod(s for _, s in sizes) > MAX_DEVICES:
        raise PlanError(f"The plan's mesh has more than {MAX_DEVICES:,} devices", where="mesh", fix=_REMAKE)
    mesh = Mesh.of(dict(sizes))
    if len(set(mesh.names)) != len(mesh.names):
        raise contradiction(f"mesh axes {short(', '.join(names))} and the parts they are refined into share a name", "mesh")
    return mesh


class Checker:
    """Checks parts of a plan against its mesh; `where` names the part in the error."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.known = frozenset(mesh.names)

    def axes(self, axes: Iterable[str], where: str) -> None:
        """All exist, none twice."""
        seen: set[str] = set()
        for a in axes:
            if a not in self.known:
                raise contradiction(f"the mesh has no axis {short(a)!r} (it has {short(', '.join(self.mesh.names))})", where)
            if a in seen:
                raise contradiction(f"axis {short(a)!r} is used twice", where)
            seen.add(a)

    def placement(self, p: Placement, where: str) -> None:
        self.axes([*(s.axis for s in p.splits), *(a for a, _ in p.partial)], where)
        if math.prod(p.shape) >= MAX_ELEMENTS:
            raise contradiction("a tensor has more elements than can be counted in 64 bits", where)
        if not p.is_valid(self.mesh):
            raise contradiction(f"{short(str(p))} does not divide a tensor of shape {short(str(p.shape))}", where)

    def param(self, c: ParamChoice, where: str) -> None:
        self.placement(c.storage, f"{where}.storage")
        self.placement(c.compute, f"{where}.compute")
        if c.storage.shape != c.padded or c.compute.shape != c.shape:
            raise contradiction("a parameter's placements are of other shapes than the parameter", where)
        if len(c.shape) != len(c.padded) or any(n > m for n, m in zip(c.shape, c.padded, strict=True)):
            raise contradiction("a padded shape is smaller than the shape", where)
        if c.storage.partial or c.compute.partial:
            raise contradiction("a parameter cannot be the terms of a reduction", where)
        if c.accumulated is not None and c.accumulated != c.storage:
            self.placement(c.accumulated, f"{where}.accumulated")
            if c.accumulated.shape != c.shape:
                raise contradiction("gradients are added up in another shape than the parameter's", where)

    def op(self, c: OpChoice, where: str) -> None:
        self.axes([*c.strategy, *c.partial], where)

    def use(self, c: CollectiveUse, where: str) -> None:
        self.axes(c.axes, where)
        if c.wire_bytes < 0:
            raise contradiction("a collective moves a negative number of bytes", where)
