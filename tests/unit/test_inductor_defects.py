"""What torch's Inductor gets wrong by itself is right in what we compile with it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

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


def test_reductions_of_different_orders_have_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs torch 2.10 to 2.13 computes some of them wrong in one kernel (pytorch/pytorch#193061); here it can only be seen that this is switched off."""
    from torch._inductor import compile_fx, config

    seen, theirs = [], compile_fx.compile_fx_inner

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(config.triton.mix_order_reduction)
        return theirs(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", spy)
    model = autopar.compile(nn.Linear(3, 2), backend="inductor")
    model(torch.randn(4, 3)).sum().backward()
    assert seen == [False, False]
