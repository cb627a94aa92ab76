"""A slow network on one machine: `dist.init_process_group("slow")`, or `dist.new_group(backend="slow")`, after this package is imported.

On gloo a collective takes the core that would have computed meanwhile, so nothing can be hidden behind anything. Here gloo moves the data, and a collective is
complete when a link would have carried it:

    issue by the last rank, or the end of what the link still carries     +     alpha + bytes / rate

bytes: what a rank sends by ring algorithms. Waiting takes no CPU. A process has one link in each direction, whatever group a collective runs over, unless `route` names
more; links of other processes are not felt. A collective is late where gloo itself took longer than the link would: then the link is too fast for this machine, and what
was measured tells nothing.

The backend is one C++ file, compiled once (a minute) into `build/slow_link` by torch.utils.cpp_extension, which needs ninja and a C++ compiler: `build()`.
"""

from __future__ import annotations

import functools
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SOURCE = Path(__file__).parent / "slow_link.cpp"
BUILT = Path(__file__).resolve().parents[2] / "build" / "slow_link"
LINK = "net"


@dataclass(frozen=True)
class Stats:
    """Of this process, over all its links. count: transfers; bytes: sent; busy_s: what they took of their links; exposed_s: that threads stood in `wait` (waits for
    a future, as in DDP's reducer, are not seen); late_s: that gloo took longer than the link; carried_s: gloo's own time."""

    count: int
    bytes: float
    busy_s: float
    exposed_s: float
    late_s: float
    carried_s: float


def missing() -> str:
    """What the build needs and this machine lacks; empty where it can be built."""
    return ", ".join(what for what in ("ninja", "c++") if shutil.which(what) is None)


@functools.cache
def build() -> Any:
    """The compiled backend. Before processes start, so that they do not wait for each other's compiler."""
    from torch.utils.cpp_extension import load

    BUILT.mkdir(parents=True, exist_ok=True)
    flags = ["-O2", "-std=c++20", "-DUSE_C10D_GLOO"]
    return load("autopar_slow_link", [str(SOURCE)], build_directory=str(BUILT), extra_cflags=flags, extra_ldflags=["-lrt"])


def configure(alpha_s: float, bytes_per_s: float, link: str = LINK) -> None:
    """From now on `link` takes alpha_s seconds, and a second for bytes_per_s, for every transfer. Until this is called it takes none."""
    build().configure(link, alpha_s, bytes_per_s)


def stats() -> Stats:
    """Since the last call of this."""
    return Stats(*build().take())


_routes: list[Callable[[list[int]], str]] = []


def route(link_of: Callable[[list[int]], str]) -> None:
    """Groups that are made from now on use the link that `link_of` names, of their global ranks."""
    _routes[:] = [link_of]


def _backend(opts: Any, _options: Any = None) -> Any:
    rank, size = opts.group_rank, opts.group_size
    options = dist.ProcessGroupGloo._Options()
    # One thread: two damage the heap together (see `autopar._torch.orderly`), and a link carries one thing at a time anyway.
    options._devices, options._threads = [dist.ProcessGroupGloo.create_default_device()], 1
    options._timeout = opts.timeout or timedelta(minutes=30)
    gloo = dist.ProcessGroupGloo(opts.store, rank, size, options)
    name = torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8)
    gloo.broadcast([name], dist.BroadcastOptions()).wait()
    shared = "/autopar-slow-link-" + bytes(name.tolist()).hex()
    ranks = list(opts.global_ranks_in_group) or list(range(size))
    made = build().make(gloo, rank, size, shared, _routes[0](ranks) if _routes else LINK)
    gloo.barrier(dist.BarrierOptions()).wait()
    if rank == 0:
        build().forget(shared)  # all have it open: no file stays, however processes end
    return made


dist.Backend.register_backend("slow", _backend, extended_api=True, devices=["cpu"])
