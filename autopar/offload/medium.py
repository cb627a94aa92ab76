"""What a place for activations can do. `host` and `disk` are the two that there are.

Data is given up (`forget`) when the last tensor that owns it dies: on any thread, perhaps in the middle of a garbage collection that
began while this very thread held a lock. So forgetting takes no lock that it would have to wait for; what it cannot do at once the next
call does.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Counters:
    """Bytes are of tensors' data, except `reserved_bytes`: what is taken from the system, rounding and spare included."""

    in_use_bytes: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    sent_bytes: int = 0
    fetched_bytes: int = 0
    sent_s: float = 0.0  # time spent writing and reading, summed over threads; 0 for host memory
    fetched_s: float = 0.0


class Medium(ABC):
    def __init__(self) -> None:
        self.lock = threading.Condition(threading.Lock())  # not reentrant: see `forget`
        self._forgotten: deque[Any] = deque()
        self.in_use_bytes = self.peak_bytes = self.sent_bytes = self.fetched_bytes = 0

    @abstractmethod
    def send(self, x: Tensor) -> Any:
        """Starts to copy x's data away. What is returned stands for it."""

    @abstractmethod
    def sent(self, kept: Any, device: torch.device) -> None:
        """After this x's memory may be used for other things by whatever is queued on `device`."""

    @abstractmethod
    def fetch(self, kept: Any, out: Tensor) -> Any:
        """Starts to copy the data to `out`, which is contiguous. What is returned stands for that copy."""

    @abstractmethod
    def fetched(self, flight: Any) -> None:
        """After this whatever is queued on `out`'s device finds the data there."""

    @abstractmethod
    def counters(self) -> Counters: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _release(self, thing: Any) -> None:
        """Returns the space of something kept, or gives up a copy under way. The lock is held."""

    def forget(self, thing: Any) -> None:
        self._forgotten.append(thing)
        if self.lock.acquire(blocking=False):
            try:
                self.sweep()
            finally:
                self.lock.release()

    def sweep(self) -> None:
        """Does what was put off. The lock is held."""
        while self._forgotten:
            self._release(self._forgotten.popleft())

    def count(self, nbytes: int) -> None:
        """`nbytes` more in use. The lock is held."""
        self.in_use_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
