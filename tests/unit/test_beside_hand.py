"""Where a gap stays, a plan is no slower than the best that is FSDP; what it is held against stays the bound of all plans."""

from __future__ import annotations

import math
from collections.abc import Mapping

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


def planned(budget_bytes: float, layout: Layout | None = None, axes: Mapping[str, int] = AXES) -> Plan:
    p = captured("llama")
    trainable = frozenset(n for n, q in p.model.named_parameters() if q.requires_grad)
    training = TrainingConfig(trainable, budget_bytes=budget_bytes)
    return plan_graph(p.graph, axes, Cluster.of("h100:4"), training, Limits(0.3, 60), layout=layout).plan


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


def test_no_slower_than_fsdp_and_tensor_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two axes; also where what was found without it is bad."""
    axes = {"dp": 2, "tp": 2}
    monkeypatch.setattr(planning, "HAND_GAP", math.inf)
    hand = planned(math.inf, planning.fsdp_tp(tuple(axes)), axes)
    monkeypatch.setattr(planning, "LARGE_GAP", -1.0)
    both = planned(math.inf, None, axes)
    assert both.layout == "planned" and both.predicted["step_time_s"] <= hand.predicted["step_time_s"] * (1 + 1e-6)
