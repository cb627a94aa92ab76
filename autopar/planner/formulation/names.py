"""What a program's indices mean, and what its arcs are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.graph.redistribution import Step, redistribute
from autopar.planner.formulation.clusters import Clusters
from autopar.planner.formulation.parameter_storage import Storage
from autopar.planner.formulation.symmetry import SymmetryClasses
from autopar.solver.problem import Arc


@dataclass
class Names:
    """What the Problem's indices mean. Operators, parameters and tensors are named by their classes, values by one of their tensors."""

    symmetry: SymmetryClasses
    clusters: Clusters
    mesh: Mesh
    storage: dict[str, tuple[int, list[Storage]]] = field(default_factory=dict)  # parameter's tensor -> (choice, its options)
    inputs: int = -1
    input_options: list[tuple[str, ...]] = field(default_factory=list)  # data axes per option
    value_of: dict[str, int] = field(default_factory=dict)  # value -> its index
    nodes: list[list[Placement]] = field(default_factory=list)  # per value
    reruns: list[tuple[str, int]] = field(default_factory=list)  # class, segment
    itemsize: dict[str, float] = field(default_factory=dict)  # value -> bytes of an element
    merged: frozenset[str] = frozenset()  # values whose nodes stand for sizes

    def steps(self, v: int, arc: Arc) -> list[Step]:
        """The collectives of an arc of value `v`."""
        found = moved(self.nodes[v][arc.src], self.nodes[v][arc.dst], self.mesh)
        assert found is not None
        return found


def moved(src: Placement, dst: Placement, mesh: Mesh) -> list[Step] | None:
    """The collectives from `src` to `dst`, None if there are none (a Partial cannot be made)."""
    if any(src.reductions.get(a) != r for a, r in dst.partial):
        return None
    if src.shape == dst.shape:
        return redistribute(src, dst, mesh)
    if math.prod(src.shape) > math.prod(dst.shape):  # padded storage: gathered, cut, then sliced
        return redistribute(src, Placement.of(src.shape), mesh) + redistribute(Placement.of(dst.shape), dst, mesh)
    axes = {s.axis for s in dst.splits}
    middle = Placement.of(src.shape)
    for a in sorted(axes):
        middle = middle.with_axis(a, "sum" if src.reductions.get(a) else None)
    padded = Placement(dst.shape, (), middle.partial)
    return redistribute(src, middle, mesh) + redistribute(padded, dst, mesh)
