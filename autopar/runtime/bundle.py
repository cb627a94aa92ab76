"""The file that holds what was compiled ahead, and how it is trusted.

A bundle is code: what is in it runs. So it is read only where nobody but this user, or root, can have written it, as ssh holds it with its keys: the file and its
folder belong to one of them, and neither group nor others may write to them. The file is asked by its descriptor, so it is the one that is read. It is a zip file,
written whole or not at all, with a sum of every member.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from autopar.errors import AutoparError

ENTRIES = "bundle.json"
MAX_ENTRIES_BYTES = 2**26


def refuse_open_to_others(path: Path, found: os.stat_result) -> None:
    """Raises AutoparError where another user than this one and root may have written it."""
    if os.name != "posix":
        return
    me = os.geteuid()
    if found.st_uid not in (me, 0):
        why, fix = (
            f"belongs to user {found.st_uid}, and this process is user {me}",
            "name a folder of your own, or copy the files: a copy is yours",
        )
    elif stat.S_IMODE(found.st_mode) & 0o022:
        why, fix = (
            f"can be written by others (mode {stat.S_IMODE(found.st_mode):o})",
            f"chmod go-w {path}, if you know what is in it, or name another folder",
        )
    else:
        return
    raise AutoparError(f"what was compiled ahead is code, and {path} {why}", where="artifacts=", fix=fix)


class Bundle:
    """One file. entries: what it says of its content, {} where there is no such file.

    Raises AutoparError where it cannot be trusted; DamagedError where it is not what was written.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.entries = path, dict[str, Any]()
        f = self._opened()
        if f is None:
            return
        try:
            with f, zipfile.ZipFile(f) as z:
                if z.getinfo(ENTRIES).file_size > MAX_ENTRIES_BYTES:
                    raise DamagedError(path)
                found = json.loads(z.read(ENTRIES))
        except (zipfile.BadZipFile, KeyError, ValueError, EOFError, NotImplementedError, RuntimeError) as e:
            raise DamagedError(path) from e
        if not isinstance(found, dict):
            raise DamagedError(path)
        self.entries = found

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Content by name."""
        f = self._opened()
        if f is None:
            raise DamagedError(self.path)
        try:
            with f, zipfile.ZipFile(f) as z:
                return {n: z.read(n) for n in names}
        except (zipfile.BadZipFile, KeyError, ValueError, EOFError, NotImplementedError, RuntimeError) as e:
            raise DamagedError(self.path) from e

    def write(self, entries: Mapping[str, Any], content: Mapping[str, bytes], kept: Iterable[str]) -> None:
        """Instead of what there is. kept: of the members that there are, those that stay. Raises OSError."""
        old = self.read(kept) if self.entries else {}
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_open_to_others(self.path.parent, self.path.parent.stat())
        handle, aside = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self.path.parent)  # for this user alone
        try:
            with os.fdopen(handle, "wb") as f, zipfile.ZipFile(f, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as z:
                z.writestr(ENTRIES, json.dumps(entries, indent=1))
                for name, data in {**old, **content}.items():
                    z.writestr(name, data)
            os.replace(aside, self.path)
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise
        self.entries = dict(entries)

    def _opened(self) -> BinaryIO | None:
        try:
            f = self.path.open("rb")
        except FileNotFoundError:
            return None
        except OSError as e:
            raise AutoparError(f"{self.path} cannot be read: {e.strerror}", where="artifacts=", fix="name another folder") from e
        try:
            refuse_open_to_others(self.path.parent, self.path.parent.stat())
            refuse_open_to_others(self.path, os.fstat(f.fileno()))
        except BaseException:
            f.close()
            raise
        return f


class DamagedError(Exception):
    """A bundle that is not what was written."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is damaged")
