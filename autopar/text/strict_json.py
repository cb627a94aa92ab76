"""Reads JSON that a stranger may have written, in bounded time and memory.

The standard parser is kept (it is in C, and a plan's file is a few megabytes), fenced by what it lets through: keys given twice, NaN and
infinities, integers whose conversion is quadratic in their digits, nesting that exhausts the stack, and files that are short on disk
but become gigabytes of small objects (`[[],[],...`: twenty bytes of memory for every byte).
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

MAX_BYTES = 256 << 20
MAX_VALUES = 4_000_000  # an object costs up to 100 bytes or so: at most 400 MB
MAX_KEYS = 100_000  # of one object: a schema complains of every key it does not know, at a kilobyte each
MAX_DIGITS = 20  # 2^63 has 19


class JsonError(ValueError):
    """What is wrong with the text, in one clause."""


def read_bytes(path: Path) -> bytes:
    """The file's bytes, refused before they are read if there are too many; OSError if it cannot be read."""
    with path.open("rb") as f:
        if os.fstat(f.fileno()).st_size > MAX_BYTES:
            raise JsonError(f"it has more than {MAX_BYTES >> 20} MB")
        data = f.read(MAX_BYTES + 1)  # a device or a pipe has no size
    if len(data) > MAX_BYTES:
        raise JsonError(f"it has more than {MAX_BYTES >> 20} MB")
    return data


def parse(data: bytes) -> Any:
    """The value that `data` spells, or JsonError."""
    if len(data) > MAX_BYTES:
        raise JsonError(f"it has more than {MAX_BYTES >> 20} MB")
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise JsonError(f"it has more than {MAX_VALUES:,} values")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise JsonError(f"byte {e.start} is not UTF-8 text") from None
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_int, parse_float=_float, parse_constant=_constant)
    except json.JSONDecodeError as e:
        if e.msg.startswith("Unterminated") or e.pos >= len(text.rstrip()):
            raise JsonError(f"it ends in the middle, after {len(data)} bytes") from None
        raise JsonError(f"it is not JSON at character {e.pos}: {e.msg}") from None
    except RecursionError:
        raise JsonError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise JsonError(f"an object in it has more than {MAX_KEYS:,} keys")
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for k, _ in pairs:
            if k in seen:
                raise JsonError(f"the key {short(k)!r} is given twice in one object")
            seen.add(k)
    return out


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise JsonError(f"it has a number of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    x = float(text)
    if not math.isfinite(x):
        raise JsonError(f"the number {short(text)} is too large")
    return x


def _constant(text: str) -> float:
    raise JsonError(f"it holds {text}, which is no JSON number")


def short(text: str, limit: int = 80) -> str:
    """Not all of what a stranger wrote is repeated."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
