"""Lengths of time as people read them: "931.2 ms", "16.93 s", "8 min 5 s"."""

from __future__ import annotations

_LONG = (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1))


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
