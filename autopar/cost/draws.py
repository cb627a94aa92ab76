"""What random numbers cost where they are drawn call by call: a counter goes through some forty integer operators (`autopar.random`), each through memory.

Fused into one kernel, as a compiler does, they cost their own operator's reads and writes and no more.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autopar import random
from autopar._torch import TorchDispatchMode

_ELEMENTS = 1 << 10


class _Count(TorchDispatchMode):
    """Bytes read and written by calls with results of `_ELEMENTS` elements, and how many such calls."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self.calls = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if any(t.numel() >= _ELEMENTS for t in made):
            read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self.nbytes += sum(t.numel() * t.itemsize for t in (*made, *read))
            self.calls += 1
        return out


@functools.cache
def draw() -> tuple[float, int]:
    """Bytes per element, and kernels, of one draw of 32 bits for every element: the index of each, and its word."""
    with torch.device("meta"), _Count() as count:
        index = torch.arange(_ELEMENTS // 2)[:, None] * 2 + torch.arange(2)
        random.bits(torch.zeros(2, dtype=torch.int64), 0, index)
    return count.nbytes / _ELEMENTS, count.calls
