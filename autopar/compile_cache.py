"""One rank of a node compiles; the others wait for it and then find everything in Inductor's cache on disk.

Graphs have the same text on every rank, so they have the same cache key. Without the wait, ranks that start together all miss
and all compile.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from autopar import _torch
from autopar.errors import AutoparError

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)


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
            try:
                result = work()
            except BaseException as e:
                store.set(key, f"{type(e).__name__}: {e}"[:1000])
                raise
            store.set(key, "")
            return result
        store.wait([key], TIMEOUT)
        problem = store.get(key).decode()
        if problem:
            raise AutoparError(
                f"compiling failed on the first rank of this node: {problem}", fix='see its traceback, or use backend="aot_eager"'
            )
        return work()


def _node() -> tuple[int, bool]:
    """This rank's node, and whether it is the node's first rank (torchrun's LOCAL_RANK and LOCAL_WORLD_SIZE)."""
    rank = dist.get_rank()
    local = int(os.environ.get("LOCAL_RANK", rank))
    return rank - local, local == 0
