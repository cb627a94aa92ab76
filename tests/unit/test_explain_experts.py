"""Why experts are not split over an axis, where they cannot be: by the names that a plan has for what its axes split."""

from __future__ import annotations

import pytest

from autopar.hardware.cluster import Cluster
from autopar.planner.explain import explain_graph
from autopar.planner.formulation.training import TrainingConfig
from autopar.solver.fold import fold
from autopar.solver.solve import Limits
from tests.unit.test_expert_layouts import mixtral


@pytest.mark.parametrize(
    ("mesh", "placement", "said"),
    [
        ({"dp": 1, "ep": 3}, "ep:experts", "4 experts do not divide over the 3 devices of ep"),
        ({"dp": 2, "ep": 2}, "dp:d", "d may not be split"),
    ],
)
def test_what_cannot_be(mesh: dict[str, int], placement: str, said: str) -> None:
    folded = fold(mixtral(num_hidden_layers=1))
    training = TrainingConfig(frozenset(folded.graph.params), "float32", budget_bytes=7e10)
    found = explain_graph(folded, mesh, Cluster.of("h100:2x2"), training, "mlp.experts", placement, Limits(seconds=120))
    assert found.verdict == "cannot" and said in found.text and "autopar.experts_v1.default" in found.text
