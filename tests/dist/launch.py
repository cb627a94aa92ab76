"""`run(fn, n, *args)`: calls `fn(*args)` on n gloo processes and returns their results, by rank.

A child that raises fails the call with its traceback; one that hangs, with a timeout. `fn` must be importable (a module-level function).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _child(rank: int, n: int, store: str, fn: Callable[..., Any], args: tuple[Any, ...], results: Any, patience_s: float) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(n), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(n))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, n), rank=rank, world_size=n, timeout=timedelta(seconds=patience_s))
        # Pickled here: the queue would pass tensors as shared memory, which this process takes with it when it ends.
        results.put((rank, True, pickle.dumps(fn(*args))))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        return
    with contextlib.suppress(
        RuntimeError, ValueError
    ):  # a collective that failed on purpose has closed the group; or none is there any more
        dist.barrier()
        dist.destroy_process_group()


def run(fn: Callable[..., Any], n: int, *args: Any, timeout: float = 900, patience_s: float = 1800) -> list[Any]:
    """patience_s: how long collectives wait."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.dist.ready"])  # a rank starts in milliseconds: torch's compiler takes seconds to import
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        children = [context.Process(target=_child, args=(r, n, store, fn, args, results, patience_s)) for r in range(n)]
        for c in children:
            c.start()
        out: dict[int, Any] = {}
        end = time.monotonic() + timeout
        try:
            while len(out) < n:
                try:
                    rank, ok, value = results.get(timeout=1)
                except queue.Empty:
                    dead = [r for r, c in enumerate(children) if not c.is_alive() and r not in out]
                    if dead and results.empty():
                        _tell_crashes(children, "")
                        raise AssertionError(f"rank {dead[0]} died with exit code {children[dead[0]].exitcode}") from None
                    if time.monotonic() > end:
                        raise AssertionError(f"ranks {sorted(set(range(n)) - set(out))} gave no result in {timeout:.0f} s") from None
                    continue
                if not ok:
                    _tell_crashes(children, value)
                    raise AssertionError(f"rank {rank} failed:\n{value}")
                out[rank] = pickle.loads(value)
            for c in children:
                c.join(10)
        finally:
            for c in children:
                if c.is_alive():
                    c.kill()
        return [out[r] for r in range(n)]


def _tell_crashes(children: list[Any], said: str) -> None:
    """Was it another rank's crash that made this one fail?"""
    time.sleep(1)
    for r, c in enumerate(children):
        if c.exitcode in (-signal.SIGABRT, -signal.SIGSEGV):
            raise AssertionError(f"rank {r} died with exit code {c.exitcode}\n{said}")
