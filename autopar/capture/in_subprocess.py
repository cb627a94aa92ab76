"""Two results at once, one of them from a forked copy of this process.

Only for a process that is the caller's alone, as the command line's is: a copy has neither the other threads nor what they were about to release,
and CUDA does not survive it. So nothing depends on the copy: if it fails, dies or does not answer, what it was to find is found here, and what is raised
is raised here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

PATIENCE_S = 10.0  # beside as long again as the other half took: after that the copy is taken to hang


def is_worthwhile() -> bool:
    """Whether a copy would have a core of its own. Elsewhere than on Linux the system's own libraries start threads."""
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1


def beside(first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """`first()` and `second()`, and the errors of calling them in this order. `first` runs in the copy: its result must pickle."""
    began = time.monotonic()
    with _copy(first) as answer:
        try:
            b = second()
        except Exception:
            answer(0.0)  # an error of `first` comes first
            raise
        return answer(time.monotonic() - began + PATIENCE_S), b


@contextlib.contextmanager
def _copy(find: Callable[[], A]) -> Iterator[Callable[[float], A]]:
    """Starts a copy that runs `find`; gives what waits so many seconds for its result, and without one finds it here."""
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(find, its), daemon=True)
    process.start()
    its.close()

    def answer(seconds: float) -> A:
        try:
            if mine.poll(seconds):
                found: A = mine.recv()
                return found
        except (EOFError, OSError, pickle.UnpicklingError):  # it failed, or died while it told
            pass
        return find()

    try:
        yield answer
    finally:
        process.kill()
        process.join()
        mine.close()


def _run(find: Callable[[], A], its: Connection) -> None:
    """What the copy does. It says nothing but its result: what else it has to say is said again where it fails."""
    signal.set_wakeup_fd(-1)  # the command line's, whose thread is not here
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(os.devnull, "w") as nothing, contextlib.suppress(Exception):
        sys.stdout = sys.stderr = nothing
        its.send(find())


def _end_with_parent() -> None:
    """However that ended: Ctrl-C, a kill."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
