"""A formulated step: what its memory rows, its bounds and whoever explains it read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost import Cost
from autopar.graph.graph import Op
from autopar.graph.mesh import Mesh
from autopar.planner.formulation.clusters import Clusters
from autopar.planner.formulation.names import Names
from autopar.planner.formulation.program import Program
from autopar.planner.formulation.recompute import Recomputable
from autopar.planner.formulation.times import Times
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.formulation.wires import Wire


@dataclass(frozen=True)
class Formulated:
    """wires: by value; fixed: the choice of what is everywhere; is_decided: of every choice one strategy is left."""

    program: Program
    mesh: Mesh
    cost: Cost
    training: TrainingConfig
    clusters: Clusters
    names: Names
    wires: Mapping[str, Wire]
    recomputable: Recomputable
    times: Times
    fixed: int
    is_decided: bool

    def is_chained(self, op: Op) -> bool:
        return self.program.is_chained(op, self.clusters)
