"""A weight that several products read: what the integer program says of each is said per strategy of that product's own cluster."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture.capture import Call, capture
from autopar.capture.describe import describe
from autopar.cost import Cost
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.planner.formulation.problem import Formulator
from autopar.planner.formulation.symmetry import symmetry
from autopar.planner.formulation.training import TrainingConfig
from autopar.rules import lookup
from autopar.solver.fold import fold
from autopar.solver.problem import BACKWARD, FORWARD, Problem
from autopar.solver.shrink import shrink


class Shared(nn.Module):
    """As attention over relative positions: tokens and a table go through one projection, with loops of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.shared, self.down = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)
        self.table = nn.Parameter(torch.zeros(24, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.shared(self.table)
        return self.down((self.shared(self.up(x).relu()) @ table.T).softmax(-1) @ table).square().mean()


def formulated(model: nn.Module, mesh: Mesh) -> Problem:
    call = Call.of((torch.zeros(8, 16, 16),), {})
    graph = describe(capture(model, call, tuple((tuple(t.shape), t.dtype) for t in call.tensors)))
    q = symmetry(shrink(fold(graph)))
    rules = {op.name: lookup(op) for op in q.graph.ops}
    cost = Cost.compiled(Cluster.of("h100:8"), mesh, q.graph, rules)
    training = TrainingConfig(frozenset(n for n, p in model.named_parameters() if p.requires_grad))
    return Formulator(q, rules, mesh, cost, training).run()[0]


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=lambda m: "x".join(map(str, m.values())))
def test_ends_have_a_node_for_every_strategy(axes: dict[str, int]) -> None:
    p = formulated(Shared(), Mesh.of(axes))
    seen = {len(c.labels) for c in p.choices}
    assert len(seen) > 2, "clusters of one size could not be confused"
    for value in p.values:
        for direction in (FORWARD, BACKWARD):
            flow = (value.forward, value.backward)[direction]
            for end in (*flow.supplies, *flow.demands) if flow is not None else ():
                assert len(end.nodes) == len(p.choices[end.choice].labels), (value.name, direction, p.choices[end.choice].name)
    for r in p.reruns:
        assert all(len(nodes) == len(p.choices[r.choice].labels) for _, nodes in (*r.reads, *r.makes)), r.name
