"""Image models, contiguous and channels last, on gloo processes: loss, gradients, buffers and five AdamW steps equal one-device eager.

python -m tests.dist.test_images --models unet2d,resnet --formats contiguous,channels_last --mesh 2,2 --backend inductor [--layout fsdp] [--batch 8] [--size 8]
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.capture.capture import Call
from autopar.passes.lay_out import copies
from tests.dist.launch import run
from tests.images import IMAGES, batch_of, model_of
from tests.wide import wide

FORMATS = ("contiguous", "channels_last")


def step_shape(step: Any, role: Any) -> tuple[int, ...]:
    places = [n for n in step.base.forward.graph.nodes if n.op == "placeholder"]
    return tuple(next(n for n, r in zip(places, step.base.forward_inputs, strict=True) if r == role).meta["val"].shape)


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def train(
    name: str, last: bool, sizes: tuple[int, ...], layout: str | None, backend: str, steps: int, batch: int, size: int
) -> dict[str, Any]:
    """Losses of both; the worst gradient of the first step and the worst buffer of the last one, as shares of their bounds; copies by half."""
    start = time.monotonic()
    one = model_of(name, last)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp", "cp")[: len(sizes)])
    model = autopar.compile(copy.deepcopy(one), mesh, layout=layout, backend=backend, options={"seconds": 10})
    ours, theirs = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.optim.AdamW(one.parameters(), lr=1e-3)
    losses, wants, worst = [], [], ("", 0.0)
    for i in range(steps):
        inputs = batch_of(name, batch, last, seed=i, size=size)
        loss, want = model(**inputs), one(**inputs)
        loss.backward()
        want.backward()
        losses.append(float(loss.detach()))
        wants.append(float(want.detach()))
        total = sum(float(p.grad.norm()) ** 2 for p in one.parameters() if p.grad is not None) ** 0.5
        if i == 0:
            for (n, p), (_, q) in zip(model.named_parameters(), one.named_parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), n
                if p.grad is not None and q.grad is not None:
                    error = float((whole(p.grad) - q.grad).norm()) / (2e-5 * float(q.grad.norm()) + 2e-6 * total)
                    worst = max(worst, (n, error), key=lambda e: e[1])
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            # A bias before a batch norm has no gradient but rounding, of which AdamW would make whole steps.
            if q.grad is not None and float(q.grad.norm()) <= 1e-6 * total:
                p.grad = q.grad = None
        for o in (ours, theirs):
            o.step()
            o.zero_grad()
    buffer = 0.0
    for (_, b), (_, c) in zip(model.named_buffers(), one.named_buffers(), strict=True):
        buffer = max(buffer, float((b.double() - c.double()).norm()) / (1e-3 * float(c.double().norm()) + 1e-6))
    (step,) = model._programs.steps()
    given = {r: tuple(t.stride()) for r, t in model._values(step, Call.of((), inputs)).items()}
    strides = dict(zip(step.base.forward_inputs, step.strides, strict=True))
    moved = [r for r, s in strides.items() if r.kind in ("param", "input") and given[r] != tuple(s) and 1 not in step_shape(step, r)]
    assert not moved, f"copied at every step, for they lie otherwise: {moved}"
    made = [copies(step.base.forward), copies(step.base.backward)]
    return {"losses": losses, "wants": wants, "worst": worst, "buffer": buffer, "copies": made, "seconds": time.monotonic() - start}


def every(cases: Sequence[tuple[str, bool]], sizes: tuple[int, ...], layout: str | None, backend: str, batch: int, size: int) -> list[Any]:
    return [train(name, last, sizes, layout, backend, 5, batch, size) for name, last in cases]


def check(results: list[list[Any]], cases: Sequence[tuple[str, bool]]) -> None:
    for by_case in results:
        for r, case in zip(by_case, cases, strict=True):
            torch.testing.assert_close(
                torch.tensor(r["losses"]), torch.tensor(r["wants"]), rtol=1e-4, atol=1e-5, msg=lambda m, c=case: f"{c}: {m}"
            )
            assert r["worst"][1] <= 1, f"{case}: gradient error over its bound: {r['worst']}"
            assert r["buffer"] <= 1, f"{case}: buffer error over its bound"


HERE = [("unet2d", False), ("unet2d", True), ("unet", True), ("resnet", True), ("convnext", True)]


@pytest.mark.parametrize(
    ("cases", "sizes", "layout", "batch", "size"),
    [
        pytest.param(HERE[1:2], (2,), None, 4, 8, id="one, planned"),
        pytest.param(HERE[3:4], (2,), None, 4, 8, id="another, planned", marks=wide),
        pytest.param(HERE[3:4], (4,), None, 8, 16, id="few channels a rank", marks=wide),  # (`unit/test_few_channels.py`)
        pytest.param(HERE[1:3], (2, 2), "fsdp+tp", 4, 8, id="fsdp+tp", marks=wide),
    ],
)
def test_equals_one_device(cases: list[tuple[str, bool]], sizes: tuple[int, ...], layout: str | None, batch: int, size: int) -> None:
    check(run(every, math.prod(sizes), cases, sizes, layout, "aot_eager", batch, size), cases)


@pytest.mark.wide
@pytest.mark.parametrize("name", IMAGES)
def test_every_model(name: str) -> None:
    cases = [(name, False), (name, True)]
    check(run(every, 1, cases, (1,), None, "aot_eager", 4, 8), cases)
    check(run(every, 2, cases[1:], (2,), "fsdp", "aot_eager", 4, 8), cases[1:])


@pytest.mark.wide
@pytest.mark.parametrize("name", ["unet", "resnet", "efficientnet"])
def test_compiled(name: str) -> None:
    cases = [(name, True)]
    check(run(every, 2, cases, (2,), None, "inductor", 4, 8), cases)


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__)
    a.add_argument("--models", default=",".join(IMAGES))
    a.add_argument("--formats", default=",".join(FORMATS))
    a.add_argument("--mesh", default="2")
    a.add_argument("--layout", default="", help="a hand layout; planned where none is given")
    a.add_argument("--backend", default="aot_eager")
    a.add_argument("--batch", type=int, default=4)
    a.add_argument("--size", type=int, default=8)
    o = a.parse_args()
    sizes = tuple(int(s) for s in o.mesh.split(","))
    for name in o.models.split(","):
        for format in o.formats.split(","):
            cases = [(name, format == "channels_last")]
            results = run(every, math.prod(sizes), cases, sizes, o.layout or None, o.backend, o.batch, o.size, timeout=3600)
            r = results[0][0]
            loss = max(abs(x - y) for x, y in zip(r["losses"], r["wants"], strict=True))
            print(
                f"{name:17} {format:14} loss {loss:.1e}  gradient {r['worst'][1]:.3f} of its bound ({r['worst'][0]})  buffers {r['buffer']:.3f}  "
                f"copies {r['copies'][0]} + {r['copies'][1]}  {r['seconds']:.0f} s",
                flush=True,
            )
            check(results, cases)


if __name__ == "__main__":
    main()
