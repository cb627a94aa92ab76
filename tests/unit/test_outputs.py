"""What a training call returns besides its loss: computed when it is asked for, from the very same call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.kernels.random import EagerRandom
from tests.eager import seeded

pytestmark = pytest.mark.usefixtures("one_process")


class Both(nn.Module):
    """Dropout, running statistics, and a buffer that forward reads and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        h = self.drop(self.norm(self.a(x))) * self.scale
        self.scale = self.scale * 2
        return {"loss": h.square().mean(), "hidden": h, "extra": (h + 1, "text")}


def compiled(model: nn.Module, **kw: Any) -> Any:
    return autopar.compile(model, {"dp": 1}, layout="fsdp", backend="aot_eager", **kw)


def expected(x: torch.Tensor, steps: int) -> tuple[nn.Module, list[dict[str, Any]]]:
    one, out = seeded(Both), []
    for i in range(steps):
        with EagerRandom(0, i):
            out.append(one(x))
    return one, out


def test_what_is_asked_for_is_of_the_same_call() -> None:
    x = torch.randn(6, 4)
    model, (one, want) = compiled(seeded(Both)), expected(x, 2)
    out = model(x)
    assert not isinstance(out["loss"], dict) and model.programs.captured == 1
    torch.testing.assert_close(out["hidden"], want[0]["hidden"])
    torch.testing.assert_close(out["loss"], want[0]["loss"])
    assert out["extra"][1] == "text" and "hidden" in out and set(out) == {"loss", "hidden", "extra"} and len(out) == 3
    assert out.get("nothing", 5) == 5 and torch.equal(out.get("loss"), out[0])
    later = model(x)  # computes all of it at once
    torch.testing.assert_close(later["hidden"], want[1]["hidden"])
    assert model.programs.captured == 2
    for (n, b), c in zip(model.named_buffers(), one.buffers(), strict=True):
        torch.testing.assert_close(b, c, msg=lambda m, n=n: f"{n}: {m}")


def test_gradients_of_the_loss_and_of_what_was_asked_for_add_up() -> None:
    x = torch.randn(6, 4)
    model, (one, want) = compiled(seeded(Both)), expected(x, 1)
    out = model(x)
    (out["loss"] + out["hidden"].pow(3).mean()).backward()
    (want[0]["loss"] + want[0]["hidden"].pow(3).mean()).backward()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def test_after_the_update_it_is_too_late() -> None:
    model = compiled(seeded(Both))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = model(torch.randn(6, 4))
    out["loss"].backward()
    optimizer.step()
    with pytest.raises(autopar.AutoparError, match=r"parameter 'a.weight' has changed since that call"):
        out["hidden"]
    assert model(torch.randn(6, 4))["hidden"].shape == (6, 8)


def test_a_copy_is_a_model_of_its_own() -> None:
    x = torch.randn(6, 4)
    model = compiled(seeded(Both), outputs="all")
    model(x)["loss"].backward()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    _, want = expected(x, 2)
    torch.testing.assert_close(other(x)["hidden"], want[1]["hidden"])
    assert all(p.grad is not None and p.grad is not q.grad for p, q in zip(other.parameters(), model.parameters(), strict=True))
    assert float(model.scale) == 2 and float(other.scale) == 4


def test_evaluation_computes_the_loss_alone_until_it_is_asked_for_more() -> None:
    x = torch.randn(6, 4)
    model, one = compiled(seeded(Both)).eval(), seeded(Both).eval()
    with torch.no_grad():
        first, want = model(x), one(x)
        assert model.programs.captured == 1
        torch.testing.assert_close(first["loss"], want["loss"])
        torch.testing.assert_close(first["hidden"], want["hidden"])
        second, want = model(x), one(x)
        torch.testing.assert_close(second["hidden"], want["hidden"])
    torch.testing.assert_close(model.scale, one.scale)
    with torch.no_grad():
        late = model(x)
    model.train()
    assert late["hidden"].shape == (6, 8)
    out = model(x)
    model.eval()
    with pytest.raises(autopar.AutoparError, match=r"train\(False\) was called since"):
        out["hidden"]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.a(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.encode(x)).sum()


def test_methods_besides_forward_have_gradients() -> None:
    x = torch.randn(6, 4)
    one, model = seeded(Encoder), compiled(seeded(Encoder))
    model(x).backward()
    with pytest.warns(UserWarning, match="Encoder.encode ran as plain PyTorch, all of it on every rank"):
        F.mse_loss(model.encode(x), x).backward()
    one(x).backward()
    F.mse_loss(one.encode(x), x).backward()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    before = model.programs.captured
    model(x)
    assert model.programs.captured == before
