"""What planning looks at of a folded step on a mesh: its graph with as few layers as stand for all, which of its operators decide alike, their rules and prices.

It takes a good part of the time to plan, and is asked for again by bounds of the same step. So those of the last few steps are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost import Cost
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.planner.formulation.symmetry import SymmetryClasses, symmetry
from autopar.rules import lookup
from autopar.rules.grammar import Rule
from autopar.solver.fold import Folded
from autopar.solver.shrink import Shrunk, shrink

KEPT = 4  # two forms of a step, of two numbers of micro-batches


@dataclass(frozen=True)
class View:
    """q: operators and tensors that decide alike; cost: with what is fused, if anything is."""

    shrunk: Shrunk
    q: SymmetryClasses
    rules: Mapping[str, Rule]
    cost: Cost


_kept: list[tuple[Folded, Mesh, Cluster, bool, View]] = []  # the newest last


def view(
    folded: Folded, mesh: Mesh, cluster: Cluster, fuses: bool, imbalance: float = 1.0, segments: Mapping[str, Sequence[int]] | None = None
) -> View:
    """segments: the graph with its layers cut so. fuses: whether kernels are fused before they are priced; imbalance: of routed experts."""
    if segments is not None:
        return _made(folded, mesh, cluster, fuses, imbalance, segments)
    for kept in _kept:
        if kept[0] is folded and kept[2] is cluster and (kept[1], kept[3], kept[4].cost.imbalance) == (mesh, fuses, imbalance):
            return kept[4]
    alike = next((k[4] for k in _kept if k[0] is folded and k[3] == fuses), None)
    if alike is not None:  # only prices go by the devices
        made = replace(alike, cost=replace(alike.cost, cluster=cluster, mesh=mesh, imbalance=imbalance))
    else:
        made = _made(folded, mesh, cluster, fuses, imbalance, None)
    _kept.append((folded, mesh, cluster, fuses, made))
    del _kept[:-KEPT]
    return made


def _made(
    folded: Folded, mesh: Mesh, cluster: Cluster, fuses: bool, imbalance: float, segments: Mapping[str, Sequence[int]] | None
) -> View:
    small = shrink(folded, segments)
    rules = {op.name: lookup(op) for op in small.graph.ops}
    cost = Cost.compiled(cluster, mesh, small.graph, rules) if fuses else Cost(cluster, mesh)
    return View(small, symmetry(small), rules, replace(cost, imbalance=imbalance))
