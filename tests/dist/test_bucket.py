"""Buckets on gloo processes: training with small collectives joined is training on one device, compiled and eager, in all variants of backward."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import AutoparError
from tests.dist.launch import run
from tests.models import ZOO
from tests.wide import cases

STEPS = 3


def build(name: str = "llama") -> torch.nn.Module:
    torch.manual_seed(0)
    return ZOO[name].build(3)


def train(model: Any, lengths: tuple[int, ...], unreduced: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two calls a step, the first of them under no_sync where `unreduced`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        for half in range(2):
            ids = torch.randint(1, 96, (6, lengths[step % len(lengths)]), generator=torch.Generator().manual_seed(2 * step + half))
            quiet = unreduced and half == 0 and hasattr(model, "no_sync")
            with model.no_sync() if quiet else contextlib.nullcontext():
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            losses.append(float(loss))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
    return losses, {n: p.detach().clone() for n, p in whole.items()}


def trained(name: str, layout: str | None, backend: str, lengths: tuple[int, ...], unreduced: bool, options: dict[str, Any]) -> Any:
    model = autopar.compile(build(name), (dist.get_world_size(),), layout=layout, backend=backend, **options)
    losses, params = train(model, lengths, unreduced)
    return losses, params, model.plan.solver.get("buckets", ""), model.plan.text()


PROGRAMS = [
    (2, "toy", "fsdp", "aot_eager", (16,), True, {}),
    (3, "llama", "fsdp", "aot_eager", (16,), True, {}),  # 32 and 96 rows on three ranks: padded
    (2, "llama", "ddp", "inductor", (16,), True, {}),
    (2, "llama", "fsdp", "inductor", (16,), False, {"grad_accumulation": 2}),
    (2, "llama", "fsdp", "aot_eager", (16, 12, 9), False, {"dynamic": True}),
]


@pytest.mark.parametrize(("n", "name", "layout", "backend", "lengths", "unreduced", "options"), cases(PROGRAMS, PROGRAMS[:1]))
def test_one_device(
    n: int, name: str, layout: str | None, backend: str, lengths: tuple[int, ...], unreduced: bool, options: dict[str, Any]
) -> None:
    want, params = train(build(name), lengths, False)
    for losses, got, joined, said in run(trained, n, name, layout, backend, lengths, unreduced, options):
        assert losses == pytest.approx(want, rel=2e-5)
        for name, p in params.items():
            torch.testing.assert_close(got[name], p, rtol=1e-4, atol=2e-6)
        assert int(joined.split(" collectives in ")[0]) > 4 and f"buckets: {joined}" in said


def reduced_in_half(name: str, on: bool) -> Any:
    precision = autopar.Precision(param=torch.bfloat16, reduce=torch.bfloat16)
    model = autopar.compile(build(name), (2,), layout="fsdp", backend="aot_eager", precision=precision, bucket_collectives=on)
    return *train(model, (16,), False), "buckets:" in model.plan.text()


@pytest.mark.parametrize("name", cases(["toy", "llama"], ["toy"]))
def test_switched_off_and_in_half_precision(name: str) -> None:
    """Two ranks' sums do not depend on what else is in a collective: to the bit."""
    (losses, params, said), (single, alone, nothing) = (run(reduced_in_half, 2, name, on)[0] for on in (True, False))
    assert said and not nothing
    assert losses == single
    for n in params:
        assert torch.equal(params[n], alone[n]), n


def test_refused() -> None:
    with pytest.raises(AutoparError, match="neither True nor False"):
        autopar.compile(build(), (1,), bucket_collectives=[512])  # type: ignore[arg-type]
