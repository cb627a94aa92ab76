"""A few threads that do jobs in the order in which they were given.

Not `concurrent.futures`: its threads are waited for when the interpreter ends, and one that hangs in a dead disk would keep the process
from ending.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], None]


class Workers:
    def __init__(self, count: int, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(count)]
        for t in self._threads:
            t.start()

    def submit(self, job: Job) -> None:
        """`job` must not raise: there is nobody to tell."""
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Ends the threads once the jobs given so far are done; whether they ended in time."""
        for _ in self._threads:
            self._jobs.put(None)
        until = time.monotonic() + timeout_s
        for t in self._threads:
            t.join(max(0.0, until - time.monotonic()))
        return not any(t.is_alive() for t in self._threads)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds tensors, and the next may be long in coming
