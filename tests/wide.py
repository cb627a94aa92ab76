"""Which cases of a matrix `make test` runs, and which only `make test-all`: most promises keep a case in the first; of some that take long there are wide cases only.

All wide cases take two hours and more on two cores; `make test-all TURN=2/8` runs the third of eight parts.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

wide = pytest.mark.wide


@dataclass(frozen=True)
class Turn:
    """The k-th of n parts of all wide tests, from 0 on."""

    k: int
    n: int

    @staticmethod
    def of(text: str) -> Turn:
        """Of "2/5". Raises pytest.UsageError."""
        k, _, n = text.partition("/")
        if not (k.isdecimal() and n.isdecimal() and int(n)):
            raise pytest.UsageError(f"--turn {text!r} is not k/n, as 2/5 for the third of five parts")
        return Turn(int(k) % int(n), int(n))

    def has(self, name: str) -> bool:
        """A test is in the same part whatever others there are."""
        return zlib.crc32(name.encode()) % self.n == self.k


def cases(values: Iterable[Any], now: Container[Any]) -> list[Any]:
    """`values` for `pytest.mark.parametrize`; those that are not in `now` are wide."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=() if v in now else wide) for v in values]
