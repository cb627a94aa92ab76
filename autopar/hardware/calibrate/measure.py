"""What one process measures, in order; and what came of it, with what it was measured on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from autopar.hardware.calibrate import copies, wires, work
from autopar.hardware.calibrate.measured import Measured
from autopar.hardware.calibrate.result import calibration
from autopar.hardware.calibrate.steps import Reference, Stepped, references
from autopar.hardware.calibrate.timing import Clock

WINDOWS_IN_ALL = 2500  # of the whole time, one window is this part
FOR_WORK, FOR_COLLECTIVES = 0.35, 0.5  # the rest is for copies, files and what compute loses beside a collective


def measure(device: torch.device, local: int, seconds: float, on_progress: Callable[[str], None]) -> Measured:
    """By one process of a group that is up. local: processes of a node."""
    began = time.monotonic()
    clock = Clock(device, seconds / WINDOWS_IN_ALL)
    clock.barrier()
    world = dist.get_world_size() if dist.is_initialized() else 1
    on_progress("whole steps")
    whole = references(world) if device.type == "cpu" else []
    step(whole, clock)
    found = list(work.samples(clock, FOR_WORK * seconds, on_progress))
    step(whole, clock)
    found += copies.samples(clock, on_progress)
    beside: tuple[float, ...] = ()
    if world > 1:
        on_progress("compute beside a collective")
        beside = wires.contention(clock)
        found += wires.samples(clock, wires.SIZES, FOR_COLLECTIVES * seconds, local, on_progress)
    step(whole, clock)
    host = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        name, memory = card.name, float(card.total_memory)
    else:
        name, memory = f"{os.uname().machine} CPU", host / local
    nodes = -(-world // local)
    mine = Measured(tuple(found), device.type, name, memory, host, torch.get_num_threads(), local, nodes, beside, 0.0)
    return replace(mine, steps=stepped(whole, mine), seconds=time.monotonic() - began)


def step(whole: list[Reference], clock: Clock) -> None:
    for reference in whole:
        reference.measure(clock)


def stepped(whole: list[Reference], mine: Measured) -> tuple[Stepped, ...]:
    """The steps beside their calls, by what all processes measured of these (collective)."""

    every: list[Any] = [mine]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
    cluster = calibration(together(every)).cluster
    return tuple(reference.stepped(cluster) for reference in whole)


def together(ranks: list[Measured]) -> Measured:
    """Collectives were averaged when they were measured; work and copies are of every process."""
    first = ranks[0]
    more = tuple(s for m in ranks[1:] for s in m.samples if s.ranks == 1)
    return replace(first, samples=first.samples + more, seconds=max(m.seconds for m in ranks))
