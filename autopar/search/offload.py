"""How much of its activations each pipeline rank keeps in host memory: the least that fits, if the link carries it in the time of the compute beside it.

Copies run beside compute, so they take no time as long as, for every chunk of a rank,

    latency + alpha A / B  <=  forward of one chunk        on the way out, while the next micro-batch computes
    latency + alpha A / B  <=  backward of one chunk       on the way back

with A what a micro-batch keeps in the chunk and B what the host's link reaches each way (Yuan et al., USENIX ATC '24; Wu et al., SSDTrain). The rank's part of
the host's memory must hold what is away. A rank's peak falls linearly in alpha, so the least fraction is a quotient; it is rounded up to whole per cents. Early
stages have more micro-batches in flight, and so offload more than late ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.hardware.cluster import Cluster
from autopar.pipeline import Schedule
from autopar.planner.layout import Layout
from autopar.predict.memory import held_bytes, peak_bytes
from autopar.predict.pieces import Piece
from autopar.predict.runtime import Runtime
from autopar.predict.seconds import Seconds

STEPS = 100  # of a fraction

Stages = Sequence[Mapping[Piece, int]]
Halves = Mapping[Piece, tuple[Seconds, Seconds]]


def fractions(
    layout: Layout, schedule: Schedule, stages: Stages, halves: Halves, runtime: Runtime, cluster: Cluster, ways: int, budget_bytes: float, allowed: bool
) -> tuple[float, ...] | None:  # fmt: skip
    """Of every pipeline rank of `layout`, which offloads nothing yet; None if it does not fit. allowed: whether anything may be offloaded."""
    all_offloaded = replace(layout, offload=1.0)
    found = []
    for rank in range(layout.pp):
        here = peak_bytes(rank, schedule, stages, layout, runtime, ways)
        short = sum(here.values()) - budget_bytes
        if short <= 0:
            found.append(0.0)
            continue
        if not allowed:
            return None
        there = peak_bytes(rank, schedule, stages, all_offloaded, runtime, ways)
        moves, saves = here["activations"] - there["activations"], sum(here.values()) - sum(there.values())
        if moves <= 0 or saves <= 0:  # rounding alone may tell them apart
            return None
        alpha = math.ceil(short / saves * STEPS * (1 - 1e-12)) / STEPS
        chunks = [stages[rank + c * schedule.ranks] for c in range(schedule.chunks)]
        if alpha > min(most(stage, layout, halves, runtime, cluster) for stage in chunks) or alpha * moves > cluster.host_bytes_per_device:
            return None
        found.append(alpha)
    return tuple(found)


def most(stage: Mapping[Piece, int], layout: Layout, halves: Halves, runtime: Runtime, cluster: Cluster) -> float:
    """The largest fraction of what a stage keeps that the link carries both ways beside compute."""
    kept = held_bytes(stage, layout, runtime)
    if not kept:
        return 1.0
    beside_s = min(sum(n * halves[p][k].compute_s for p, n in stage.items()) for k in (0, 1))
    return max(0.0, min(1.0, (beside_s - cluster.host.latency_s) * cluster.host.reached_Bps / kept))


def said(alphas: tuple[float, ...]) -> float | tuple[float, ...]:
    """As a layout has it: one number where all ranks are alike."""
    return alphas[0] if len(set(alphas)) == 1 else alphas
