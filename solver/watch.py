"""What planning may take: seconds of the clock, and memory. Whoever plans sets both; loops that may be long ask, and so does the wait for the solver.

The solver looks at its own clock between steps, some of which last minutes. It therefore runs in a thread of its own. Where it does not stop in time, nobody
waits for it any longer: its answer is given up, not the plan.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from autopar.errors import AutoparError
from autopar.text.sizes import format_bytes

A = TypeVar("A")
POLL_S = 0.2  # between two looks at the memory
LATE_S, LATE = 0.5, 0.1  # seconds, and a share of its time: so much longer the solver is waited for


class PlanningMemoryError(AutoparError):
    """Planning needs more memory than it may take."""


@dataclass(frozen=True)
class Watch:
    """until: on `time.perf_counter`; most_bytes: of the whole process."""

    until: float = math.inf
    most_bytes: float = math.inf


NOTHING = Watch()
_watch: contextvars.ContextVar[Watch] = contextvars.ContextVar("autopar_watch", default=NOTHING)


@contextlib.contextmanager
def watching(until: float | None = None, most_bytes: float | None = None) -> Iterator[None]:
    """What is not given stays as it was."""
    now = _watch.get()
    token = _watch.set(Watch(now.until if until is None else until, now.most_bytes if most_bytes is None else most_bytes))
    try:
        yield
    finally:
        _watch.reset(token)


def check() -> None:
    """Raises TimeoutError or PlanningMemoryError where there is no more."""
    now = _watch.get()
    if time.perf_counter() > now.until:
        raise TimeoutError("the time that planning may take is over")
    check_memory(now.most_bytes)


def check_memory(most_bytes: float) -> None:
    if math.isfinite(most_bytes) and (taken := resident_bytes()) > most_bytes:
        raise PlanningMemoryError(
            f"Planning takes {format_bytes(taken)} of memory, more than the {format_bytes(most_bytes)} that it may",
            where='options={"memory_bytes": ..}, or --planning-memory',
            fix="allow more, or plan for a mesh with fewer axes (neighbours joined: 4x2x8 as 8x8) or for fewer layers",
        )


def resident_bytes() -> int:
    """Memory that the process has now; where the system does not say, the most that it had."""
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_time(call: Callable[[], A], seconds: float) -> A:
    """What `call` returns, which stops by itself after `seconds`, or a little later. Raises TimeoutError if it does not, and what it raises."""
    most_bytes = _watch.get().most_bytes
    result: list[A] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=run, name="autopar solver", daemon=True)
    end = time.perf_counter() + seconds * (1 + LATE) + LATE_S
    thread.start()
    while thread.is_alive():
        left = end - time.perf_counter()
        if left <= 0:
            raise TimeoutError(f"the solver has not stopped {LATE_S:.1f} s after its {seconds:.0f} s")
        thread.join(min(left, POLL_S))
        check_memory(most_bytes)
    if raised:
        raise raised[0]
    return result[0]
