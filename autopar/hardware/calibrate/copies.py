"""Copies between device and host memory, and files: bytes and seconds, by two sizes, of all processes at once.

Files are written and synchronised, then dropped from the system's cache and read. A file has no name while it is there: nothing is left behind.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator

import torch

from autopar.hardware.calibrate.timing import Clock, Sample

COPY_BYTES = (1 << 16, 1 << 20, 1 << 25)
FILE_BYTES = (1 << 20, 1 << 23, 1 << 26)
REPEATS = 3


def samples(clock: Clock, on_progress: Callable[[str], None]) -> Iterator[Sample]:
    on_progress("copies and files")
    for nbytes in COPY_BYTES:
        cuda = clock.device.type == "cuda"
        host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=cuda)
        device = torch.ones(nbytes, dtype=torch.uint8, device=clock.device)

        def out(host: torch.Tensor = host, device: torch.Tensor = device) -> None:
            host.copy_(device, non_blocking=True)

        def back(host: torch.Tensor = host, device: torch.Tensor = device) -> None:
            device.copy_(host, non_blocking=True)

        for call in (out, back):
            yield from (Sample("host", float(nbytes), s) for s in clock.windows(call))
    for nbytes in FILE_BYTES:
        for _ in range(REPEATS):
            yield from files(clock, nbytes)


def files(clock: Clock, nbytes: int) -> Iterator[Sample]:
    data = memoryview(bytes(nbytes))
    with tempfile.TemporaryFile(buffering=0) as f:
        clock.barrier()

        def write() -> None:
            _write(f.fileno(), data)
            os.fsync(f.fileno())

        written_s = _elapsed(write)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        clock.barrier()
        read_s = _elapsed(lambda: _read(f.fileno(), nbytes))
    yield Sample("nvme_write", float(nbytes), written_s)
    yield Sample("nvme_read", float(nbytes), read_s)


def _elapsed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _write(fd: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], done)


def _read(fd: int, nbytes: int) -> None:
    done = 0
    while done < nbytes:
        done += len(os.pread(fd, nbytes - done, done))
