"""Where a value may be kept for backward: on the device, in host memory, on local disks; and what that takes.

What forward's kernels would not have written is written to be kept, and read by backward's kernels, wherever it is meanwhile (`Cost.kept`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from autopar.cost import Cost
from autopar.planner.formulation.accounts import account
from autopar.planner.formulation.training import TrainingConfig
from autopar.solver.problem import DEVICE, HOST, NVME, Policy

# Per medium, the links that its data crosses: (resource, direction).
LINKS: dict[str, tuple[tuple[str, int], ...]] = {
    DEVICE: (),
    HOST: (("d2h", 0), ("h2d", 1)),
    NVME: (("d2h", 0), ("nvme_write", 0), ("nvme_read", 1), ("h2d", 1)),
}


class Member(NamedTuple):
    """Tensors of a value that are the same in every layer: the name of one, and how many."""

    tensor: str
    count: int


def policies(training: TrainingConfig, cost: Cost, nbytes: Mapping[int, float], members: tuple[Member, ...]) -> tuple[Policy, ...]:
    """How a value may be kept. nbytes: of one tensor, per node at which it may be."""
    found = []
    for medium in (DEVICE, *training.media):
        for n, size in nbytes.items():
            if medium == DEVICE or size >= training.least_bytes:
                found.append(Policy(n, medium, times(cost, size, members, medium)))
    return tuple(found)


def times(cost: Cost, nbytes: float, members: tuple[Member, ...], medium: str = DEVICE) -> dict[int, float]:
    """By account, what keeping all tensors of a value takes. nbytes: of one."""
    spent: dict[int, float] = defaultdict(float)
    for tensor, count in members:
        for beside in cost.kept(tensor, nbytes):
            spent[account(beside.half, "compute")] += count * beside.seconds
        for resource, d in LINKS[medium]:
            spent[account(d, resource)] += count * cost.transfer_s(resource, nbytes)
    return {a: t for a, t in spent.items() if t}
