"""Where a value may be kept for backward: on the device, in host memory, on local disks."""

from __future__ import annotations

from autopar.cost import Cost
from autopar.planner.formulation.accounts import account
from autopar.planner.formulation.training import TrainingConfig
from autopar.solver.problem import HOST, NVME, Policy

# Per medium, the links that its data crosses: (resource, direction).
LINKS = {HOST: (("d2h", 0), ("h2d", 1)), NVME: (("d2h", 0), ("nvme_write", 0), ("nvme_read", 1), ("h2d", 1))}


def policies(training: TrainingConfig, cost: Cost, nbytes: dict[int, float], count: int) -> tuple[Policy, ...]:
    """How a value may be kept. nbytes: of one tensor, per node at which it may be; count: how many tensors it is."""
    found = [Policy(n) for n in nbytes]
    for medium in training.media:
        for n, size in nbytes.items():
            if size >= training.least_bytes:
                times = {account(d, resource): count * cost.transfer_s(resource, size) for resource, d in LINKS[medium]}
                found.append(Policy(n, medium, times))
    return tuple(found)
