"""Amounts of memory as people write them: "70GB", "512 MiB", "8e10"."""

from __future__ import annotations

import math
import re

from autopar.errors import AutoparError
from autopar.text.strict_json import short

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}b": 1000**i for i, p in enumerate("kmgtp", 1)}
_UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgtp", 1)}
_FORM = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[+]?[0-9]{1,2})?)\s*([a-z]{0,8})")
_HOW = 'write a number of bytes, or one with a unit: "70GB" (1000^3), "64GiB" (1024^3), "512MiB"'


class SizeError(AutoparError):
    """A text that names no amount of memory."""


def parse_bytes(text: str, where: str = "") -> int:
    """The number of bytes that `text` names."""
    m = _FORM.fullmatch(text.strip().lower())
    if m is None:
        raise SizeError(f"{short(text)!r} is not an amount of memory", where=where, fix=_HOW)
    if m[2] not in _UNITS:
        # "70G" could mean either; a budget that is 7% off is not to be guessed.
        raise SizeError(
            f"{short(text)!r} has the unit {m[2]!r}, which is not one of kB, MB, GB, TB, KiB, MiB, GiB, TiB", where=where, fix=_HOW
        )
    size = float(m[1]) * _UNITS[m[2]]
    if not math.isfinite(size) or size > 1 << 60:
        raise SizeError(f"{short(text)!r} is more memory than there is", where=where, fix=_HOW)
    if size < 1:
        raise SizeError(f"{short(text)!r} is less than a byte", where=where, fix=_HOW)
    return round(size)


def format_bytes(n: float) -> str:
    """1.5e9 -> "1.50 GB"."""
    return format_amount(n, "B")


def format_amount(n: float, unit: str) -> str:
    """8.018e10, "FLOP/s" -> "80.18 GFLOP/s"."""
    size, prefix = float(n), ""
    for larger in ("k", "M", "G", "T", "P"):
        if abs(size) < 1000:
            break
        size, prefix = size / 1000, larger
    return f"{size:.2f} {prefix}{unit}" if prefix else f"{size:.0f} {unit}"
