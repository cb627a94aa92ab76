"""What one process measures, in order; and what came of it, with what it was measured on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from autopar.calibrate import copies, wires, work
from autopar.calibrate.timing import Clock, Sample

WINDOWS_IN_ALL = 2500  # of the whole time, one window is this part
FOR_WORK, FOR_COLLECTIVES = 0.35, 0.5  # the rest is for copies, files and what compute loses beside a collective


@dataclass(frozen=True)
class Measured:
    """samples: of one process, or of all together. device: as its driver calls it; memory_bytes: of a device; host_bytes: of a node; threads: that compute
    in one process; processes: of a node; contention: see `wires`; seconds: that it took."""

    samples: tuple[Sample, ...]
    device_type: str
    device: str
    memory_bytes: float
    host_bytes: float
    threads: int
    processes: int
    nodes: int
    contention: tuple[float, ...]
    seconds: float


def measure(device: torch.device, local: int, seconds: float, tell: Callable[[str], None]) -> Measured:
    """By one process of a group that is up. local: processes of a node."""
    began = time.monotonic()
    clock = Clock(device, seconds / WINDOWS_IN_ALL)
    clock.barrier()
    found = list(work.samples(clock, FOR_WORK * seconds, tell))
    found += copies.samples(clock, tell)
    world = dist.get_world_size() if dist.is_initialized() else 1
    beside: tuple[float, ...] = ()
    if world > 1:
        tell("compute beside a collective")
        beside = wires.contention(clock)
        found += wires.samples(clock, wires.SIZES, FOR_COLLECTIVES * seconds, local, tell)
    host = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        name, memory = card.name, float(card.total_memory)
    else:
        name, memory = f"{os.uname().machine} CPU", host / local
    nodes = -(-world // local)
    return Measured(tuple(found), device.type, name, memory, host, torch.get_num_threads(), local, nodes, beside, time.monotonic() - began)


def together(ranks: list[Measured]) -> Measured:
    """Collectives were averaged when they were measured; work and copies are of every process."""
    first = ranks[0]
    more = tuple(s for m in ranks[1:] for s in m.samples if s.ranks == 1)
    return replace(first, samples=first.samples + more, seconds=max(m.seconds for m in ranks))
