"""A model trained compiled, call by call on one process, against the same model trained by plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar

Act = Callable[[Any, int], Any]


class Net(nn.Module):
    """Two products; what a test is about happens between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> Any:
        return (self.b(self.between(torch.relu(self.a(x)))) ** 2).mean()


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def compiled(model: nn.Module, **kw: Any) -> autopar.ParallelModule:
    return autopar.compile(model, {"dp": 1}, **{"backend": "aot_eager", "layout": "fsdp", "outputs": "all", **kw})


def trained(model: nn.Module, act: Act | None = None, steps: int = 3) -> list[float]:
    """The losses of some steps; act(model, i) is done before step i."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(5)
    losses = []
    for i in range(steps):
        x = torch.randn(6, 4, generator=g)
        if act is not None:
            act(model, i)
        loss = whole(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def assert_trains_alike(build: Callable[[], nn.Module], act: Act | None = None, left: Callable[[Any], Any] = lambda m: None) -> None:
    """left: what a model has in the end besides its parameters. The test's act or model must make a difference: that is the test's own affair."""
    one, ours = seeded(build), seeded(build)
    want = trained(one, act)
    model = compiled(ours)
    torch.testing.assert_close(trained(model, act), want, rtol=1e-5, atol=1e-7)
    got, expected = left(model), left(one)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(whole(got).detach(), expected.detach(), rtol=1e-5, atol=1e-6)
    else:
        assert got == expected
    for (n, p), q in zip(one.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(q).detach(), p.detach(), rtol=1e-5, atol=1e-6, msg=f"{n}: {{}}".format)
