"""Lengths of time as people read them, "931.2 ms", "16.93 s", "8 min 5 s", and write them: "3h", "90 s"."""

from __future__ import annotations

import math
import re

from autopar.errors import AutoparError
from autopar.text.strict_json import short

_LONG = (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1))

_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_FORM = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[+-]?[0-9]{1,2})?)\s*([a-z]{1,3})")


def parse_time(text: str, where: str = "") -> float:
    """ "3h" -> 10800.0; inf for "never". Raises AutoparError, also for a number without a unit."""
    plain = text.strip().lower()
    if plain == "never":
        return math.inf
    m = _FORM.fullmatch(plain)
    if m is None or m[2] not in _UNITS:
        raise AutoparError(
            f"{short(text)!r} is no length of time", where=where, fix='write it with ms, s, min, h or d: "90s", "3h"; or never'
        )
    return float(m[1]) * _UNITS[m[2]]


def format_time(seconds: float) -> str:
    """Four digits below a minute, two units from there: 0.9312 -> "931.2 ms", 485.004 -> "8 min 5 s"."""
    if seconds < 0:
        return f"-{format_time(-seconds)}"
    rounded = float(f"{seconds:.4g}")
    if rounded >= 60:
        whole = round(seconds)
        name, size, less, part = next(row for row in _LONG if whole >= row[1])
        exact = round(whole / part) * part
        # What is rounded up may be one of the larger unit: 86399 s is 1 d 0 h, not 24 h 0 min.
        return f"{whole // size} {name} {whole % size // part} {less}" if exact == whole else format_time(exact)
    if rounded >= 1:
        return f"{_digits(rounded)} s"
    if rounded >= 1e-3:
        return f"{_digits(rounded * 1e3)} ms"
    return f"{_digits(rounded * 1e6)} us" if rounded else "0 s"


def _digits(x: float) -> str:
    """Four of them."""
    return f"{x:.{3 if x < 9.9995 else 2 if x < 99.995 else 1}f}"
