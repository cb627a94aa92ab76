"""Batches whose sizes vary, on gloo processes: one program for all of them, and every loss and gradient is plain PyTorch's on one device.

python -m tests.dist.test_lengths --models llama,bert --layout tp --processes 2 [--backend inductor]
"""

from __future__ import annotations

import argparse
import copy
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.kernels.random import EagerRandom
from tests.dist.launch import run
from tests.models import ZOO
from tests.wide import cases, wide

# (batch, sequence): the second new length has a program made for all of them; then a batch that varies, too, one that does not divide, and one of one sample.
SIZES = ((4, 24), (4, 36), (4, 18), (4, 41), (8, 30), (12, 24), (3, 20), (1, 36), (4, 36), (6, 18))
PROGRAMS = 6  # the first length, all lengths, all lengths and batches; three samples, one sample, and at most one more


def train(
    name: str,
    mesh_sizes: tuple[int, ...],
    layout: str | None,
    backend: str,
    sizes: tuple[tuple[int, int], ...] = SIZES,
    evaluates: bool = False,
    **kw: Any,
) -> dict[str, Any]:
    """Losses of both, the worst error of a gradient over its bound, counts of programs, what was warned of."""
    torch.manual_seed(3)
    zoo = ZOO[name]
    one = zoo.build(2).train()
    mesh = init_device_mesh("cpu", mesh_sizes, mesh_dim_names=("dp", "tp")[: len(mesh_sizes)])
    model = autopar.compile(copy.deepcopy(one), mesh, layout=layout, backend=backend, options={"seconds": 5}, **zoo.compile, **kw)
    torch.manual_seed(3)
    losses, wants, errors, calls = [], [], {}, 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i, (batch, seq) in enumerate(sizes):
            inputs = zoo.inputs(batch, seq)
            if evaluates:
                for m in (model, one):
                    m.eval()
                with torch.no_grad():
                    losses.append(float(model(**inputs).loss))
                    wants.append(float(one(**inputs).loss))
                calls += 1
                for m in (model, one):
                    m.train()
            loss = model(**inputs).loss
            loss.backward()
            losses.append(float(loss.detach()))
            with EagerRandom(3, calls):
                want = one(**inputs).loss
            calls += 1
            want.backward()
            wants.append(float(want.detach()))
            total = sum(float(p.grad.norm()) ** 2 for p in one.parameters() if p.grad is not None) ** 0.5
            for (n, p), (_, q) in zip(model.named_parameters(), one.named_parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), n
                if q.grad is not None:
                    errors[n, i] = float((p.grad.full_tensor() - q.grad).norm()) / (1e-5 * float(q.grad.norm()) + 1e-7 * total)
            for m in (model, one):
                m.zero_grad()
    return {
        "losses": losses,
        "wants": wants,
        "worst": max(errors.items(), key=lambda e: e[1]),
        "programs": model.programs,
        "warned": [str(w.message) for w in told if "captured" in str(w.message)],
        "plan": str(model.plan),
    }


def holds(results: list[dict[str, Any]], programs: int) -> None:
    for r in results:
        torch.testing.assert_close(torch.tensor(r["losses"]), torch.tensor(r["wants"]), rtol=2e-5, atol=2e-5, equal_nan=True)
        assert r["worst"][1] <= 1.0, f"gradient error over its bound: {r['worst']}"
        assert not r["warned"], r["warned"]
        assert r["programs"].captured <= programs and r["programs"].general, r["programs"]


MODELS = ("toy-dropout", "llama", "gpt2", "bert", "t5", "mixtral", "lora")
LAYOUTS = ("fsdp", "tp", None)
CASES = [("toy-dropout", "fsdp"), ("t5", "fsdp")]  # t5 takes minutes; of the others each in two layouts; in all by the command above
CASES += [(m, LAYOUTS[(i + k) % 3]) for i, m in enumerate(m for m in MODELS if m not in ("toy-dropout", "t5")) for k in range(2)]


@pytest.mark.parametrize(("name", "layout"), cases(CASES, CASES[:1]))
def test_lengths_and_batches_that_vary(name: str, layout: str | None) -> None:
    holds(run(train, 2, name, (2,), layout, "aot_eager"), PROGRAMS + 2 * (name == "t5"))


@wide
@pytest.mark.parametrize("name", ("toy-dropout", "gpt2", "llama", "bert"))
def test_lengths_that_vary_in_training_and_evaluation(name: str) -> None:
    """Of a planned model; with dropout, masks are those of one device at every length."""
    found = run(train, 2, name, (2,), None, "aot_eager", ((4, 24), (4, 36), (4, 18), (4, 41)), True)
    holds(found, 4)
    assert "for all sizes of some inputs" not in found[0]["plan"], "the plan is that of the first call"


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--models", default=",".join(MODELS))
    a.add_argument("--layout", default="planned")
    a.add_argument("--mesh", default="2")
    a.add_argument("--backend", default="aot_eager")
    o = a.parse_args()
    mesh = tuple(map(int, o.mesh.split("x")))
    for name in o.models.split(","):
        try:
            found = run(train, torch.Size(mesh).numel(), name, mesh, None if o.layout == "planned" else o.layout, o.backend, timeout=400)
            errors = [abs(x - y) for x, y in zip(found[0]["losses"], found[0]["wants"], strict=True)]
            print(
                f"{name:12} loss off by {max(errors):.1e}, gradient {found[0]['worst'][1]:.2g} of its bound, {found[0]['programs']}, {found[0]['warned']}",
                flush=True,
            )
        except Exception as e:
            print(f"{name:12} failed: {type(e).__name__}: {str(e)[-2500:]}", flush=True)


if __name__ == "__main__":
    main()
