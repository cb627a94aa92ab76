"""What torch's Inductor gets wrong by itself is right in what we compile with it."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    """Other tests of the process start their own."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Scattered(nn.Module):
    """`thrice` reads what was scattered into zeros, and is fused with `last`, of other loops; `late`, fused with `early`, draws it forward.

    So the scatter stands last of all, unless its order with `thrice` is known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(4, 32, 4, 8))
        self.square = nn.Parameter(torch.randn(16, 16))
        self.channels = nn.Parameter(torch.randn(32, 32))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        early = (x * 2) @ self.square
        thrice = torch.zeros(4, 32, 4, 4).index_add(3, places, self.wide) * 3
        late = (x * (thrice.view(128, 16) @ self.square).sin()) @ self.square
        last = thrice.contiguous(memory_format=torch.channels_last)
        return early.square().mean() + late.square().mean() + (last.permute(0, 2, 3, 1).reshape(64, 32) @ self.channels).square().mean()


def test_what_reads_a_scatter_runs_after_it() -> None:
    """torch 2.13 forgets that order when it fuses loops of different shapes on CPU, and `thrice` reads zeros (pytorch/pytorch#185509)."""
    torch.manual_seed(0)
    one = Scattered()
    ours = autopar.compile(copy.deepcopy(one), backend="inductor")
    inputs = torch.randn(128, 16), torch.arange(8) // 2
    want, got = one(*inputs), ours(*inputs)
    torch.testing.assert_close(got, want)
    want.backward()
    got.backward()
    for (n, p), q in zip(one.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=n: f"{n}: {m}")
