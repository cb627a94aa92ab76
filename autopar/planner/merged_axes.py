"""Meshes with some of their axes as one: few good plans use every axis for something else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.graph.mesh import Mesh


def merged(mesh: Mesh) -> Iterator[Mesh]:
    """`mesh` with all its axes as one, then as two: neighbours only, since storage over axes that are not lies as no DTensor does."""
    parents = [p for p, n in mesh.parents.items() if n > 1]
    yield _with_parents(mesh, [parents])
    for i in range(len(parents) - 1, 0, -1):
        yield _with_parents(mesh, [parents[:i], parents[i:]])


def _with_parents(mesh: Mesh, groups: list[list[str]]) -> Mesh:
    name = {p: "+".join(group) for group in groups for p in group}
    return Mesh(tuple(replace(a, parent=name.get(a.parent, a.parent)) for a in mesh.axes))


def axes_said(mesh: Mesh) -> str:
    return " x ".join(f"{p}={n}" for p, n in mesh.parents.items() if n > 1) or "one device"
