"""What programs are written in: torch's names, and numbers that depend on a seed alone.

All numbers are float32's, so that a program in float64 and the same one in float32 start from the same ones.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["F", "Pair", "bools", "checkpoint", "dataclasses", "fill", "ints", "math", "nn", "perm", "randn", "torch"]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Bounded, and no two of them near each other."""
    n = math.prod(shape)
    spread = torch.linspace(-1.7, 1.9, max(n, 1), dtype=torch.float64)[:n]
    return (
        spread[torch.randperm(n, generator=_generator(seed))].float().to(dtype).reshape(shape).clone()
    )  # no view: torch says otherwise of views of views


def ints(seed: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=_generator(seed))


def bools(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=_generator(seed)).bool()


def perm(seed: int, n: int) -> torch.Tensor:
    return torch.randperm(n, generator=_generator(seed))


def fill(module: nn.Module, dtype: torch.dtype) -> None:
    """Every parameter gets numbers that depend on its name alone."""
    module.to(dtype)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(randn(zlib.crc32(name.encode()) % 10007, *p.shape, dtype=dtype) * 0.4 + 0.1)


@dataclasses.dataclass
class Pair:
    """A result as users write it: a dataclass that torch knows nothing of."""

    first: Any
    second: Any = None


def _register() -> None:
    from torch.utils import _pytree

    _pytree.register_dataclass(Pair)


_register()
