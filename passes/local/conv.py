"""Convolutions on shards: as many groups as the rank has, a bias that counts once, sizes of the shard."""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.passes.local import local, one_tensor, operator
from autopar.passes.local.context import Local
from autopar.passes.local.reduction import once
from autopar.rules.conv import RESAMPLINGS


def _groups(ctx: Local, groups: int) -> int:
    return groups // math.prod(ctx.mesh.axis_size(a) for a in ctx.axes("g"))


@local("aten.convolution.default")
def _convolution(
    ctx: Local, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int,
) -> torch.Tensor:  # fmt: skip
    if bias is not None:
        bias = once(ctx, bias, ("i",))
    return one_tensor(operator(ctx.op.target)(x, w, bias, stride, padding, dilation, transposed, output_padding, _groups(ctx, groups)))


@local("aten.convolution_backward.default")
def _convolution_backward(
    ctx: Local, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias_sizes: list[int] | None, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int, mask: list[bool],
) -> Any:  # fmt: skip
    sizes = None if bias_sizes is None else [grad.shape[1]]
    return operator(ctx.op.target)(grad, x, w, sizes, stride, padding, dilation, transposed, output_padding, _groups(ctx, groups), mask)


@local(*(f"aten.{name}_backward.default" for name in RESAMPLINGS))
def _resample_backward(ctx: Local, grad: torch.Tensor, size: list[int], input_size: list[int], *rest: Any) -> torch.Tensor:
    return one_tensor(operator(ctx.op.target)(grad, size, list(ctx.local_shape()), *rest))
