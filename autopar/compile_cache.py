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
from typing import Any, TypeVar

import torch.distributed as dist

from autopar import _torch
from autopar.errors import AutoparError

T = TypeVar("T")
BEAT_S = 5.0
# Compiling holds the interpreter's lock for seconds at a time, and its processes may starve each other of cores.
SILENCE_S = 300.0
# Before the first beat the rank may still be capturing and planning.
LATE_S = 1800.0


class CompileOnce:
    """Orders compilations through the process group's store. Every rank must call `run` the same number of times."""

    made = 0

    def __init__(self) -> None:
        # Modules are made in the same order on all ranks; the number keeps their keys apart.
        self.name = f"autopar.compile.{CompileOnce.made}"
        CompileOnce.made += 1
        self.count = 0

    def run(self, work: Callable[[], T]) -> T:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return work()
        node, first = _node()
        key = f"{self.name}.{node}.{self.count}"
        self.count += 1
        store: Any = _torch.default_store()
        if first:
            with _beating(store, f"{key}.alive"):
                try:
                    result = work()
                except BaseException as e:
                    store.set(key, f"{type(e).__name__}: {e}"[:1000])
                    raise
                store.set(key, "")
            return result
        problem = _wait(store, key)
        if problem:
            raise AutoparError(
                f"compiling failed on the first rank of this node: {problem}", fix='see its traceback, or use backend="aot_eager"'
            )
        return work()


def _wait(store: Any, key: str) -> str:
    """What the first rank reports: "" when it is done, or what went wrong."""
    beats, heard = -1, time.monotonic()
    try:
        while not store.check([key]):
            now = store.add(f"{key}.alive", 0)
            if now != beats:
                beats, heard = now, time.monotonic()
            elif time.monotonic() - heard > (limit_s := SILENCE_S if beats else LATE_S):
                return f"it has given no sign of life for {limit_s:.0f} s"
            time.sleep(0.1)
        return store.get(key).decode()
    except dist.DistError as e:
        return f"the process group's store cannot be reached ({e})"


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


def _node() -> tuple[int, bool]:
    """This rank's node, and whether it is the node's first rank (torchrun's LOCAL_RANK and LOCAL_WORLD_SIZE)."""
    rank = dist.get_rank()
    local = int(os.environ.get("LOCAL_RANK", rank))
    return rank - local, local == 0
