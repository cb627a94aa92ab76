"""Launches: on the device of a kernel's operands, which need not be the current one. One function, so that tests can compile for GPUs that are not here what would be launched."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], on: Tensor, *operands: Any, **options: Any) -> None:
    """grid: programs along each axis; on: an operand. options: num_warps and the kernel's constants."""
    with torch.cuda.device(on.device) if on.is_cuda else contextlib.nullcontext():
        kernel[grid](*operands, **options)
