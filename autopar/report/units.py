"""Bytes, counts and shares as people read them. (Seconds: `autopar.text.times`.)"""

from __future__ import annotations

from autopar.text.sizes import format_bytes

__all__ = ["count", "format_bytes", "percent", "signed"]


def count(n: float) -> str:
    """327,412.6 -> "327,413"; 4.31e9 -> "4.31 billion"."""
    for scale, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if n >= 10 * scale:
            return f"{n / scale:,.1f} {word}"
        if n >= scale:
            return f"{n / scale:,.2f} {word}"
    return f"{n:,.0f}" if n >= 100 or n == round(n) else f"{n:,.2f}"


def percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.0995 or share == 0 else f"{share:.2%}"


def signed(share: float) -> str:
    """A relative difference: "+3.1%"."""
    return "equal" if abs(share) < 5e-5 else f"{share:+.1%}" if abs(share) >= 0.01 else f"{share:+.2%}"
