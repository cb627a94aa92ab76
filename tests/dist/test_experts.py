"""Mixtures of experts on gloo processes: planned, or by a hand layout, 20 AdamW steps equal one-device eager; routing changes and nothing is compiled anew.

python -m tests.dist.test_experts --model gpt_oss --mesh 2,2 [--layout fsdp+tp] [--backend inductor] [--steps 20]
"""

from __future__ import annotations

import argparse
import copy
import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.dist.launch import run
from tests.experts import FAMILIES, build, inputs
from tests.wide import cases


def train(name: str, sizes: tuple[int, ...], layout: str | None, backend: str, steps: int) -> dict[str, Any]:
    one = build(name)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp", "cp")[: len(sizes)])
    model = autopar.compile(copy.deepcopy(one), mesh, layout=layout, backend=backend, options=None if layout else {"seconds": 20})
    ours, theirs = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.optim.AdamW(one.parameters(), lr=1e-3)
    losses, wants, worst = [], [], ("", 0.0)
    for i in range(steps):
        given = inputs(8, 16, seed=i)  # so that routing is another at every step
        loss, want = model(**given).loss, one(**given).loss
        loss.backward()
        want.backward()
        losses.append(float(loss.detach()))
        wants.append(float(want.detach()))
        if i == 0:
            total = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in one.parameters() if p.grad is not None))
            for (n, p), (_, q) in zip(model.named_parameters(), one.named_parameters(), strict=True):
                if q.grad is not None:
                    error = float((p.grad.full_tensor() - q.grad).norm()) / (2e-5 * float(q.grad.norm()) + 1e-6 * total)
                    worst = max(worst, (n, error), key=lambda e: e[1])
        for o in (ours, theirs):
            o.step()
            o.zero_grad()
    return {"losses": losses, "wants": wants, "worst": worst, "steps": len(model.compiled_steps), "plan": str(model.plan)}


WAYS = [((4,), None, "aot_eager"), ((2, 2), "fsdp+tp", "aot_eager"), ((2,), "fsdp", "inductor"), ((2, 2), "fsdp+ep", "aot_eager")]
NOW = [("mixtral", *WAYS[0]), ("gpt_oss", *WAYS[1])]
CASES = NOW + [c for i, n in enumerate(FAMILIES) if (c := (n, *WAYS[(i + 1) % 4])) not in NOW]  # in all ways by the command above


SHORT = ("mixtral", (2,), None, "aot_eager", 5)


@pytest.mark.parametrize(("name", "sizes", "layout", "backend", "steps"), cases([SHORT, *((*c, 20) for c in CASES)], [SHORT]))
def test_equals_one_device(name: str, sizes: tuple[int, ...], layout: str | None, backend: str, steps: int) -> None:
    for r in run(train, math.prod(sizes), name, sizes, layout, backend, steps):
        torch.testing.assert_close(torch.tensor(r["losses"]), torch.tensor(r["wants"]), rtol=1e-3, atol=1e-3)
        assert r["worst"][1] <= 1, f"gradient error over its bound: {r['worst']}"
        assert r["steps"] == 1, "captured anew"


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__)
    a.add_argument("--model", default="mixtral", choices=list(FAMILIES))
    a.add_argument("--mesh", default="4")
    a.add_argument("--layout", default="")
    a.add_argument("--backend", default="aot_eager")
    a.add_argument("--steps", type=int, default=20)
    o = a.parse_args()
    sizes = tuple(int(s) for s in o.mesh.split(","))
    r = run(train, math.prod(sizes), o.model, sizes, o.layout or None, o.backend, o.steps, timeout=3600)[0]
    print(r["plan"])
    for ours, want in zip(r["losses"], r["wants"], strict=True):
        print(f"  {ours:.6f}  one device {want:.6f}")
    print("worst gradient (error over its bound):", r["worst"])


if __name__ == "__main__":
    main()
