"""One GPU: what `autopar.compile` is asked for besides a layout changes no number but those that it rounds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.hardware.cluster import Cluster
from autopar.kernels.random import bits
from tests.eager import whole
from tests.gpu.where import DEVICE, error, gradients, mesh, only_here

pytestmark = only_here
__all__ = ["mesh"]


def llama(dropout: float = 0.0) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        use_cache=False, attention_dropout=dropout,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(DEVICE).train()


def batch(n: int = 4, tokens: int = 256, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(1024, (n, tokens), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return {"input_ids": ids, "labels": ids}


def pair(mesh: DeviceMesh, **how: Any) -> tuple[float, float, Any]:
    one = llama()
    model = autopar.compile(copy.deepcopy(one), mesh, **{"backend": "aot_eager", "cluster": "h100:1x1", **how})
    inputs = batch()
    loss, want = model(**inputs).loss, one(**inputs).loss
    loss.backward()
    want.backward()
    return abs(float(whole(loss)) - float(want)) / float(want), error(gradients(model), gradients(one)), model


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"backend": "inductor"},
        {"micro_batches": 2},
        {"loss_head": "chunked"},
        {"loss_head": "chunked", "backend": "inductor"},
        {"memory": "least"},
        {"memory": "least", "backend": "inductor"},
        {"dynamic": True},
        {"dynamic": True, "backend": "inductor"},
        {"layout": "tp"},
    ],
    ids=lambda how: ", ".join(f"{k} {v}" for k, v in how.items()) or "planned",
)
def test_same_numbers(mesh: DeviceMesh, how: dict[str, Any]) -> None:
    loss, gradient, _ = pair(mesh, **how)
    assert loss <= 1e-5
    assert gradient <= 1e-4


def slow() -> Cluster:
    """A device so slow that it is better to keep activations anywhere than to make them again."""
    card, cpu = Cluster.of("h100:1x1"), Cluster.of("cpu")
    peak = card.device.peak_flops.model_copy(update={"float32": card.device.peak_flops.float32 / 1e3})
    device = card.device.model_copy(update={"peak_flops": peak})
    return card.model_copy(update={"device": device, "nvme": cpu.nvme})


@pytest.mark.parametrize("media", ["host", "nvme"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_offload(mesh: DeviceMesh, backend: str, media: str, tmp_path: Any) -> None:
    """Bitwise what is computed without, over several steps: copies on their own streams are waited for."""
    offload = autopar.Offload(host=media == "host", nvme=str(tmp_path) if media == "nvme" else None)
    net = torch.nn.Sequential(*[layer for _ in range(8) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())], torch.nn.Linear(256, 8))
    x, y = torch.randn(8192, 256, device=DEVICE), torch.randint(0, 8, (8192,), device=DEVICE)
    how = {"backend": backend, "optimizer": "sgd", "loss_fn": torch.nn.functional.cross_entropy, "cluster": slow()}
    net = net.to(DEVICE)
    plain = autopar.compile(copy.deepcopy(net), mesh, layout="ddp", **how)
    sent = autopar.compile(copy.deepcopy(net), mesh, memory=1e8, offload=offload, **how)
    sent.prepare(x, target=y)
    assert set(sent.plan.offload.values()) == {media}, sent.plan.offload
    for step in range(4):
        for model in (plain, sent):
            model.zero_grad()
            loss = model(x * (1 + step), target=y)
            loss.backward()
        assert error(gradients(sent), gradients(plain)) <= 1e-6, step


def test_lengths_that_vary(mesh: DeviceMesh) -> None:
    one = llama()
    model = autopar.compile(copy.deepcopy(one), mesh, layout="fsdp", dynamic=True, backend="inductor")
    for tokens in (64, 200, 129):
        inputs = batch(2, tokens)
        loss, want = model(**inputs).loss, one(**inputs).loss
        loss.backward()
        want.backward()
        torch.testing.assert_close(whole(loss), want, rtol=1e-5, atol=1e-5)
    assert error(gradients(model), gradients(one)) <= 1e-4


def test_compiled_ahead(mesh: DeviceMesh, tmp_path: Any) -> None:
    """A start with an empty folder of Inductor's finds in what an earlier one kept all that it needs, kernels included, and computes the same."""
    found = []
    for _ in range(2):
        with fresh_cache():
            loss, _, model = pair(mesh, backend="inductor", artifacts=tmp_path / "kept")
        halves = [h for s in model._programs.steps() for h in (s.stats["forward"], *s.stats["backward"].values())]
        found.append((loss, sum(h["hit"] for h in halves), sum(h["miss"] for h in halves)))
    assert [x[1:] for x in found] == [(0, 2), (2, 0)]
    assert max(x[0] for x in found) <= 1e-5


def test_random_bits_are_the_processors(mesh: DeviceMesh) -> None:
    """Masks are drawn from counters, and are the same on every device."""
    index = torch.arange(1 << 16)
    for seed, step in ((0, 0), (3, 1), ((1 << 62) - 1, 1 << 33)):
        want = bits(torch.tensor([seed, step]), 5, index)
        got = bits(torch.tensor([seed, step], device=DEVICE), 5, index.to(DEVICE))
        assert torch.equal(got.cpu(), want)


def test_dropout_compiled_and_not(mesh: DeviceMesh) -> None:
    """The same masks under both backends."""
    found = []
    for backend in ("aot_eager", "inductor"):
        torch.manual_seed(5)
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 64, bias=False)).to(DEVICE)
        torch.manual_seed(7)
        model = autopar.compile(net.train(), mesh, layout="ddp", backend=backend, loss_fn=torch.nn.functional.mse_loss)
        x = torch.ones(32, 64, device=DEVICE)
        model(x, target=x).backward()
        found.append(gradients(model))
    assert error(*found) <= 1e-5
