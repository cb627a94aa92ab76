"""Axes of the pictures: round numbers, grid lines, and coordinates in few digits."""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.report.html import Markup, join, tag
from autopar.report.units import format_bytes
from autopar.text.times import format_time


def num(x: float) -> str:
    """A coordinate: a tenth of a unit is less than anybody sees."""
    return f"{x:.1f}".removesuffix(".0")


def round_steps(most: float, lines: int) -> list[float]:
    """0 and the round numbers up to `most`, about so many: 1, 2 or 5 times a power of ten apart."""
    if most <= 0:
        return [0.0]
    power = 10 ** math.floor(math.log10(most / lines))
    step = next(k * power for k in (1, 2, 5, 10) if k * power * lines >= most)
    return [i * step for i in range(int(most / step * (1 + 1e-9)) + 1)]


def grid_bytes(left: float, right: float, most: float, y: Callable[[float], float]) -> Markup:
    parts = []
    for n in round_steps(most, 5):
        parts.append(tag("line", class_="grid", x1=num(left), x2=num(right), y1=num(y(n)), y2=num(y(n))))
        parts.append(tag("text", _short(format_bytes(n)), class_="tick", x=num(left - 7), y=num(y(n) + 4), text_anchor="end"))
    return join(parts)


def grid_seconds(left: float, width: float, bottom: float, top: float, seconds: float, start: float = 0.0) -> Markup:
    """start: what the left end is called, in seconds."""
    parts = []
    for x_s in round_steps(seconds, 8):
        x = left + width * x_s / seconds
        parts.append(tag("line", class_="grid", x1=num(x), x2=num(x), y1=num(top), y2=num(bottom)))
        last = x > left + width - 30
        parts.append(
            tag(
                "text",
                "0" if not x_s else _short(format_time(x_s)),
                class_="tick",
                x=num(x),
                y=num(bottom + 16),
                text_anchor="end" if last else "middle",
            )
        )
    return join(parts)


def _short(said: str) -> str:
    """ "20.00 GB" -> "20 GB"."""
    number, _, unit = said.partition(" ")
    return f"{number.rstrip('0').rstrip('.')} {unit}" if "." in number and " " not in unit else said
