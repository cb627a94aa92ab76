"""Modules whose parts lie oddly for a pipeline, on two stages beside one device: buffers that forward changes, results that no stage makes,
stages that train nothing, parameters that are read outside of layers."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.kernels.random import EagerRandom
from tests.dist.launch import run
from tests.dist.trained import trained_beside

BATCH, SEED = 4, 3


class Counted(nn.Module):
    """Buffers that count calls, follow a weight, are a weight, are set to what they are; a weight that is returned, and one whose gradient follows from nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(2))
        self.rounded = nn.Parameter(torch.full((6,), 1.3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        for name in ("average", "last", "table"):
            self.register_buffer(name, torch.ones(6, 6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        self.table = self.table.to(x.device)
        for layer in self.layers:
            x = x + layer(x) @ self.table
        x = (x + self.rounded.round()) * (1 + 0.1 * self.calls)
        first, second = (layer[0].weight for layer in self.layers)
        with torch.no_grad():
            self.average.mul_(0.9).add_(second, alpha=0.1)
            self.last.copy_(first.t())
        return {"loss": F.mse_loss(x, y), "out": x, "weight": first}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": F.mse_loss(x, y), "out": x}


def _beside(kind: type[nn.Module], number: int) -> None:
    """Trained, then asked for what it returns besides its loss."""
    torch.manual_seed(SEED)
    reference = kind().double()
    batch = {k: torch.randn(BATCH, 6, dtype=torch.float64) for k in ("x", "y")}
    compiled: Any = autopar.compile(copy.deepcopy(reference), {"pp": 2}, layout="fsdp", micro_batches=number, backend="aot_eager")
    worst = trained_beside(reference, compiled, batch, SEED, 2)
    assert max(worst.values()) < 1e-12, (kind, number, worst)
    with torch.no_grad(), EagerRandom(SEED, 2):
        want, got = reference(**batch), compiled(**batch)
        for k, t in want.items():
            torch.testing.assert_close(got[k], t, msg=f"{kind.__name__}, {number} micro-batches: {k}")
    buffers = dict(compiled.named_buffers())
    for n, b in reference.named_buffers():
        torch.testing.assert_close(buffers[n], b, msg=f"{kind.__name__}, {number} micro-batches: buffer {n}")


class Headed(nn.Module):
    """Nothing is trained on the first stage. A temperature is read by the last one, as CLIP's is; a head and a layer, by what is no part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.layers[0].requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.layers[1](torch.tanh(self.layers[0](x)))
        return {
            "loss": F.mse_loss(h * self.temperature.exp(), y),
            "out": self.head(self.layers[2](h) * self.temperature.exp()),
            "best": h.argmax(-1),
        }


CASES: list[tuple[type[nn.Module], int]] = [(Counted, 2), (Normed, 1), (Headed, 2)]


def _all() -> None:
    for kind, number in CASES:
        _beside(kind, number)


def test_as_on_one_device() -> None:
    run(_all, 2)
