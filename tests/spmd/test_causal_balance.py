"""Queries of causal attention that are split: a stretch a rank, or blocks that are dealt out; each equals one device, and plans deal out blocks where that is balance.

python -m tests.spmd.test_causal_balance --model qwen3 --mesh dp=2,tp=2 --blocks 4
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.cost.compute import is_causal
from autopar.graph.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.planner.formulation import causal_balance
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.layout import Layout
from autopar.planner.planning import plan_graph
from autopar.planner.propagate import propagate
from autopar.rules import lookup
from autopar.solver.solve import Limits
from tests.models import ZOO
from tests.spmd.simulate import Prepared, fake_world, one_device, prepare, simulated
from tests.spmd.test_planned import cluster
from tests.wide import cases


def prepared(name: str, batch: int, seq: int) -> tuple[Prepared, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    zoo = ZOO[name]
    inputs = zoo.inputs(batch, seq)
    return prepare(zoo.build(2).train(), inputs, zoo.compile.get("loss_fn")), inputs


def split_evenly(plan: Plan, blocks: int, queries: int) -> Plan:
    """`plan` with all axes on the queries of attention, within each of so many blocks."""
    ops = dict(plan.ops)
    for name, op in plan.ops.items():
        if op.kind == "attention":
            left, strategy = queries // blocks, {}
            for a in plan.mesh.axes:
                left //= a.size
                strategy[a.name] = ("q", left)
            ops[name] = replace(op, strategy=strategy, partial={})
    return replace(plan, ops=ops)


def check(name: str, p: Prepared, inputs: dict[str, torch.Tensor], axes: Mapping[str, int], plan: Plan) -> None:
    """Loss and every gradient."""
    model = p.model
    with fake_world(plan.mesh.size):
        outputs, grads, _ = simulated(p, dict(axes), plan).run(
            dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers()), p.tensors, (3, 0)
        )
    model.zero_grad()
    loss = one_device(model, inputs, (3, 0), ZOO[name].compile.get("loss_fn"))
    loss.backward()
    assert math.isclose(float(outputs[0]), float(loss.detach()), rel_tol=1e-5)
    params = dict(model.named_parameters(remove_duplicate=False))
    whole = math.sqrt(sum(float(q.grad.double().norm()) ** 2 for q in model.parameters() if q.grad is not None))
    for n, g in grads.items():
        want = params[n].grad
        assert want is not None and float((g - want).double().norm()) <= 1e-5 * float(want.double().norm()) + 1e-7 * whole, n


CASES = [
    (name, axes, blocks)
    for name in ("llama", "gpt2", "qwen3", "gemma3")
    for axes, blocks in (({"a": 4}, 1), ({"a": 2}, 2), ({"a": 4}, 4), ({"dp": 2, "tp": 2}, 4))
]


@pytest.mark.parametrize(("name", "axes", "blocks"), cases(CASES, [CASES[0], CASES[10], CASES[7]]), ids=str)
def test_equals_one_device(name: str, axes: dict[str, int], blocks: int) -> None:
    run(name, axes, blocks, batch=1, seq=32)


def run(name: str, axes: dict[str, int], blocks: int, batch: int, seq: int) -> None:
    p, inputs = prepared(name, batch, seq)
    trainable = frozenset(n for n, q in p.model.named_parameters() if q.requires_grad)
    plan = propagate(p.graph, Layout.of("ddp" if batch > 1 else "tp", Mesh.of(axes)), axes, trainable)
    check(name, p, inputs, axes, split_evenly(plan, blocks, seq))


def test_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks than heads, one sample: queries are split within blocks, all through the model, and the plan is faster than one of stretches."""
    p, inputs = prepared("llama", 1, 256)
    axes = {"a": 8}
    trainable = frozenset(n for n, q in p.model.named_parameters() if q.requires_grad)

    def planned() -> Any:
        return plan_graph(p.graph, axes, cluster(8), TrainingConfig(trainable), Limits(0.01, 60))

    stretches = planned()
    monkeypatch.setattr(causal_balance, "ROWS", 2)
    monkeypatch.setattr(causal_balance, "SHARE", 0.0)
    blocks = planned()
    attention = [op for op in p.graph.ops if lookup(op).kind == "attention"]
    assert attention and all(map(is_causal, attention))
    for op in attention:
        strides = [stride for x, stride in blocks.plan.ops[op.name].strategy.values() if x == "q"]
        assert strides and max(strides) * 2 <= 256 // 8, strides
    assert blocks.plan.predicted["step_time_s"] < stretches.plan.predicted["step_time_s"]
    check("llama", p, inputs, axes, blocks.plan)


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__)
    a.add_argument("--model", default="llama", choices=list(ZOO))
    a.add_argument("--mesh", default="dp=2,tp=2")
    a.add_argument("--blocks", type=int, default=4)
    a.add_argument("--batch", type=int, default=1)
    a.add_argument("--seq", type=int, default=32)
    o = a.parse_args()
    run(o.model, {k: int(v) for k, v in (x.split("=") for x in o.mesh.split(","))}, o.blocks, o.batch, o.seq)
    print("equal")


if __name__ == "__main__":
    main()
