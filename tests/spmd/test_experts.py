"""Mixtures of experts on simulated ranks equal one device: loss with the auxiliary one, every gradient; as hand layouts place them, and with experts
split by tokens, by features and expert by expert.

    python -m tests.spmd.test_experts --model gpt_oss --mesh dp=2,tp=2 --split p --skewed one
"""

from __future__ import annotations

import argparse
import copy
import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from autopar.graph.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.planner.layout import NAMES, Layout
from autopar.planner.propagate import propagate
from autopar.rules import lookup
from autopar.rules.experts import BACKWARD, FORWARD
from autopar.rules.strategy import Strategy, is_legal
from tests.experts import FAMILIES, LAYERS, build, inputs, skewed
from tests.spmd.simulate import Prepared, fake_world, one_device, prepare, simulated
from tests.wide import cases


def forced(p: Prepared, plan: Plan, split: str) -> Plan:
    """`plan` with every axis of the mesh on tokens (t), features (f) or experts (p); two letters: the first axis on one, the others on the other."""
    mesh = plan.mesh
    ops = dict(plan.ops)
    for op in p.graph.ops:
        if op.target in (FORWARD, BACKWARD):
            rule, left, strategy = lookup(op), {x: f.size for x, f in lookup(op).factors.items()}, dict[str, tuple[str, int]]()
            experts = list(rule.pairs)
            for i, a in enumerate(a for a in mesh.axes if a.size > 1):
                letter = split[min(i, len(split) - 1)]
                of = "t" if letter == "p" else letter
                left[of] //= a.size
                strategy[a.name] = (experts.pop(0) if letter == "p" else letter, left[of])
            given: Strategy = strategy
            assert is_legal(rule, given, mesh), (op.name, given)
            ops[op.name] = replace(ops[op.name], strategy=strategy, partial={})
    return replace(plan, ops=ops)


def check(name: str, axes: dict[str, int], split: str, how: str = "", batch: int = 8, seq: int = 16, **kw: Any) -> None:
    model = build(name, "eager", **kw).double()  # where the model does not round to single precision by itself
    if how:
        skewed(model, how)
    given = inputs(batch, seq)
    p = prepare(copy.deepcopy(model), given)
    assert sum(op.target == FORWARD for op in p.graph.ops) == LAYERS.get(name, 2)
    mesh = Mesh.of(axes)
    trainable = frozenset(n for n, q in model.named_parameters() if q.requires_grad)
    layout = split if split in NAMES else "fsdp"
    plan = propagate(p.graph, Layout.of(layout, mesh), axes, trainable)
    if layout != split:
        plan = forced(p, plan, split)
    with fake_world(mesh.size):
        outputs, grads, _ = simulated(p, axes, plan).run(dict(p.model.named_parameters()), dict(p.model.named_buffers()), p.tensors, (3, 0))
    loss = one_device(model, given, (3, 0))
    loss.backward()
    assert math.isclose(float(outputs[0]), float(loss.detach()), rel_tol=2e-6)
    whole = math.sqrt(sum(float(q.grad.norm()) ** 2 for q in model.parameters() if q.grad is not None))
    for n, q in model.named_parameters():
        if q.grad is not None:
            assert float((grads[n] - q.grad).norm()) <= 1e-5 * float(q.grad.norm()) + 1e-7 * whole, n


MESHES = [{"a": 4}, {"a": 2, "tp": 2}, {"a": 2, "b": 2, "tp": 2}]
EVERY = [
    (name, mesh, split)
    for name, mesh in product(FAMILIES, MESHES[:2])
    for split in (["p", "t", "f"] if len(mesh) == 1 else ["pt", "pf", "tf"])
]
NOW = [("gpt_oss", MESHES[1], "pf"), ("deepseek_v3", MESHES[0], "p"), ("mixtral", MESHES[1], "pt"), ("olmoe", MESHES[0], "f")]


@pytest.mark.parametrize(("name", "mesh", "split"), cases(EVERY, NOW), ids=str)
def test_every_factor(name: str, mesh: dict[str, int], split: str) -> None:
    check(name, mesh, split)


@pytest.mark.parametrize(
    ("name", "split"),
    cases(product(FAMILIES, ["fsdp", "tp", "fsdp+tp", "fsdp+ep"]), [("qwen3_moe", "fsdp"), ("gpt_oss", "tp"), ("gpt_oss", "fsdp+ep")]),
)
def test_hand_layouts(name: str, split: str) -> None:
    check(name, MESHES[1] if "+" in split else MESHES[0], split)


@pytest.mark.parametrize("how", ["one", "none"])
def test_all_tokens_to_some_experts(how: str) -> None:
    check("gpt_oss", {"a": 4}, "p", how)


@pytest.mark.parametrize("name", cases(FAMILIES, ["mixtral"]))
def test_three_axes(name: str) -> None:
    check(name, MESHES[2], "ptf", batch=16)


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--model", default="mixtral", choices=list(FAMILIES))
    a.add_argument("--mesh", default="dp=2,tp=2")
    a.add_argument("--split", default="p", help="p, t or f, one for each axis; or a hand layout")
    a.add_argument("--skewed", default="", choices=["", "one", "none"], help="of gpt_oss")
    a.add_argument("--batch", type=int, default=8)
    a.add_argument("--seq", type=int, default=16)
    o = a.parse_args()
    check(o.model, {k: int(v) for k, v in (x.split("=") for x in o.mesh.split(","))}, o.split, o.skewed, o.batch, o.seq)
    print("equal")


if __name__ == "__main__":
    main()
