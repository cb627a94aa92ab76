"""The place that keeps a model's activations which the plan has away from the device: opened when a plan first wants one."""

from __future__ import annotations

import os
import weakref

from autopar.distributed.agreement import highest
from autopar.distributed.groups import Groups
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.offload import OffloadSettings, close_store, next_number, numbered, open_store
from autopar.plan.plan import Plan
from autopar.planner.offload import Offload
from autopar.solver.problem import NVME


class OpenStore:
    """A store of activations, open as long as somebody has this."""

    def __init__(self, name: str, settings: OffloadSettings) -> None:
        self.name = name
        open_store(name, settings)
        weakref.finalize(self, close_store, name)


def opened(plan: Plan, cluster: Cluster, asked: Offload | str | bool | None, groups: Groups) -> OpenStore:
    """With the limits of `cluster`, where `asked` has none. Collective. Raises AutoparError where there is no directory for a disk that the plan uses."""
    request = Offload.of(asked if asked is not None else "host", cluster)
    if NVME in plan.offload.values() and not isinstance(request.nvme, (str, os.PathLike)):
        fix = 'pass offload=autopar.Offload(nvme="/a/directory/on/it")'
        raise AutoparError("the plan keeps activations on local disks, and no directory is given for them", fix=fix)
    directory = os.fspath(request.nvme) if isinstance(request.nvme, (str, os.PathLike)) else None
    host, nvme = (int(min(n, 2**62)) for n in (request.host_limit(cluster), request.nvme_limit(cluster)))
    name = numbered(groups.prefix, highest(groups, next_number(groups.prefix)))
    return OpenStore(name, OffloadSettings(host, directory, nvme if directory else 0))
