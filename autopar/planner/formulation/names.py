"""What a program's indices mean, and what its arcs are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.graph.first_step import taken
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.graph.redistribution import Step, redistribute, sent_elements
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
    known_stops: dict[tuple[Placement, Placement], tuple[Placement, ...]] = field(default_factory=dict)

    def steps(self, v: int, arc: Arc) -> list[Step]:
        """The collectives of an arc of value `v`."""
        found = moved(self.nodes[v][arc.src], self.nodes[v][arc.dst], self.mesh)
        assert found is not None
        return found

    def stops(self, src: Placement, dst: Placement) -> tuple[Placement, ...]:
        """`src`, and where each step of a gradient's reduction to `dst` brings it; nothing where there is none."""
        if (src, dst) not in self.known_stops:
            steps = moved(src, dst, self.mesh)
            self.known_stops[src, dst] = () if steps is None else (src, *(step.dst for step in steps))
        return self.known_stops[src, dst]

    def accumulated(self, v: int, arc: Arc) -> Placement:
        """Where gradients of micro-batches are added up, of which this arc brings the sum to its parameter."""
        return self.stops(self.nodes[v][arc.src], self.nodes[v][arc.dst])[arc.way] if arc.way else self.nodes[v][arc.src]

    def accumulated_bytes(self, v: int, arc: Arc, value: str, stored_itemsize: float) -> float:
        """What a device holds of that sum: in the precision of storage where it lies as its parameter does, else in that of reductions."""
        is_stored = arc.way > 0 and arc.way == len(self.stops(self.nodes[v][arc.src], self.nodes[v][arc.dst])) - 1
        return math.prod(self.accumulated(v, arc).local_shape(self.mesh)) * (stored_itemsize if is_stored else self.itemsize[value])


def ways(stops: Sequence[Placement], itemsize: float, stored_itemsize: float, mesh: Mesh) -> list[int]:
    """After how many steps that reduce a gradient, which lead to all `stops` but the first, those of micro-batches may be added up instead of before any: wherever there is less of it to
    hold. What a step makes is summed in the precision of reductions, what the last one makes in that of storage. Padded storage has no place on the way."""
    if len(stops) < 2:
        return []
    found, least, last = [], itemsize * math.prod(stops[0].local_shape(mesh)), len(stops) - 1
    for k, stop in enumerate(stops[1:], 1):
        if k < last and stop.shape != stops[-1].shape:
            continue
        held = math.prod(stop.local_shape(mesh)) * (stored_itemsize if k == last else itemsize)
        if held < least:
            least = held
            found.append(k)
    return found


class Hop(NamedTuple):
    """What the price of a collective needs. number: among the steps, from 1; elements: that a rank sends."""

    number: int
    kind: str
    axes: tuple[str, ...]
    elements: float


def hops(src: Placement, dst: Placement, mesh: Mesh) -> tuple[Hop, ...] | None:
    """Those of `moved` that send anything."""
    if src.shape != dst.shape:
        steps = moved(src, dst, mesh)
        if steps is None:
            return None
        return tuple(Hop(k, s.kind, s.axes, s.wire_bytes(mesh, 1)) for k, s in enumerate(steps, 1) if s.kind != "slice")
    if any(src.reductions.get(a) != r for a, r in dst.partial):
        return None
    names, found = mesh.names, []
    held, whole = math.prod(src.local_shape(mesh)), math.prod(src.shape)
    for k, t in enumerate(taken(src.on(names), dst.on(names), src.shape, mesh.widths), 1):
        before, held = held, whole // t.parts
        if t.kind != "slice":
            found.append(Hop(k, t.kind, tuple([names[i] for i in t.axes]), sent_elements(t.kind, before, held, t.width)))
    return tuple(found)


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
