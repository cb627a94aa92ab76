"""Parameters that are gathered once, in forward, and stay until backward has read them (ZeRO-2), where the plan finds memory for that: executed on simulated ranks."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.graph.calls import is_collective
from autopar.passes.overlap import inputs_of, is_ahead, mark
from autopar.plan.plan import Plan
from autopar.plan.schema import dumps
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.layout import Layout
from autopar.planner.planning import Planned, plan_graph
from autopar.solver.solve import Limits
from tests.models import ZOO
from tests.spmd.simulate import Prepared, Simulated, fake_world, one_device, prepare, simulated
from tests.spmd.test_models import assert_equal_gradients
from tests.spmd.test_planned import LINKS
from tests.wide import cases

SEED = (3, 0)
MESH = {"dp": 4}


def captured(name: str) -> tuple[Prepared, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    zoo = ZOO[name]
    inputs = zoo.inputs(16, 32)
    return prepare(zoo.build(2).train(), inputs, zoo.compile.get("loss_fn")), inputs


def planned(p: Prepared, budget_bytes: float = float("inf"), layout: Layout | str | None = None, micro_batches: int = 1) -> Planned:
    trainable = frozenset(n for n, q in p.model.named_parameters() if q.requires_grad)
    # Links so slow that work is not split for nothing, and gathers are what a step waits for.
    where = LINKS["even"](4)
    link = where.intra.model_copy(update={"bandwidth_Bps": where.intra.bandwidth_Bps / 50})
    where = where.model_copy(update={"intra": link})
    training = TrainingConfig(trainable, budget_bytes=budget_bytes, micro_batches=micro_batches, in_a_row=micro_batches)
    return plan_graph(p.graph, MESH, where, training, Limits(0.01, 60), layout=layout)


def gathers(sim: Simulated, half: str) -> int:
    gm = mark(getattr(sim.parts, half), inputs_of(sim.parts, half == "backward"))
    return sum(is_collective(n) and is_ahead(n) for n in gm.graph.nodes)


SHARDED = Layout(data=("dp",), shard=("dp",), reshard_after_forward=False)


@pytest.mark.parametrize("name", cases(["toy", "llama", "gpt2", "t5", "mixtral"], ["toy"]))
def test_once_or_twice(name: str) -> None:
    """Sharded over four, with plenty of memory: what is kept is gathered in forward alone, and it is one device's step; where a layout has it gathered again, each is in both halves;
    and it is again where memory does not suffice. A plan's file says so."""
    p, inputs = captured(name)
    once, twice = planned(p, layout=SHARDED), planned(p, layout="fsdp")
    assert once.plan.predicted["step_time_s"] <= twice.plan.predicted["step_time_s"] * 1.001
    stays = once.plan.gathered_once
    assert stays and not twice.plan.gathered_once
    assert Plan.loads(dumps(once.plan)).gathered_once == stays
    assert "gathered once" in str(once.plan) and "gathered once" not in str(twice.plan)
    assert "gathered again in backward -> gathered once" in twice.plan.diff(once.plan)
    counts = []
    for plan in (once.plan, twice.plan):
        with fake_world(4):
            sim = simulated(p, MESH, plan)
            counts.append((gathers(sim, "forward"), gathers(sim, "backward")))
            outputs, grads, _ = sim.run(dict(p.model.named_parameters()), dict(p.model.named_buffers()), p.tensors, SEED)
        model = copy.deepcopy(p.model)
        loss = one_device(model, inputs, SEED)
        loss.backward()
        torch.testing.assert_close(outputs[0], loss.detach(), rtol=2e-6, atol=2e-6)
        assert_equal_gradients(model, grads, False)
    assert counts[0][0] == counts[1][0] and counts[0][1] < counts[1][1], counts
    # With less memory than that takes there is a plan, too, which gathers some of them again.
    most = max(once.solution.price.row_bytes)
    least = max(twice.solution.price.row_bytes)
    short = planned(p, 0.5 * (most + least), SHARDED) if least < 0.95 * most else None
    assert short is None or (
        len(short.plan.gathered_once) < len(stays) and max(short.solution.price.row_bytes) <= 0.5 * (most + least) * 1.00001
    )


@pytest.mark.parametrize("name", cases(["toy", "llama", "gpt2", "t5", "mixtral", "bert", "lora"], ["toy", "gpt2"]))
def test_once_a_call(name: str) -> None:
    """What the first of four micro-batches gathers stays for the others, with plenty of memory: those gather nothing, and are one device's steps. With less memory some of it is gathered
    each time."""
    p, inputs = captured(name)
    each, once = planned(p, layout=SHARDED), planned(p, layout=SHARDED, micro_batches=4)
    plan = replace(once.plan, micro_batches=4)
    stays = plan.gathered_once_a_call
    assert stays and not each.plan.gathered_once_a_call and stays <= plan.gathered_once
    assert once.plan.predicted["step_time_s"] < each.plan.predicted["step_time_s"]
    assert Plan.loads(dumps(plan)).gathered_once_a_call == stays and not once.plan.gathered_once_a_call
    assert "gathered once a call" in str(plan) and "gathered once -> gathered once a call" in each.plan.diff(plan)
    with fake_world(4):
        sim = simulated(p, MESH, plan)
        assert sim.parts.later is not None
        gm = mark(sim.parts.later.forward, inputs_of(sim.parts.later, False))
        assert gathers(sim, "forward") > sum(is_collective(n) and is_ahead(n) for n in gm.graph.nodes) == 0
        held: list[Any] = []
        for i in range(3):
            tensors = tuple(t.roll(i, 0) for t in p.tensors)
            outputs, grads, _ = sim.run(dict(p.model.named_parameters()), dict(p.model.named_buffers()), tensors, (3, i), held)
            assert held
            model = copy.deepcopy(p.model)
            loss = one_device(model, {k: t.roll(i, 0) for k, t in inputs.items()}, (3, i))
            loss.backward()
            torch.testing.assert_close(outputs[0], loss.detach(), rtol=2e-6, atol=2e-6)
            assert_equal_gradients(model, grads, False)
    most, least = max(once.solution.price.row_bytes), max(each.solution.price.row_bytes)
    short = planned(p, 0.5 * (most + least), SHARDED, 4) if least < 0.9 * most else None
    assert short is None or max(short.solution.price.row_bytes) <= 0.5 * (most + least) * 1.00001


def test_a_plan_chooses_it() -> None:
    """Free to choose, and no slower than as FSDP with either."""
    p, _ = captured("toy")
    free = planned(p).plan
    assert all(free.predicted["step_time_s"] <= planned(p, layout=x).plan.predicted["step_time_s"] * 1.01 for x in ("fsdp", "ddp", SHARDED))
