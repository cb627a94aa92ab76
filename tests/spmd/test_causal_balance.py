"""Queries of causal attention that are split: a stretch a rank, or blocks that are dealt out; each equals one device, and plans deal out blocks where that is balance.

python -m tests.spmd.test_causal_balance --model qwen3 --mesh dp=2,tp=2 --blocks 4 --letters s
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.cost import Cost
from autopar.cost.compute import is_causal
from autopar.graph.graph import Graph
from autopar.graph.mesh import Mesh
from autopar.passes.manager import overlap
from autopar.plan.plan import Plan
from autopar.planner.formulation import causal_balance
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.layout import Layout
from autopar.planner.planning import plan_graph
from autopar.planner.propagate import propagate
from autopar.rules import lookup
from autopar.rules.attention import bounds
from autopar.simulate.price import price
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


def split_evenly(plan: Plan, graph: Graph, blocks: int, letters: str = "q") -> Plan:
    """`plan` with all axes on the queries of attention (q), or on its keys beside them (s; where these stay together, q), within each of so many blocks; two
    letters: of the first axis, and of the others."""
    ops = dict(plan.ops)
    made: set[str] = set()  # what is no sum any more where keys are split
    for g in graph.ops:
        name, op = g.name, ops[g.name]
        if op.partial and made & {t.name for t in g.inputs}:
            ops[name] = replace(op, partial={})
            made |= {t.name for t in g.outputs if t is not None}
        if op.kind == "attention":
            made |= {t.name for t in g.outputs if t is not None}
            left, strategy = lookup(g).factors["q"].size // blocks, {}
            for i, a in enumerate(plan.mesh.axes):
                left //= a.size
                letter = letters[min(i, len(letters) - 1)]
                strategy[a.name] = (letter if letter == "q" or lookup(g).alongside else "q", left)
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
    (name, axes, blocks, letters)
    for letters in ("q", "s", "sq", "qs")
    for name in ("llama", "gpt2-attention", "qwen3", "gemma3", "bert-attention", "t5-attention")
    for axes, blocks in (({"a": 4}, 1), ({"a": 2}, 2), ({"a": 4}, 4), ({"dp": 2, "tp": 2}, 4))
    if len(letters) == 1 or len(axes) == 2
]
QUICK = [
    ("llama", {"a": 4}, 1, "q"),
    ("qwen3", {"a": 4}, 4, "q"),
    ("gpt2-attention", {"dp": 2, "tp": 2}, 4, "q"),
    ("llama", {"a": 4}, 1, "s"),
    ("qwen3", {"dp": 2, "tp": 2}, 4, "s"),
    ("llama", {"dp": 2, "tp": 2}, 4, "sq"),
    ("llama", {"dp": 2, "tp": 2}, 4, "qs"),
    ("gemma3", {"dp": 2, "tp": 2}, 4, "s"),
    ("t5-attention", {"a": 4}, 1, "s"),
]


@pytest.mark.parametrize(("name", "axes", "blocks", "letters"), cases(CASES, QUICK), ids=str)
def test_equals_one_device(name: str, axes: dict[str, int], blocks: int, letters: str) -> None:
    run(name, axes, blocks, letters, batch=1, seq=32)


@pytest.mark.parametrize("letters", ["q", "s"])
def test_runs_again_in_backward(letters: str) -> None:
    run("llama", {"dp": 2, "tp": 2}, 2, letters, batch=1, seq=32, again=True)


def run(name: str, axes: dict[str, int], blocks: int, letters: str, batch: int, seq: int, again: bool = False) -> None:
    p, inputs = prepared(name, batch, seq)
    trainable = frozenset(n for n, q in p.model.named_parameters() if q.requires_grad)
    plan = propagate(p.graph, Layout.of("ddp" if batch > 1 else "tp", Mesh.of(axes)), axes, trainable)
    plan = split_evenly(plan, p.graph, blocks, letters)
    if again:  # products and attention
        heavy = {op.name for op in p.graph.ops if op.direction == "forward" and lookup(op).kind in ("matmul", "attention")}
        plan = replace(plan, recompute=frozenset(heavy))
    check(name, p, inputs, axes, plan)


def test_a_bias_that_is_trained_goes_round_no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5's bias of positions, in the first layer of each stack, is every layer's; BERT's mask is not trained."""
    monkeypatch.setattr(causal_balance, "ROWS", 2)
    monkeypatch.setattr(causal_balance, "SHARE", 0.0)
    for name, some in (("t5-attention", False), ("bert-attention", True)):
        p, _ = prepared(name, 1, 32)
        found = causal_balance.in_rings(p.graph, {op.name: lookup(op) for op in p.graph.ops}, Mesh.of({"a": 4}))
        assert bool(found) == some, (name, found)


def test_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks than heads, one sample: queries are split within blocks, with keys beside them or not, all through the model, and the plan is faster than one of stretches."""
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
        strides = [stride for x, stride in blocks.plan.ops[op.name].strategy.values() if x in ("q", "s")]
        assert strides and max(strides) * 2 <= 256 // 8, strides
    assert blocks.plan.predicted["step_time_s"] < stretches.plan.predicted["step_time_s"]
    check("llama", p, inputs, axes, blocks.plan)
    assert any(x == "s" for op in attention for x, _ in blocks.plan.ops[op.name].strategy.values())  # here the ring hides
    with fake_world(8):
        parts = overlap(simulated(p, axes, blocks.plan).parts, "sim")
    cost = Cost.compiled(cluster(8), Mesh.of(axes), p.graph, {op.name: lookup(op) for op in p.graph.ops})
    got = price(parts, blocks.plan, p.graph, cost, TrainingConfig(trainable), "sim")
    assert math.isclose(got.step_time_s, blocks.plan.predicted["step_time_s"], rel_tol=1e-6), got


def test_planned_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a window go round, as far as it reaches; the program and the simulator agree on what that takes."""
    monkeypatch.setattr(causal_balance, "ROWS", 2)
    monkeypatch.setattr(causal_balance, "SHARE", 0.0)
    p, inputs = prepared("gemma3", 1, 256)
    axes = {"a": 8}
    trainable = frozenset(n for n, q in p.model.named_parameters() if q.requires_grad)
    plan = plan_graph(p.graph, axes, cluster(8), TrainingConfig(trainable), Limits(0.01, 60)).plan
    attention = [op for op in p.graph.ops if lookup(op).kind == "attention"]
    assert attention and all(bounds(op) == (5, 0) and {x for x, _ in plan.ops[op.name].strategy.values()} == {"s"} for op in attention)
    check("gemma3", p, inputs, axes, plan)
    with fake_world(8):
        parts = overlap(simulated(p, axes, plan).parts, "sim")
    rings = [n for n in parts.forward.graph.nodes if "ring_attention" in str(n.target)]
    assert len(rings) == len(attention) // 2 and all(n.args[12] == [0, 1] for n in rings)
    cost = Cost.compiled(cluster(8), Mesh.of(axes), p.graph, {op.name: lookup(op) for op in p.graph.ops})
    got = price(parts, plan, p.graph, cost, TrainingConfig(trainable), "sim")
    assert math.isclose(got.step_time_s, plan.predicted["step_time_s"], rel_tol=1e-6), got
    assert sum(c.count for (_, serves, kind), c in got.collectives.items() if kind in ("ring", "jump")) == len(rings) * 3, got


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__)
    a.add_argument("--model", default="llama", choices=list(ZOO))
    a.add_argument("--mesh", default="dp=2,tp=2")
    a.add_argument("--blocks", type=int, default=4)
    a.add_argument("--batch", type=int, default=1)
    a.add_argument("--seq", type=int, default=32)
    a.add_argument(
        "--letters", default="q", help="q: queries; s: keys beside them, which go round; two: of the first axis, and of the others"
    )
    o = a.parse_args()
    run(o.model, {k: int(v) for k, v in (x.split("=") for x in o.mesh.split(","))}, o.blocks, o.letters, o.batch, o.seq)
    print("equal")


if __name__ == "__main__":
    main()
