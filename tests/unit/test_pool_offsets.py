"""A compiled max pool keeps a byte an element for backward, and gives what eager gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar

pytestmark = pytest.mark.usefixtures("one_process")


class Pools(nn.Module):
    def __init__(self, dims: int, **how: Any) -> None:
        super().__init__()
        conv = {2: nn.Conv2d, 3: nn.Conv3d}[dims]
        self.dims, self.how, self.first, self.last = dims, how, conv(3, 4, 3, padding=1), conv(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pool = {2: F.max_pool2d, 3: F.max_pool3d}[self.dims]
        return self.last(pool(F.relu(self.first(x)), **self.how)).square().mean()


CASES = {
    "halved": (2, {"kernel_size": 2}),
    "overlapping": (2, {"kernel_size": 3, "stride": 2, "padding": 1}),
    "rounded up": (2, {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 0), "ceil_mode": True}),
    "volume": (3, {"kernel_size": 2, "stride": 2}),
    "wide": (2, {"kernel_size": 6, "stride": 2, "padding": 3}),
    "dilated": (2, {"kernel_size": 3, "stride": 1, "dilation": 2}),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_backward_keeps_a_byte(case: str, last: bool) -> None:
    torch.manual_seed(0)
    dims, how = CASES[case]
    one = Pools(dims, **how)
    x = torch.randn(2, 3, *[13] * dims)
    if last:
        order: Any = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
        one, x = one.to(memory_format=order), x.contiguous(memory_format=order)
    x[0, :, :4] = 0.5  # several maxima in a window: the first counts
    model = autopar.compile(copy.deepcopy(one), backend="inductor")
    got, want = model(x), one(x)
    got.backward()
    want.backward()
    torch.testing.assert_close(got, want)
    for p, q in zip(one.parameters(), model.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-4, atol=1e-6)
    (step,) = model._programs.steps()
    kept = [n.meta["val"].dtype for n in step.base.backward.graph.find_nodes(op="placeholder")]
    by_index = case in ("wide", "dilated")  # for which Inductor calls torch's kernel
    assert (torch.int64 in kept, torch.int8 in kept) == (by_index, not by_index)
