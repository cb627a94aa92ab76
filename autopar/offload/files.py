"""A file without a name: it takes space while the process has it open, and is gone with the process, however that ends.

Where the filesystem knows no such file (O_TMPFILE), one is made and its name removed at once; a process killed between the two leaves an
empty file, which the next start removes. Reads and writes bypass the page cache (O_DIRECT) where the filesystem allows it: cached,
activations would take the very memory that they were moved out of. Linux only.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from autopar.offload.buffers import PAGE_BYTES, Buffer
from autopar.offload.errors import OffloadError

PREFIX = ".autopar-offload-"  # then the pid, a hyphen and random letters

log = logging.getLogger(__name__)


class Backend(Protocol):
    """What a store needs of a file. Offsets, sizes and addresses are multiples of PAGE_BYTES; several threads read and write at once."""

    why_buffered: str

    def grow(self, size: int) -> None: ...

    def write(self, offset: int, data: np.ndarray) -> None: ...

    def read(self, offset: int, data: np.ndarray) -> int:
        """Fills `data`; how many bytes there were."""
        ...

    def close(self) -> None: ...


Opener = Callable[[str], Backend]  # of a file in a directory


class NamelessFile:
    def __init__(self, directory: str) -> None:
        """why_buffered: why the page cache is not bypassed; empty if it is."""
        self.directory = Path(directory)
        self._size = 0
        if not self.directory.is_dir():
            raise OffloadError("there is no such directory", where=directory, fix="make it, or set nvme_directory to one on a local disk")
        remove_leftovers(self.directory)
        try:
            self.fd = self._open()
        except OSError as e:
            fix = "make it writable for this process, or set nvme_directory to one that is"
            raise OffloadError(f"no file can be made there ({e.strerror})", where=directory, fix=fix) from e
        self.why_buffered = self._bypass_cache()
        if self.why_buffered:
            log.warning("offload to %s goes through the page cache, which takes host memory and time: %s", directory, self.why_buffered)

    def grow(self, size: int) -> None:
        """Takes the space now, so that a full disk shows where a tensor is sent and not somewhere in a thread."""
        if size <= self._size:
            return
        try:
            os.posix_fallocate(self.fd, self._size, size - self._size)
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(self.fd, size)
        self._size = size

    def write(self, offset: int, data: np.ndarray) -> None:
        left = data.data
        while left:
            n = os.pwrite(self.fd, left, offset)
            left, offset = left[n:], offset + n

    def read(self, offset: int, data: np.ndarray) -> int:
        left = data.data
        while left:
            n = os.preadv(self.fd, [left], offset)
            left, offset = left[n:], offset + n
            if n == 0 or n % PAGE_BYTES:  # the file ends here; from the middle of a page O_DIRECT does not go on
                break
        return data.nbytes - len(left)

    def close(self) -> None:
        os.close(self.fd)

    def _open(self) -> int:
        try:
            return self._open_nameless()
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
        fd, name = tempfile.mkstemp(prefix=f"{PREFIX}{os.getpid()}-", dir=self.directory)
        with suppress(FileNotFoundError):  # another machine on a shared filesystem, where our pid is nobody's, was faster
            os.unlink(name)
        return fd

    def _open_nameless(self) -> int:
        return os.open(self.directory, os.O_TMPFILE | os.O_RDWR, 0o600)

    def _bypass_cache(self) -> str:
        """Tries it: some filesystems accept the flag and refuse the write."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwrite(self.fd, Buffer(PAGE_BYTES, pinned=False).array.data, 0)
        except OSError as e:
            if e.errno == errno.ENOSPC:
                return ""  # says nothing about the flag; `grow` will tell
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
            return f"the filesystem refuses O_DIRECT ({e.strerror})"
        finally:
            os.ftruncate(self.fd, 0)
        return ""


def remove_leftovers(directory: Path) -> None:
    """Removes what processes that are dead have left in the moment in which their file had a name."""
    for path in directory.glob(f"{PREFIX}*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and not _lives(int(pid)):
            with suppress(OSError):  # somebody else's, or removed by another process that starts now
                path.unlink()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
