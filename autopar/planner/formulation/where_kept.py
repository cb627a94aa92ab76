"""Where a value may be kept for backward: on the device, in host memory, on local disks."""

from __future__ import annotations

from autopar.cost import Cost
from autopar.planner.formulation.accounts import account
from autopar.planner.formulation.setting import Setting
from autopar.solver.problem import HOST, NVME, Fate

# Per medium, the links that its data crosses: (resource, direction).
LINKS = {HOST: (("d2h", 0), ("h2d", 1)), NVME: (("d2h", 0), ("nvme_write", 0), ("nvme_read", 1), ("h2d", 1))}


def fates(setting: Setting, cost: Cost, nbytes: dict[int, float], count: int) -> tuple[Fate, ...]:
    """How a value may be kept. nbytes: of one tensor, per node at which it may be; count: how many tensors it is."""
    found = [Fate(n) for n in nbytes]
    for medium in setting.media:
        for n, size in nbytes.items():
            if size >= setting.least_bytes:
                times = {account(d, resource): count * cost.transfer_s(resource, size) for resource, d in LINKS[medium]}
                found.append(Fate(n, medium, times))
    return tuple(found)
