"""The activations of one compiled model that are away from its device.

    offload -> Parcel -> offloaded      x's data leaves; x's memory may be used again
    reload  -> Load   -> reloaded       it comes back to new memory; the parcel stays as it was

A Parcel's data is kept as long as the Parcel lives, and can be loaded any number of times. A Load holds its Parcel.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.offload.disk import Disk
from autopar.offload.errors import OffloadError
from autopar.offload.files import NamelessFile, Opener
from autopar.offload.host import Host
from autopar.offload.medium import Counters, Medium
from autopar.offload.streams import Streams


@dataclass(frozen=True)
class OffloadSettings:
    """host_bytes, nvme_bytes: most that is taken for activations in memory and in the file, rounding included.
    nvme_directory: where the file is; None: there is none.
    threads: that read and write it; staging_bytes: host memory that data on its way to it passes through; each thread has 8 MiB more
    for reading.
    timeout_s: the longest wait for the disk; checksum: of every byte written, looked at when it is read.
    """

    host_bytes: int = 0
    nvme_directory: str | None = None
    nvme_bytes: int = 0
    threads: int = 4
    staging_bytes: int = 256 << 20
    timeout_s: float = 120.0
    checksum: bool = True


@dataclass(eq=False)
class Parcel:
    store: Store
    medium: Medium
    kept: Any
    nbytes: int

    def __post_init__(self) -> None:
        weakref.finalize(self, self.medium.forget, self.kept).atexit = False


@dataclass(eq=False)
class Load:
    parcel: Parcel
    flight: Any
    out: Tensor | None  # None once it is handed out

    def __post_init__(self) -> None:
        weakref.finalize(self, self.parcel.medium.forget, self.flight).atexit = False


class Store:
    def __init__(self, name: str, settings: OffloadSettings, open_file: Opener = NamelessFile) -> None:
        self.name, self.settings = name, settings
        self._pid, self._closed = os.getpid(), False
        streams = Streams()
        self._media: dict[str, Medium] = {"host": Host(name, settings.host_bytes, streams)}
        self.why_buffered = ""  # why the file goes through the page cache; empty if it does not, or there is none
        if settings.nvme_directory is not None:
            file = open_file(settings.nvme_directory)
            self.why_buffered = file.why_buffered
            self._media["nvme"] = Disk(
                name, settings.nvme_directory, file, streams, limit_bytes=settings.nvme_bytes, staging_bytes=settings.staging_bytes,
                threads=settings.threads, timeout_s=settings.timeout_s, checksum=settings.checksum,
            )  # fmt: skip

    def offload(self, x: Tensor, medium: str) -> Parcel:
        self._check()
        place = self._media.get(medium)
        if place is None:
            where, fix = f"offload store {self.name!r}", f"use one of {sorted(self._media)}; for nvme set nvme_directory"
            raise OffloadError(f"there is no {medium!r} to move activations to", where=where, fix=fix)
        return Parcel(self, place, place.send(x), x.numel() * x.element_size())

    def offloaded(self, parcel: Parcel, x: Tensor) -> None:
        self._check()
        parcel.medium.sent(parcel.kept, x.device)

    def reload(self, parcel: Parcel, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Load:
        self._check()
        out = torch.empty(size, dtype=dtype, device=device)
        assert out.numel() * out.element_size() == parcel.nbytes, f"{parcel.nbytes} bytes are no {dtype} of size {tuple(size)}"
        return Load(parcel, parcel.medium.fetch(parcel.kept, out), out)

    def reloaded(self, load: Load, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of its own for every call: one load is handed out once, after that it is loaded again."""
        self._check()
        if load.out is None:
            load = self.reload(load.parcel, size, dtype, device)
        load.parcel.medium.fetched(load.flight)
        out, load.out = load.out, None
        assert out is not None
        return out

    def counters(self, medium: str) -> Counters:
        """All zero for a medium that is not there."""
        return self._media[medium].counters() if medium in self._media else Counters()

    def close(self) -> None:
        """Ends the threads and gives up the file; what is still away is lost."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        for medium in self._media.values():
            medium.close()

    def _check(self) -> None:
        where = f"offload store {self.name!r}"
        if self._pid != os.getpid():
            fix = "run the model in the process that compiled it; a forked child has neither its threads nor its memory"
            raise OffloadError("this process is a fork of the one whose activations these are", where=where, fix=fix)
        if self._closed:
            raise OffloadError("the store is closed", where=where, fix="run backward before closing the model")
