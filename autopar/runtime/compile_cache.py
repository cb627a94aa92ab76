"""One rank of a node compiles; the others wait for it and then find everything in Inductor's cache on disk.

Graphs have the same text on every rank, so they have the same cache key. Without the wait, ranks that start together all miss
and all compile. Nobody waits for ever: the first rank reports failures, and while it compiles it counts up a heartbeat in the store.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from autopar import _torch
from autopar.distributed import presence
from autopar.errors import AutoparError

if TYPE_CHECKING:
    from autopar.runtime.artifacts import Kept

T = TypeVar("T")
BEAT_S = 5.0
# Compiling holds the interpreter's lock for seconds at a time, and its processes may starve each other of cores.
SILENCE_S = 300.0
# Before the first beat the rank may still be capturing and planning.
LATE_S = 1800.0


class CompileOnce:
    """Orders compilations of `ranks` through the process group's store. Each of them must call `run` the same number of times.

    name: theirs alone, the same on all of them.
    """

    def __init__(self, name: str, ranks: list[int]) -> None:
        self.name, self.ranks = name, ranks
        self.count = 0

    def run(self, work: Callable[[], T], kept: Kept | None = None) -> T:
        """kept: where what was compiled before is, and where it is to be kept."""
        if len(self.ranks) == 1:
            return work() if kept is None else kept.run(work, True)
        compiler, first = _node(self.ranks)
        key = f"{self.name}.compile.{compiler}.{self.count}"
        self.count += 1
        store: Any = _torch.default_store()
        if first:
            with _beating(store, f"{key}.alive"):
                try:
                    result = work() if kept is None else kept.run(work, compiler == self.ranks[0])
                except BaseException as e:
                    store.set(key, f"{type(e).__name__}: {e}"[:1000])
                    raise
                store.set(key, "")
            return result
        problem = _wait(store, key, lambda: bool(presence.ended_ranks([compiler])))
        if problem:
            raise AutoparError(
                f"compiling failed on the first rank of this node: {problem}", fix='see its traceback, or use backend="aot_eager"'
            )
        return work()


def _wait(store: Any, key: str, has_ended: Callable[[], bool] = lambda: False) -> str:
    """What the first rank reports: "" when it is done, or what went wrong. has_ended: whether that rank is known to be gone."""
    beats, heard, gone = -1, time.monotonic(), False
    while True:
        # The store of a host that is stopped does not even answer too late.
        said = presence.within(SILENCE_S, lambda: _look(store, key))
        if said is None:
            return f"the process group's store has not answered for {SILENCE_S:.0f} s"
        problem, now = said
        if problem is not None:
            return problem
        if gone:
            return "its process has ended"
        gone = has_ended()  # what it may have said until then is read once more
        if now != beats:
            beats, heard = now, time.monotonic()
        elif time.monotonic() - heard > (limit_s := SILENCE_S if beats else LATE_S):
            return f"it has given no sign of life for {limit_s:.0f} s"
        time.sleep(0.1)


def _look(store: Any, key: str) -> tuple[str | None, int]:
    """What the first rank reports, if it has, and how often its heart has beaten."""
    try:
        if store.check([key]):
            return store.get(key).decode(), 0
        return None, store.add(f"{key}.alive", 0)
    except dist.DistError as e:
        return f"the process group's store cannot be reached ({e})", 0


@contextmanager
def _beating(store: Any, key: str) -> Iterator[None]:
    done = threading.Event()

    def beat() -> None:
        store.add(key, 1)
        while not done.wait(BEAT_S):
            store.add(key, 1)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _node(ranks: list[int]) -> tuple[int, bool]:
    """The first of `ranks` on this rank's node, and whether that is this one (torchrun's LOCAL_RANK and LOCAL_WORLD_SIZE)."""
    rank = dist.get_rank()
    start = rank - int(os.environ.get("LOCAL_RANK", rank))
    first = min(r for r in ranks if start <= r <= rank)
    return first, first == rank
