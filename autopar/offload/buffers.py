"""Host memory that copies go through: aligned to pages, page-locked for CUDA, given back to the system when it dies.

Not torch's pinned allocator: that one rounds every block up to a power of two and never returns it, so that a limit in bytes would mean
little.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from autopar.offload.errors import OffloadError

PAGE_BYTES = 4096
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK; Python's mmap has no name for it
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process


def pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class Buffer:
    """`nbytes` of host memory, as a tensor and as an array of bytes."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        try:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as e:
            raise OffloadError(
                f"the machine gives no {nbytes} bytes of host memory ({e.strerror})",
                fix="lower host_bytes or staging_bytes, or raise the process's memory limit (ulimit, cgroup)",
            ) from e
        # A fork would copy page-locked memory at once, all of it, for a child that never reads it. Not MADV_DONTFORK: the child would have
        # a hole there, put something else in it, and unmap that when it drops this object.
        with suppress(OSError):  # Linux before 4.14: the copy is slow, not wrong
            memory.madvise(_WIPE_ON_FORK)
        self.nbytes, self.pinned = nbytes, pinned
        self.tensor: Tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.array: np.ndarray = np.frombuffer(memory, dtype=np.uint8)
        if pinned:
            address = self.tensor.data_ptr()
            failed = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
            if failed:
                raise OffloadError(
                    f"CUDA refuses to page-lock {nbytes} bytes of host memory (error {failed})",
                    fix="lower host_bytes or staging_bytes below what the machine can lock",
                )
            weakref.finalize(self, _unlock, address).atexit = False


def _unlock(address: int) -> None:
    with suppress(Exception):  # CUDA may be gone before the last buffer
        torch.cuda.cudart().cudaHostUnregister(address)


class Buffers:
    """At most `count` buffers of one size, made when first needed; who wants one more waits until one is given back."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._unmade = count
        self._free: list[Buffer] = []
        self._changed = threading.Condition()

    def take(self, pinned: bool, timeout_s: float) -> Buffer | None:
        """None if none came free in time.

        After a copy of a CPU tensor a CUDA tensor may get a buffer that is not page-locked: slower, as right.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._free or self._unmade, timeout_s):
                return None
            if self._free:
                return self._free.pop()
            made = Buffer(self.nbytes, pinned)
            self._unmade -= 1
            return made

    def give(self, buffer: Buffer) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()
