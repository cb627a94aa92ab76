"""What memory a plan may need: `memory=` of `compile` and `plan`."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import AutoparError

FASTEST, LEAST = NAMES = "fastest", "least"
_HOW = 'give the bytes that a device may use, such as memory=60e9, or "fastest" or "least"'


@dataclass(frozen=True)
class Memory:
    """budget_bytes: of a device; None: what it has, less its reserve. least: not the fastest plan within it, but that of the smallest peak.

    A number is a budget; "fastest" is the fastest plan that fits the device, as is None; "least" the plan with the smallest peak that is found, and
    of those the fastest.
    """

    budget_bytes: float | None = None
    least: bool = False

    @staticmethod
    def of(x: float | str | None) -> Memory:
        """The argument as the user wrote it."""
        if x is None or x == FASTEST:
            return Memory()
        if x == LEAST:
            return Memory(least=True)
        if isinstance(x, str):
            raise AutoparError(f"memory={x!r} is not known", fix=_HOW)
        if isinstance(x, bool) or not x > 0:
            raise AutoparError(f"memory={x!r} is no number of bytes", fix=_HOW)
        return Memory(float(x))
