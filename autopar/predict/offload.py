"""Offload: activations that a pipeline rank keeps in host memory, and what it waits for them.

Of what a chunk keeps of a micro-batch, A bytes, the fraction alpha leaves while the next micro-batch computes, and comes back while the one before does. So
forward and backward of a chunk each last at least

    latency + alpha A / B            B: what the host's link reaches each way

(Yuan et al., USENIX ATC '24; Wu et al., "SSDTrain", 2024). `autopar.search` offloads no more than hides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.cost.model import Cost
from autopar.errors import LayoutError
from autopar.hardware.cluster import Cluster
from autopar.pipeline import Schedule
from autopar.planner.layout import Layout
from autopar.predict.memory import held_bytes, peak_bytes
from autopar.predict.pieces import Piece
from autopar.predict.runtime import Runtime
from autopar.text.sizes import format_bytes

Stage = Mapping[Piece, int]


def moved_s(stages: Sequence[Stage], layout: Layout, runtime: Runtime, cost: Cost) -> list[float]:
    """By stage: of one micro-batch, one way."""
    return [cost.host_s(layout.offload_of(s % layout.pp) * held_bytes(stage, layout, runtime)) for s, stage in enumerate(stages)]


def check_host_memory(stages: Sequence[Stage], schedule: Schedule, layout: Layout, runtime: Runtime, cluster: Cluster, ways: int) -> None:
    """Raises LayoutError where a rank keeps more in host memory than its part of it."""
    for rank in range(layout.pp):
        if not layout.offload_of(rank):
            continue
        here, there = (
            peak_bytes(rank, schedule, stages, how, runtime, ways)["activations"] for how in (replace(layout, offload=0.0), layout)
        )
        if here - there > cluster.host_bytes_per_device:
            raise LayoutError(
                f"pipeline rank {rank} keeps {format_bytes(here - there)} in host memory, of which a device has {format_bytes(cluster.host_bytes_per_device)}",
                where=f"Layout, offload={layout.offload_of(rank):.2f}",
                fix="offload less of it, or make more again",
            )
