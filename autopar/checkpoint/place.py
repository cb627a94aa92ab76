"""Where checkpoints lie: a folder, or a URL of fsspec's. torch.distributed.checkpoint writes to both.

What a save needs of a place is little: a file that is put there is there as a whole or not at all, and what was put before it stays before it. A rename gives
that on disks, also on shared ones; object stores have it anyway.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast


class Place(Protocol):
    """A folder that may not exist yet."""

    @property
    def id(self) -> Path | str:
        """What torch.distributed.checkpoint knows it by."""

    def inside(self, name: str) -> Place: ...

    def exists(self) -> bool: ...

    def names(self) -> list[str]:
        """Of what is in it; empty where it does not exist."""

    def open(self, name: str) -> BinaryIO:
        """A file to read."""

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""

    def make(self) -> None: ...

    def settle(self) -> None:
        """Returns when the names of the files in it would survive a loss of power."""

    def put(self, name: str, data: bytes) -> None:
        """A file, whole or not at all, in the place of any of that name."""

    def remove(self, name: str) -> None:
        """A file or folder, if it is there."""


def place_of(path: str | os.PathLike[str]) -> Place:
    return Remote(path) if isinstance(path, str) and "://" in path else Local(Path(path))


class Local:
    def __init__(self, folder: Path) -> None:
        self.folder = self.id = folder

    def __str__(self) -> str:
        return str(self.folder)

    def inside(self, name: str) -> Local:
        return Local(self.folder / name)

    def exists(self) -> bool:
        return self.folder.is_dir()

    def names(self) -> list[str]:
        return sorted(os.listdir(self.folder)) if self.folder.is_dir() else []

    def open(self, name: str) -> BinaryIO:
        return (self.folder / name).open("rb")

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def settle(self) -> None:
        with contextlib.suppress(OSError):  # not all file systems let one open a folder
            handle = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def put(self, name: str, data: bytes) -> None:
        temporary = self.folder / f"{name}.tmp"
        with temporary.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(self.folder / name)
        self.settle()

    def remove(self, name: str) -> None:
        at = self.folder / name
        if at.is_dir() and not at.is_symlink():
            shutil.rmtree(at)
        else:
            at.unlink(missing_ok=True)


class Remote:
    """By fsspec, which torch requires."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.id = url.rstrip("/")
        self.fs: Any
        self.fs, self.root = url_to_fs(self.id)

    def __str__(self) -> str:
        return self.id

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def inside(self, name: str) -> Remote:
        return Remote(f"{self.id}/{name}")

    def exists(self) -> bool:
        self.fs.invalidate_cache()
        return bool(self.fs.isdir(self.root))

    def names(self) -> list[str]:
        self.fs.invalidate_cache()
        return sorted(str(n).rstrip("/").rpartition("/")[2] for n in self.fs.ls(self.root, detail=False)) if self.exists() else []

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, self.fs.open(self._at(name), "rb"))

    def has(self, name: str) -> bool:
        self.fs.invalidate_cache()
        return bool(self.fs.isfile(self._at(name)))

    def make(self) -> None:
        self.fs.makedirs(self.root, exist_ok=True)

    def settle(self) -> None:
        """What was put is there."""

    def put(self, name: str, data: bytes) -> None:
        self.fs.pipe_file(self._at(name), data)

    def remove(self, name: str) -> None:
        if self.fs.exists(self._at(name)):
            self.fs.rm(self._at(name), recursive=True)
