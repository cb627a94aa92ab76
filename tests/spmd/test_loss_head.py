"""Models whose head makes no logits, on simulated ranks, equal one device's eager run with all of them: loss, every gradient, which gradients are None.

python -m tests.spmd.test_loss_head --model gemma2 --mesh dp=2,tp=2 --split tv
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from autopar.capture.fusions import log_prob
from autopar.graph.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.planner.layout import Layout
from autopar.planner.propagate import propagate
from autopar.rules import lookup
from autopar.rules.loss_head import BACKWARD, FORWARD
from autopar.rules.strategy import is_legal
from tests.heads import HEADS, NO_HEADS
from tests.spmd.simulate import Prepared, fake_world, one_device, prepare, simulated
from tests.wide import cases

HOW_MANY = {"twice": 2}


def forced(p: Prepared, plan: Plan, split: str) -> Plan:
    """`plan` with every axis of the mesh on tokens (t) or words (v) of the head; two letters: the first axis on one, the others on the other."""
    ops = dict(plan.ops)
    made = {t.name for op in p.graph.ops if op.target == BACKWARD for t in op.outputs if t is not None}
    for op in p.graph.ops:
        if ops[op.name].partial and made & {t.name for t in op.inputs}:
            # It goes on with a sum that is not made yet, which another split of the head has made.
            ops[op.name] = replace(ops[op.name], partial={})
            made |= {t.name for t in op.outputs if t is not None}
        if op.target in (FORWARD, BACKWARD):
            rule = lookup(op)
            left = {x: f.size for x, f in rule.factors.items()}
            strategy: dict[str, tuple[str, int]] = {}
            for i, a in enumerate(a for a in plan.mesh.axes if a.size > 1):
                letter = split[min(i, len(split) - 1)]
                left[letter] //= a.size
                strategy[a.name] = (letter, left[letter])
            assert is_legal(rule, strategy, plan.mesh), op.name
            ops[op.name] = replace(ops[op.name], strategy=strategy, partial={})
    return replace(plan, ops=ops)


def check(name: str, axes: Mapping[str, int], split: str, batch: int = 8, seq: int = 16, heads: int | None = None) -> None:
    torch.manual_seed(0)
    model, given, loss_fn = {**HEADS, **NO_HEADS}[name](batch, seq)
    model.train()
    p = prepare(copy.deepcopy(model), dict(given), loss_fn, fuses=True)
    expected = HOW_MANY.get(name, 1) if heads is None else heads
    assert [sum(op.target == half for op in p.graph.ops) for half in (FORWARD, BACKWARD)] == [expected, expected]
    mesh = Mesh.of(dict(axes))
    trainable = frozenset(n for n, q in model.named_parameters() if q.requires_grad)
    layout = split if split in ("ddp", "fsdp", "tp", "fsdp+tp") else "fsdp"
    plan = propagate(p.graph, Layout.of(layout, mesh), dict(axes), trainable)
    if layout != split:
        plan = forced(p, plan, split)
    with fake_world(mesh.size):
        outputs, grads, _ = simulated(p, dict(axes), plan).run(
            dict(p.model.named_parameters()), dict(p.model.named_buffers()), p.tensors, (3, 0)
        )
    loss = one_device(model, given, (3, 0), loss_fn)
    loss.backward()
    assert math.isclose(float(outputs[0]), float(loss.detach()), rel_tol=2e-6)
    want = {n: q.grad for n, q in model.named_parameters()}
    assert {n for n, g in want.items() if g is None} == {n for n in want if n not in grads}
    whole = math.sqrt(sum(float(g.norm()) ** 2 for g in want.values() if g is not None))
    for n, g in want.items():
        if g is not None:
            assert float((grads[n] - g).norm()) <= 1e-5 * float(g.norm()) + 1e-7 * whole, n


@pytest.fixture(params=["one tile", "tiles"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "tiles":
        monkeypatch.setattr(log_prob, "TILE", 200)  # 16 x 12 of 128 x 96


HUGGING_FACE = ("llama", "gpt2", "gemma2", "granite", "bert", "t5", "mixtral", "lora")
ORDINARY = [n for n in HEADS if n not in HUGGING_FACE]
ONE = {"a": 1}
SPLITS: list[tuple[dict[str, int], str]] = [
    (ONE, "ddp"), ({"a": 2}, "t"), ({"a": 2}, "v"), ({"a": 4}, "v"), ({"dp": 2, "tp": 2}, "tv"), ({"dp": 2, "tp": 2}, "vt"), ({"a": 2}, "fsdp"),
    ({"a": 4}, "tp"), ({"dp": 2, "tp": 2}, "fsdp+tp"),
]  # fmt: skip
NOW = [("gpt2", {"dp": 2, "tp": 2}, "tv"), ("gemma2", {"a": 4}, "v"), ("bert", {"dp": 2, "tp": 2}, "fsdp+tp"), ("llama", ONE, "ddp")]


BOTH = ({"dp": 2, "tp": 2}, "tv")
LAYERS = [(n, *s) for n, s in product(ORDINARY, [(ONE, "ddp"), ({"a": 4}, "v"), BOTH])]


@pytest.mark.parametrize(("name", "axes", "split"), cases(LAYERS, [(n, *BOTH) for n in ORDINARY]), ids=str)
def test_a_layer_and_its_loss(name: str, axes: dict[str, int], split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_prob, "TILE", 200)
    check(name, axes, split)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize(("name", "axes", "split"), cases([(n, *s) for n, s in product(HUGGING_FACE, SPLITS)], NOW), ids=str)
def test_a_model_equals_one_device(name: str, axes: dict[str, int], split: str) -> None:
    check(name, axes, split)


@pytest.mark.parametrize("name", NO_HEADS)
def test_other_losses_are_left_as_they_are(name: str) -> None:
    check(name, {"a": 2}, "fsdp", heads=0)


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__)
    a.add_argument("--model", default="llama", choices=list(HEADS))
    a.add_argument("--mesh", default="dp=2,tp=2")
    a.add_argument("--split", default="tv")
    a.add_argument("--batch", type=int, default=8)
    a.add_argument("--seq", type=int, default=16)
    o: Any = a.parse_args()
    check(o.model, {k: int(v) for k, v in (x.split("=") for x in o.mesh.split(","))}, o.split, o.batch, o.seq)
    print("equal")


if __name__ == "__main__":
    main()
