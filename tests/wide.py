"""Which cases of a matrix `make test` runs, and which only `make test-all`: each promise keeps a case of its own in the first."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

wide = pytest.mark.wide


def cases(values: Iterable[Any], now: Container[Any]) -> list[Any]:
    """`values` for `pytest.mark.parametrize`; those that are not in `now` are wide."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=() if v in now else wide) for v in values]
