"""Where a gap stays, a plan is no slower than the best that is FSDP; what it is held against stays the bound of all plans."""

from __future__ import annotations

import math

import pytest

from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.planner import planning
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.layout import Layout
from autopar.planner.planning import plan_graph
from autopar.solver.solve import Limits
from tests.plans import captured

AXES = {"dp": 4}
FSDP = Layout(data=("dp",), shard=("dp",), reshard_after_forward=False)


def planned(budget_bytes: float, layout: Layout | None = None) -> Plan:
    p = captured("llama")
    trainable = frozenset(n for n, q in p.model.named_parameters() if q.requires_grad)
    training = TrainingConfig(trainable, budget_bytes=budget_bytes)
    return plan_graph(p.graph, AXES, Cluster.of("h100:4"), training, Limits(0.3, 60), layout=layout).plan


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_no_slower_than_fsdp(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "HAND_GAP", math.inf)
    budget = share * planned(math.inf, FSDP).predicted["peak_memory_bytes"]
    alone, hand = planned(budget), planned(budget, FSDP)
    monkeypatch.setattr(planning, "HAND_GAP", -1.0)
    both = planned(budget)
    times = [p.predicted["step_time_s"] for p in (alone, hand, both)]
    assert times[2] == pytest.approx(min(times[:2]), rel=1e-6)
    assert both.layout == "planned" and both.predicted["peak_memory_bytes"] <= budget
    assert both.solver["bound_s"] <= min(times) * (1 + 1e-9) and both.solver["bound_s"] == pytest.approx(alone.solver["bound_s"])
