"""Every model of the zoo on every mesh and layout, on simulated ranks: loss, every gradient, which gradients are None, and 20 AdamW steps
equal the one-device eager run (its random ops replaced by ours). To try another model, shape or mesh:

    python -m tests.spmd.test_models --model llama --mesh dp=2,tp=4 --layout fsdp+tp --batch 8 --seq 32 [--steps 20]
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture.capture import off_cache
from autopar.graph.mesh import Mesh
from tests.models import ZOO
from tests.spmd.simulate import Prepared, fake_world, one_device, prepare, simulated
from tests.wide import cases

MESHES = [{"dp": 4}, {"dp": 2, "tp": 2}, {"a": 2, "b": 2, "tp": 2}]
LAYOUTS = ["ddp", "fsdp", "tp", "fsdp+tp"]
HEAVY = ("matmul", "attention", "conv", "norm", "embedding", "loss")
# Hugging Face casts to float32 inside these models (norms, softmax, loss), so float64 parameters do not give float64 gradients.
FLOAT64 = ("bert", "bert-attention", "vit", "convnet")


@functools.cache
def prepared(name: str, batch: int = 8, seq: int = 16, layers: int = 2, double: bool = False) -> tuple[Prepared, dict[str, Any]]:
    torch.manual_seed(0)
    zoo = ZOO[name]
    model = zoo.build(layers).train()
    kwargs = zoo.inputs(batch, seq)
    if double:
        model = model.double()
        kwargs = {k: v.double() if v.is_floating_point() else v for k, v in kwargs.items()}
    kwargs = off_cache(model, kwargs)
    return prepare(model, kwargs, zoo.compile.get("loss_fn")), kwargs


def assert_equal_gradients(model: nn.Module, grads: dict[str, torch.Tensor], double: bool) -> None:
    """DESIGN section 5: float64 to 1e-9 of the largest gradient; float32 1e-5 |g| + 1e-7 |all g| in norm."""
    want = {n: p.grad for n, p in model.named_parameters()}
    assert {n for n, g in want.items() if g is None} == {n for n in want if n not in grads}, "other gradients are None than on one device"
    real = {n: g for n, g in want.items() if g is not None}
    largest = max(float(g.abs().max()) for g in real.values())
    total = math.sqrt(sum(float(g.double().norm()) ** 2 for g in real.values()))
    wrong = {}
    for n, g in real.items():
        d = (grads[n] - g).double()
        bad = float(d.abs().max()) > 1e-9 * largest if double else float(d.norm()) > 1e-5 * float(g.double().norm()) + 1e-7 * total
        if bad:
            wrong[n] = (float(d.abs().max()), float(g.abs().max()))
    assert not wrong, f"(error, largest) of {len(wrong)} of {len(real)} gradients: {wrong}"


def check(
    name: str, mesh: dict[str, int], layout: str, *, batch: int = 8, seq: int = 16, layers: int = 2, steps: int = 0, double: bool = False
):
    """One step's loss and gradients, then `steps` AdamW steps, against one device. Returns the plan."""
    p, kwargs = prepared(name, batch, seq, layers, double)
    loss_fn = ZOO[name].compile.get("loss_fn")
    model = copy.deepcopy(p.model)
    with fake_world(Mesh.of(mesh).size):
        sim = simulated(p, mesh, layout)
        params, buffers = dict(copy.deepcopy(model).named_parameters()), {n: b.clone() for n, b in model.named_buffers()}
        ours = torch.optim.AdamW([q for q in params.values() if q.requires_grad], lr=1e-2)
        theirs = torch.optim.AdamW([q for q in model.parameters() if q.requires_grad], lr=1e-2)
        for i in range(max(steps, 1)):
            outputs, grads, updates = sim.run(params, buffers, p.tensors, (7, i))
            loss = one_device(model, kwargs, (7, i), loss_fn)
            loss.backward()
            tolerance = 1e-9 if double else 2e-6 if i == 0 else 2e-4
            torch.testing.assert_close(outputs[0].double(), loss.detach().double(), rtol=tolerance, atol=tolerance)
            if i == 0:
                assert_equal_gradients(model, grads, double)
            for n, b in model.named_buffers():
                if n in updates:
                    torch.testing.assert_close(updates[n], b, rtol=1e-5, atol=1e-6)
                    buffers[n] = updates[n]
            for n, q in params.items():
                q.grad = grads.get(n)
            for o in (ours, theirs):
                o.step()
                o.zero_grad()
    return sim.plan


def id_of(x: object) -> str:
    return "x".join(map(str, x.values())) if isinstance(x, dict) else str(x)


# Every model under every layout, on a mesh that is another for each; in all combinations by name, as above.
TO_BE_SURE = [(name, MESHES[1], layout) for name, layout in product(ZOO, LAYOUTS) if layout == "fsdp+tp" or name == "llama"]
# Whose operators other models have.
LIKE_OTHERS = ("bert", "t5-attention")
NOW = [s for s in TO_BE_SURE if s[0] not in LIKE_OTHERS]
TURNS = [(name, MESHES[(i + j) % 3], layout) for (i, name), (j, layout) in product(enumerate(ZOO), enumerate(LAYOUTS))]
STEPS = TO_BE_SURE + [s for s in TURNS if s not in TO_BE_SURE]


@pytest.mark.parametrize(("name", "mesh", "layout"), cases(STEPS, NOW), ids=id_of)
def test_step_equals_one_device(name: str, mesh: dict[str, int], layout: str) -> None:
    plan = check(name, mesh, layout, double=name in FLOAT64)
    assert not {t: n for t, n in plan.fallbacks.items() if any(plan.ops[o].kind in HEAVY for o in plan.ops if plan.targets[o] == t)}
    assert not plan.fallbacks, f"ops without a rule: {plan.fallbacks}"
    if layout in ("ddp", "fsdp"):
        # A lookup of positions has no batch: every rank does it.
        repeated = {o for o in plan.repeated if plan.ops[o].kind != "embedding"}
        assert not repeated, f"work repeated: {repeated}"


@pytest.mark.parametrize("name", cases(ZOO, ["gpt2"]))
def test_twenty_steps(name: str) -> None:
    i = list(ZOO).index(name)
    check(name, MESHES[i % 3], LAYOUTS[(i + i // 4) % 4], steps=20, double=name in FLOAT64)


ODD_MESHES = [{"a": 8}, {"a": 3}, {"a": 3, "tp": 2}]
ODD_SURE = [("llama", mesh, "fsdp+tp") for mesh in ODD_MESHES]
ODD_TURNS = [
    (name, ODD_MESHES[(i + j) % 3], layout) for (i, name), (j, layout) in product(enumerate(["gpt2", "llama", "bert"]), enumerate(LAYOUTS))
]
ODD = ODD_SURE + [o for o in ODD_TURNS if o not in ODD_SURE]


@pytest.mark.parametrize(("name", "mesh", "layout"), cases(ODD, ODD_SURE), ids=id_of)
def test_sizes_that_do_not_divide(name: str, mesh: dict[str, int], layout: str) -> None:
    """Four heads and two key/value heads on 8 ranks, batches and vocabularies that 3 does not divide."""
    check(name, mesh, layout, batch=4, double=name in FLOAT64)


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__)
    a.add_argument("--model", default="llama", choices=list(ZOO))
    a.add_argument("--mesh", default="dp=2,tp=2")
    a.add_argument("--layout", default="fsdp+tp")
    a.add_argument("--batch", type=int, default=8)
    a.add_argument("--seq", type=int, default=16)
    a.add_argument("--layers", type=int, default=2)
    a.add_argument("--steps", type=int, default=1)
    a.add_argument("--double", action="store_true")
    o = a.parse_args()
    mesh = {k: int(v) for k, v in (x.split("=") for x in o.mesh.split(","))}
    plan = check(o.model, mesh, o.layout, batch=o.batch, seq=o.seq, layers=o.layers, steps=o.steps, double=o.double)
    print(plan)
    print("equal to one device")


if __name__ == "__main__":
    main()
