"""How many bytes of storages are alive while a piece of a program runs: every storage once, however many tensors look at it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """now, peak: bytes of the storages in `known` and of those made since that are still alive. at: the operator that made the peak."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0
        self.at = ""
        for t in known:
            self.see(t, "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if str(func) == "autopar.reload.default":  # has taken memory for what `reloaded` will give
            _, size, dtype, _ = args
            self.add(int(out), math.prod(size) * dtype.itemsize, str(func))
            return out
        if str(func) == "autopar.reloaded.default":
            self.gone(int(args[0]))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.see(t, str(func))
        return out

    def see(self, t: torch.Tensor, what: str) -> None:
        storage = t.untyped_storage()
        if storage._cdata not in self.alive:
            self.add(storage._cdata, storage.nbytes(), what)
            weakref.finalize(storage, self.gone, storage._cdata)

    def add(self, key: int, size: int, what: str) -> None:
        self.alive[key] = size
        self.now += size
        if self.now > self.peak:
            self.peak, self.at = self.now, what

    def gone(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)
