"""Rows that routed experts get from other ranks, told to whoever asks while a step runs.

The operator has them on the host anyway: what is exchanged has to be allocated. So nothing waits for a device because of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Hears = Callable[[int, int], None]

_hears: ContextVar[Hears | None] = ContextVar("hears", default=None)


def tell(received: int, even: int) -> None:
    """received: rows that a rank's experts get; even: as many as they would get if all ranks got the same."""
    if (hears := _hears.get()) is not None:
        hears(received, even)


@contextmanager
def heard(hears: Hears) -> Iterator[None]:
    """`hears` is called, in this thread, with what each operator tells, in the order they run."""
    token = _hears.set(hears)
    try:
        yield
    finally:
        _hears.reset(token)
