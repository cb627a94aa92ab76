"""Seconds of a call, while every process of the machine makes the same call.

A window lasts long enough that the scheduler's turns average out where processes share cores; its mean counts. Every process runs for the
same time, not for the same number of calls, so that none computes alone at the end. On a GPU a window ends when the device is done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

WINDOWS = 3


@dataclass(frozen=True)
class Sample:
    """One window: what was done, how much of it (FLOPs, or bytes), and mean seconds of a call.

    of: as `hardware.WorkCurve.of` and links' KINDS have it; nbytes: of products, what they move besides; ranks, nodes: of a collective's group.
    """

    of: str
    amount: float
    seconds: float
    dtype: str = ""
    nbytes: float = 0.0
    ranks: int = 1
    nodes: int = 1


@dataclass
class Clock:
    """Of one process. window_s: how long a window lasts; until: when it is late (time.monotonic): no larger size is begun then."""

    device: torch.device
    window_s: float
    until: float = math.inf

    def late(self) -> bool:
        """For all processes alike (collective)."""
        return self.agreed(time.monotonic() - self.until) > 0

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        self.sync()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(torch.zeros(1, device=self.device))
            self.sync()

    def windows(self, call: Callable[[], Any]) -> list[float]:
        """Mean seconds of a call in every window."""
        call()
        self.sync()
        once = time.perf_counter()
        call()
        self.sync()
        once = time.perf_counter() - once
        chunk = max(1, min(1000, int(self.window_s / 10 / max(once, 1e-7))))
        out = []
        for _ in range(WINDOWS):
            self.barrier()
            n, start = 0, time.perf_counter()
            while n == 0 or time.perf_counter() - start < self.window_s:
                for _ in range(chunk):
                    call()
                self.sync()
                n += chunk
            out.append((time.perf_counter() - start) / n)
        return out

    def rounds(self, call: Callable[[], Any], most: int = 200) -> list[float]:
        """As `windows`, for calls that processes make together: as many on every one of them."""
        n = self.often(call, most)
        return [self.window(call, n) for _ in range(WINDOWS)]

    def often(self, call: Callable[[], Any], most: int = 200) -> int:
        """How many calls fill a window, for all processes alike."""
        call()
        once = self.agreed(self.window(call, 1))
        return max(1, min(most, int(self.window_s / max(once, 1e-6))))

    def window(self, call: Callable[[], Any], n: int) -> float:
        self.barrier()
        start = time.perf_counter()
        for _ in range(n):
            call()
        self.sync()
        return (time.perf_counter() - start) / n

    def agreed(self, value: float) -> float:
        """The largest of all processes' values."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return value
        t = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
        return float(t)
