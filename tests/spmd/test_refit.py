"""A plan made from shallow captures, refitted to a capture of the whole: the plan of the whole, and executed it equals one device."""

from __future__ import annotations

import dataclasses
import types
from collections import Counter

import pytest
import torch

from autopar.plan.plan import Plan
from autopar.plan.schema import canonical, dumps
from autopar.planner import offline
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.planning import plan_graph
from autopar.planner.refit import refit
from tests.models import ZOO
from tests.spmd import test_planned
from tests.spmd.simulate import Prepared, prepare
from tests.wide import cases

MESH = {"dp": 4}
LAYERS = 6


def prepared(name: str) -> tuple[Prepared, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    inputs = ZOO[name].inputs(8, 32)
    return prepare(ZOO[name].build(LAYERS).train(), inputs), inputs


def decided(plan: Plan) -> str:
    """What is decided; not what collectives are called, or how planning went."""
    uses = Counter((c.kind, c.axes, c.wire_bytes, c.direction, c.count) for c in plan.collectives)
    return canonical(dataclasses.replace(plan, collectives=(), modules={}, solver={})) + str(sorted(uses.items()))


@pytest.mark.parametrize(("name", "tight"), cases([("llama", False), ("llama", True), ("gpt2", False), ("gpt2", True)], [("llama", False)]))
def test_a_tiled_plan_on_the_whole(name: str, tight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    p, inputs = prepared(name)
    cluster = test_planned.cluster(4)
    training = TrainingConfig(frozenset(p.graph.params), budget_bytes=cluster.device.usable_bytes)
    whole = plan_graph(p.graph, MESH, cluster, training, test_planned.LIMITS)
    memory = None
    if tight:  # some layers keep, others make again
        memory = 0.8 * max(whole.solution.price.row_bytes)
        whole = plan_graph(p.graph, MESH, cluster, dataclasses.replace(training, budget_bytes=memory), test_planned.LIMITS)
    tiled = offline.plan(p.model, inputs, cluster, MESH, memory=memory, options={"seconds": 300})
    assert len(tiled.ops) < len(p.graph.ops) and str(tiled.solver["capture"]).startswith("folded from captures")
    found = refit(Plan.loads(dumps(tiled)), p.graph)
    assert list(found.ops) == [op.name for op in p.graph.ops] and found.params.keys() == p.graph.params.keys()
    assert decided(found) == decided(whole.plan)
    monkeypatch.setattr(test_planned, "captured", lambda name, *more: (p, inputs))
    test_planned.check(name, MESH, types.SimpleNamespace(plan=found))  # type: ignore[arg-type]
