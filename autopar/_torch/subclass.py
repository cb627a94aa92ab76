"""Tensors that stand for others: of a shape, without memory."""

from __future__ import annotations

from typing import Any

import torch


def without_memory(cls: type[torch.Tensor], shape: tuple[int, ...], like: torch.Tensor) -> Any:
    """A tensor of `cls`, with what `like` has besides its shape: strides too."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device, strides=like.stride())


def plainly() -> Any:
    """A context in which operations do not ask `__torch_function__` of tensors' classes."""
    return torch._C.DisableTorchFunctionSubclass()
