"""A strided 1x1 convolution of few channels: oneDNN's kernel for the weight's gradient, given channels last, writes past its workspace (`passes/demands.py`).

Where the model has more channels, and only a rank's share of them are few, eager training on one device is sound, and so has the split one to be
(`dist/test_images.py`: few channels a rank).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autopar.passes.demands import guarded, unmet

aten = torch.ops.aten.convolution_backward.default
LAST = torch.channels_last


def call(
    channels: int = 4, kernel: int = 1, stride: int = 2, wanted: bool = True, last: str = "x", transposed: bool = False
) -> tuple[Any, ...]:
    make = torch.Generator().manual_seed(0)
    shapes = {"g": (4, 32, 16, 16), "x": (4, channels, 15 * stride + kernel, 15 * stride + kernel), "w": (32, channels, kernel, kernel)}
    if transposed:
        shapes = {"g": (4, channels, 32, 32), "x": (4, 32, 16, 16), "w": (32, channels, kernel, kernel)}
    t = {k: torch.randn(*s, generator=make) for k, s in shapes.items()}
    t |= {k: t[k].contiguous(memory_format=LAST) for k in last if k != "w"}
    if "w" in last:  # as `model.to(memory_format=...)` leaves it
        t["w"] = t["w"].as_strided(t["w"].shape, (channels, 1, channels, channels))
    more = [1, 1] if transposed else [0, 0]
    return (t["g"], t["x"], t["w"], [0], [stride, stride], [0, 0], [1, 1], transposed, more, 1, [True, wanted, False])


CASES = [{"last": "x"}, {"last": "w"}, {"last": "gxw"}, {"last": "g", "transposed": True}, {"last": "gx", "channels": 2}]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_few_channels_are_laid_out_and_right(case: dict[str, Any]) -> None:
    args = call(**case)
    assert unmet(aten, args)
    ours = guarded(fx.Graph().call_function(aten))
    assert ours is not None
    plain = [a.clone(memory_format=torch.contiguous_format) if isinstance(a, torch.Tensor) else a for a in args]
    for got, want in zip(ours(*args)[:2], aten(*plain)[:2], strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("case", [{"channels": 16}, {"stride": 1}, {"kernel": 3}, {"wanted": False}], ids=str)
def test_others_are_left_as_they_lie(case: dict[str, Any]) -> None:
    assert not unmet(aten, call(last="gxw", **case))
