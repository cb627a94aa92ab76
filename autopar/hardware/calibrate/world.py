"""The processes that measure: children of this one, which meet at a store in it, or those that torchrun started.

Children are ended with their parent, however it ends: each watches for it. Nothing is written to disk.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.errors import AutoparError

OnProgress = Callable[[str], None]
T = TypeVar("T")
Measure = Callable[[torch.device, int, float, OnProgress], T]  # device, processes of a node, seconds, progress
HOST = "127.0.0.1"
END_S = 5.0  # that a process has to end by itself once it has answered
GRACE_S = 300.0  # beyond the time that measurements take: start, imports, and collectives that hang


def spawned(fn: Measure[T], processes: int | None, seconds: float, on_progress: OnProgress) -> list[T]:
    """`fn` on `processes` children: what each returns."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    n = processes if processes is not None else gpus or os.cpu_count() or 1
    if n < 1 or (gpus and n > gpus):
        has = f"it has {gpus} GPUs" if gpus else "at least one is needed"
        raise AutoparError(f"{n} processes cannot measure this machine: {has}", where="--processes", fix="leave it out, or give fewer")
    on_progress(f"{n} process{'es' * (n > 1)} on {'GPUs' if gpus else 'the CPU'}")
    store = dist.TCPStore(HOST, 0, n + 1, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    try:
        for rank in range(n):
            mine, theirs = context.Pipe(duplex=False)
            child = context.Process(target=_child, args=(fn, rank, n, store.port, gpus > 0, seconds, theirs), daemon=True)
            child.start()
            theirs.close()
            pipes.append(mine)
            children.append(child)
        found = _results(pipes, seconds + GRACE_S, on_progress)
        for c in children:  # what they leave to be tidied up at their end, they tidy up
            c.join(END_S)
        return found
    finally:
        for c in children:
            c.kill()
        for c in children:
            c.join()


def _results(pipes: list[Connection], patience_s: float, on_progress: OnProgress) -> list[Any]:
    out: dict[int, Any] = {}
    while len(out) < len(pipes):
        ready = wait([p for r, p in enumerate(pipes) if r not in out], patience_s)
        if not ready:
            raise AutoparError(
                "Measuring does not come to an end", fix="look whether something else keeps the machine busy; give fewer --processes"
            )
        for p in ready:
            assert isinstance(p, Connection)
            rank = pipes.index(p)
            try:
                what, value = pipes[rank].recv()
            except EOFError:
                fix = "look for what the system's log says of it; with fewer --processes less memory is needed"
                raise AutoparError(f"The measuring process {rank} was ended by the system", fix=fix) from None
            if what == "said":
                on_progress(value)
            elif what == "failed":
                raise AutoparError(f"The measuring process {rank} failed: {value.strip().splitlines()[-1]}", where=value.strip()[-2000:])
            else:
                out[rank] = pickle.loads(value)
    return [out[r] for r in range(len(pipes))]


def _child(fn: Measure[Any], rank: int, n: int, port: int, gpu: bool, seconds: float, results: Any) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        device = _device(rank, n, gpu)
        if n > 1:
            store = dist.TCPStore(HOST, port, n + 1, is_master=False)
            dist.init_process_group(
                "nccl" if gpu else "gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=seconds + GRACE_S)
            )
        found = fn(device, n, seconds, (lambda line: results.send(("said", line))) if rank == 0 else lambda line: None)
        results.send(("done", pickle.dumps(found)))
    except BaseException:
        results.send(("failed", traceback.format_exc()))
        raise SystemExit(1) from None
    if n > 1:
        dist.destroy_process_group()


def _device(rank: int, n: int, gpu: bool) -> torch.device:
    """One thread for a process of several, as torchrun has it, unless the user says otherwise."""
    if gpu:
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    if n > 1 or "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    return torch.device("cpu")


def joined(fn: Measure[T], seconds: float, on_progress: OnProgress) -> list[T] | None:
    """`fn` on the processes that torchrun started, on every node: what each returns at the first, None at the others."""
    rank, n, local = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    gpu = torch.cuda.is_available()
    device = _device(int(os.environ["LOCAL_RANK"]), n, gpu)
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if gpu else "gloo")
    found = fn(device, local, seconds, on_progress if rank == 0 else lambda line: None)
    every: list[Any] = [None] * n
    dist.all_gather_object(every, found)
    if ours:
        dist.destroy_process_group()
    return every if rank == 0 else None
