"""What planning may take: time and memory."""

from __future__ import annotations

import time

import pytest

from autopar.solver.watch import PlanningMemoryError, check, in_time, watching


def test_time_that_is_over_is_an_error_where_it_is_asked() -> None:
    check()
    with watching(until=time.perf_counter() - 1.0), pytest.raises(TimeoutError, match="is over"):
        check()
    check()


def test_memory_that_is_not_enough_is_an_error_that_says_so() -> None:
    with watching(most_bytes=1e6), pytest.raises(PlanningMemoryError, match=r"more than the 1\.0+ MB(?s:.*)--planning-memory"):
        check()
    with watching(most_bytes=1e15):
        check()


def test_what_does_not_stop_is_not_waited_for() -> None:
    start = time.perf_counter()
    with pytest.raises(TimeoutError, match="has not stopped"):
        in_time(lambda: time.sleep(30), 0.1)
    assert time.perf_counter() - start < 20


def test_what_is_called_in_time_returns_and_raises_as_it_does() -> None:
    assert in_time(lambda: 3, 1.0) == 3
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 // 0, 1.0)


def test_memory_is_looked_at_while_the_solver_runs() -> None:
    with watching(most_bytes=1e6), pytest.raises(PlanningMemoryError):
        in_time(lambda: time.sleep(5), 10.0)
