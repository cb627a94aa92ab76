"""Hand layouts that the integer program fills in, executed on simulated ranks, equal one device; and they are what their names say."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from autopar.plan.plan import Plan
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.layout import Layout
from autopar.planner.planning import Planned, plan_graph
from tests.spmd.test_planned import LIMITS, captured, check, cluster
from tests.wide import cases

MESHES = {"tp": {"tp": 2}, "cp": {"cp": 2}, "cp tp": {"cp": 2, "tp": 2}, "dp tp": {"dp": 2, "tp": 2}}
LAYOUTS = {
    "tp": [Layout(tensor=("tp",), sequence_parallel=False), Layout(tensor=("tp",))],
    "cp": [Layout(context=("cp",))],
    "cp tp": [Layout(context=("cp",), tensor=("tp",))],
    "dp tp": [Layout(data=("dp",), tensor=("tp",), sequence_parallel=False)],
}


def planned(name: str, mesh: dict[str, int], layout: Layout) -> Planned:
    p, _ = captured(name)
    trainable = frozenset(n for n, q in p.model.named_parameters() if q.requires_grad)
    return plan_graph(p.graph, mesh, cluster(math.prod(mesh.values())), TrainingConfig(trainable), LIMITS, None, layout)


# This GPT-2 drops out attention's weights, so its attention is products and a softmax, which no rank has a part of the queries of.
CASES = [(n, k, i) for k, v in LAYOUTS.items() for i in range(len(v)) for n in ("llama", "gpt2") if n == "llama" or "cp" not in k]


@pytest.mark.parametrize(("name", "kind", "i"), cases(CASES, [c for c in CASES if c[0] == "llama" and not c[2]]))
def test_layouts(name: str, kind: str, i: int) -> None:
    mesh, layout = MESHES[kind], LAYOUTS[kind][i]
    found = planned(name, mesh, layout)
    check(name, mesh, found)
    if "tp" in mesh and name == "llama":
        assert heavy(found.plan, "attention", "tp") == {"g"}  # heads
    if "cp" in mesh:
        assert heavy(found.plan, "attention", "cp") == {"q"}  # queries
        assert heavy(found.plan, "matmul", "cp") <= {"m", "k"}  # tokens: summed over in a weight's gradient


def heavy(plan: Plan, kind: str, axis: str) -> set[str]:
    """Letters that `axis` splits of operators of a kind."""
    return {x for op in plan.ops.values() if op.kind == kind for a, (x, _) in op.strategy.items() if a.split(".")[0] == axis}


def test_queries_keys_and_values_made_together_are_split_by_heads() -> None:
    """GPT-2's c_attn: in one product of 3 x heads x width columns, each rank makes its heads of all three. So a layer blocks twice in forward, as Megatron's does."""
    found = planned("gpt2", {"tp": 2}, Layout(tensor=("tp",), sequence_parallel=False))
    blocking = Counter[str]()
    for u in found.plan.collectives:
        if u.direction == "forward" and u.kind == "all_reduce" and u.wire_bytes > 1000:
            blocking[u.kind] += u.count
    assert blocking["all_reduce"] == 2 * 2  # two layers
