"""What a plan depends on besides graph, mesh and costs."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost import Cost
from autopar.cost.model import ADAMW_BYTES


@dataclass(frozen=True)
class TrainingConfig:
    """trainable: parameters with gradients. reduce: dtype gradients are reduced in ("" : their own). Of the optimizer, per parameter element:
    state_bytes, step_bytes (what lives during its step alone) and traffic_bytes (to and from memory; `autopar.cost.optimizers.KINDS`).
    master_bytes: bytes of a stored parameter element. micro_batches: calls for one step of the optimizer; gradients are reduced in the last of them,
    and times are of one call on average. accumulated_share: of the gradients that wait for it unreduced, what a device has: a stage's part. media: where activations may be kept besides the device ("host", "nvme"); host_bytes,
    nvme_bytes: a device's share of it; least_bytes: what is smaller, on one device, is not worth a copy of its own.
    fuses: whether memory-bound neighbours become one kernel, as Inductor makes it.
    counts: whether memory is counted; where any would do, its rows are half of the work.
    keeps_gathered: whether what forward gathers of a parameter may stay until backward has read it, as in ZeRO-2, and need not be gathered again.
    in_a_row: micro-batches that are run in one call; what the first one gathers may stay for all of them, as in ZeRO-1.
    imbalance: of routed experts that are split over ranks, rows of the fullest rank over the mean (`autopar.cost.experts`).
    joins: whether small collectives of parameters and gradients that are needed together are one (`autopar.passes.bucket`), which pays its latency once.
    """

    trainable: frozenset[str]
    reduce: str = ""
    state_bytes: float = 8.0
    step_bytes: float = 4.0
    traffic_bytes: float = ADAMW_BYTES
    master_bytes: float = 4.0
    micro_batches: int = 1
    accumulated_share: float = 1.0
    budget_bytes: float = float("inf")
    media: tuple[str, ...] = ()
    host_bytes: float = float("inf")
    nvme_bytes: float = float("inf")
    least_bytes: float = 2.0**20
    fuses: bool = True
    counts: bool = True
    keeps_gathered: bool = True
    joins: bool = False
    in_a_row: int = 1
    imbalance: float = 1.0


def optimizer_s(cost: Cost, training: TrainingConfig, elements: float) -> float:
    """A call's share of the optimizer's step on `elements` of parameters."""
    return cost.optimizer_s(elements, training.traffic_bytes) / training.micro_batches
