"""Parameters whose gradients are equal each have one of their own: what is added to one, or clipped, is no other's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autopar.runtime.own_memory import OwnMemory
from tests.eager import compiled, seeded, whole


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.c(torch.relu(self.a(x) + self.b(y))) ** 2).mean()


class Summed(nn.Module):
    """The gradients of sums are expanded: many elements in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(3, 8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.w.sum(0)).mean() + (y.mean() * self.b).sum()


@pytest.mark.parametrize("of", [Added, Summed])
@pytest.mark.parametrize("how", [{}, {"backend": "inductor"}, {"layout": "ddp"}, {"micro_batches": 2, "outputs": "loss"}], ids=str)
def test_accumulated_and_clipped(one_process: None, how: dict[str, Any], of: type[nn.Module]) -> None:
    """Two backwards into the same gradients, then a clip."""
    one = seeded(of)
    model = compiled(copy.deepcopy(one), **how)
    g = torch.Generator().manual_seed(1)
    for _ in range(2):
        x, y = torch.randn(4, 8, generator=g), torch.randn(4, 8, generator=g)
        whole(model(x, y)).backward()
        one(x, y).backward()
    for m in (model, one):
        nn.utils.clip_grad_norm_(m.parameters(), 0.01)
    for (n, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, msg=lambda m, n=n: f"{n}: {m}")


def test_a_gradient_that_was_given(one_process: None) -> None:
    """The gradient of the output is that of a bias, and stays what it was."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.shift

    model = compiled(seeded(Shifted))
    given = torch.ones(3)
    for _ in range(2):
        whole(model(torch.ones(3))).backward(given)
    assert given.tolist() == [1.0] * 3
    assert whole(model.shift.grad).tolist() == [2.0] * 3


def test_elements_that_share_a_place() -> None:
    own = OwnMemory([])
    row = torch.arange(6.0)
    for t in (row.expand(4, 6), row.expand(4, 6).transpose(0, 1), row.as_strided((3, 3), (1, 1)), row[:1].expand(5)):
        found = own.of(t)
        assert found.untyped_storage().data_ptr() != row.untyped_storage().data_ptr() and torch.equal(found, t)
    for t in (
        row.view(2, 3).transpose(0, 1),
        torch.ones(4, 6)[:, :5],
        torch.ones(4, 1).expand(4, 1),
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ):
        assert own.of(t) is t


def test_parts_of_one_buffer_stay() -> None:
    buffer = torch.zeros(10)
    own = OwnMemory([buffer[8:]])
    assert own.of(buffer[:4]).data_ptr() == buffer.data_ptr()
    assert own.of(buffer[4:8]).data_ptr() == buffer[4:].data_ptr()
    for again in (buffer[2:5], buffer[7:9], buffer):
        assert own.of(again).untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
