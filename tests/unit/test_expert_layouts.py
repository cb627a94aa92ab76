"""Hand layouts with expert parallelism: as propagated for a step, and as a constraint on the integer program."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch

from autopar.errors import LayoutError
from autopar.graph.graph import Graph
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.planner.figures import model_flops
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.layout import Layout
from autopar.planner.planning import plan_graph
from autopar.planner.propagate import propagate
from autopar.rules import lookup
from autopar.solver.fold import fold
from autopar.solver.solve import Limits
from tests.experts import build
from tests.unit.test_experts import captured, llama
from tests.wide import wide

MESH = {"dp": 4, "ep": 2}
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


@cache
def mixtral(batch: int = 16, **sizes: int) -> Graph:
    with torch.device("meta"):
        model = build("mixtral", "eager", hidden_size=256, intermediate_size=512, vocab_size=1024, **sizes)
    return captured(model, batch, 128)


def planned(layout: str | Layout | None, mesh: dict[str, int] = MESH, g: Graph | None = None) -> Plan:
    g = g or mixtral()
    training = TrainingConfig(frozenset(g.params), "float32", budget_bytes=7e10)
    return plan_graph(g, mesh, Cluster.of("h100:8"), training, Limits(seconds=60), layout=layout).plan


def by_hand(layout: str | Layout, mesh: dict[str, int] = MESH, g: Graph | None = None) -> Plan:
    g = g or mixtral()
    return propagate(g, Layout.of(layout, Mesh.of(mesh)), mesh, frozenset(g.params))


def of_experts(plan: Plan, g: Graph) -> list[dict[str, str]]:
    """For each operator of routed experts what the user's axes split: experts or tokens."""
    found = []
    for op in g.ops:
        pairs = lookup(op).pairs
        if pairs:
            parents = {a: plan.mesh.axes[plan.mesh.names.index(a)].parent for a in plan.ops[op.name].strategy}
            found.append({parents[a]: "experts" if x in pairs else x for a, (x, _) in plan.ops[op.name].strategy.items()})
    assert found
    return found


@pytest.mark.parametrize("how", [planned, by_hand])
def test_experts_over_one_axis_and_tokens_over_the_other(how: Callable[..., Plan]) -> None:
    plan = how("fsdp+ep")
    assert all(found == {"dp": "t", "ep": "experts"} for found in of_experts(plan, mixtral()))
    for name, p in plan.params.items():
        split = {plan.mesh.axes[plan.mesh.names.index(s.axis)].parent: s.dim for s in p.compute.splits}
        assert split == ({"ep": 0} if name.endswith(EXPERTS) else {}), name
        stored = {plan.mesh.axes[plan.mesh.names.index(s.axis)].parent: s.dim for s in p.storage.splits}
        assert not name.endswith(EXPERTS) or (stored["ep"] == 0 and "dp" in stored), "gathered over the axis that has its experts"


def test_all_of_one_axis() -> None:
    """Four ranks have an expert each, and nothing of their weights is left to gather."""
    plan = by_hand("fsdp+ep", {"dp": 4})
    assert all(found == {"dp": "experts"} for found in of_experts(plan, mixtral()))
    assert all(p.compute == p.storage for n, p in plan.params.items() if n.endswith(EXPERTS))


@wide
def test_is_a_point_of_the_plans_space() -> None:
    assert planned(None).predicted["step_time_s"] <= planned("fsdp+ep").predicted["step_time_s"] * 1.01


def test_replicated_outside_of_experts() -> None:
    """Megatron's: experts over the axis, everything else data parallel."""
    plan = by_hand(Layout(data=("dp", "ep"), experts=("ep",)))
    assert all(not p.storage.splits for n, p in plan.params.items() if not n.endswith(EXPERTS))
    assert all([s.dim for s in p.storage.splits] == [0] for n, p in plan.params.items() if n.endswith(EXPERTS))


def test_the_models_flops_are_those_of_the_experts_that_a_token_meets() -> None:
    """Six for each weight that a token meets, two of four experts, and attention's; not what backward of experts makes again."""
    g, tokens, chosen = mixtral(), 16 * 128, 2 / 4
    met = 0.0
    for name, t in g.params.items():
        if len(t.shape) > 1 and "embed" not in name:
            met += math.prod(t.shape) * (chosen if name.endswith(EXPERTS) else 1.0)
    attention = 3 * 2 * (4 * tokens * 128 * 256) / 2  # two layers, causal
    assert sum(model_flops(fold(g), Mesh.of({"dp": 1})).values()) == pytest.approx(6 * tokens * met + attention, rel=2e-3)


@pytest.mark.parametrize("how", [planned, by_hand])
def test_refusals(how: Callable[..., Plan]) -> None:
    with pytest.raises(LayoutError, match="over 8 devices, but there are 4") as e:
        how("fsdp+ep", {"dp": 8})
    assert "mesh of 2x4" in e.value.fix
    with pytest.raises(LayoutError, match="no routed experts"):
        how(
            "fsdp+ep",
            MESH,
            llama(1, 16, 128, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, vocab_size=128),
        )
    with pytest.raises(LayoutError, match="split experts but no batch"):
        how(Layout(data=("dp",), experts=("ep",)))
