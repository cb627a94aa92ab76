"""What of activations may be kept away from the device: `offload=` of `compile` and `plan`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.planner.formulation.training import TrainingConfig
from autopar.solver.problem import HOST, NVME

_HOW = 'use "host", "nvme", "host,nvme" or False; to run it on disk autopar.Offload(host=True, nvme="/local/disk")'


@dataclass(frozen=True)
class Offload:
    """Where activations may be kept, besides the device.

    host: pinned host memory. nvme: local disks, by a directory on them; True where one only plans; None or False: no.
    host_bytes, nvme_bytes: most that one device may take there; default its share of what the cluster has (of host memory nine tenths).
    """

    host: bool = True
    nvme: str | os.PathLike[str] | bool | None = None
    host_bytes: float | None = None
    nvme_bytes: float | None = None

    @staticmethod
    def of(x: Offload | str | bool | None, cluster: Cluster) -> Offload:
        """The argument as the user wrote it. None: nothing, as long as the copies' overlap with compute has been measured on no GPU."""
        if isinstance(x, Offload):
            found = x
        elif x is None or isinstance(x, bool) or x == HOST:
            found = Offload(host=bool(x))
        elif x in (NVME, f"{HOST},{NVME}"):
            found = Offload(host=HOST in x, nvme=True)
        else:
            raise AutoparError(f"offload={x!r} is not known", fix=_HOW)
        for name, n in (("host_bytes", found.host_bytes), ("nvme_bytes", found.nvme_bytes)):
            if n is not None and not n > 0:
                raise AutoparError(
                    f"Offload({name}={n!r}) is no number of bytes", fix="give the bytes that a device may take there, such as 100e9"
                )
        if found.nvme and cluster.nvme is None:
            raise AutoparError(
                "activations shall go to local disks, and the cluster has none",
                where=cluster.name,
                fix='describe them in the cluster\'s file: "nvme": {"read": {...}, "write": {...}}, or leave nvme out of offload=',
            )
        return found

    def within(self, training: TrainingConfig, cluster: Cluster) -> TrainingConfig:
        """`training` with what of this a plan needs to know."""
        media = (*((HOST,) if self.host else ()), *((NVME,) if self.nvme else ()))
        return replace(training, media=media, host_bytes=self.host_limit(cluster), nvme_bytes=self.nvme_limit(cluster))

    def host_limit(self, cluster: Cluster) -> float:
        return self.host_bytes if self.host_bytes is not None else 0.9 * cluster.host_bytes_per_device

    def nvme_limit(self, cluster: Cluster) -> float:
        if self.nvme_bytes is not None:
            return self.nvme_bytes
        capacity = cluster.nvme.capacity_bytes if cluster.nvme is not None else None
        return float("inf") if capacity is None else capacity
