"""What this machine is, as a Cluster: what a plan is made for when the user names none."""

from __future__ import annotations

import os
import re

import torch

from autopar.cluster import Cluster, ClusterError, names

# Cards of one name that differ in clock, memory or links from those described, and parts of cards.
_OTHERS = re.compile(r"\b(pcie|nvl|mig)\b", re.IGNORECASE)


def here(device: torch.device, devices: int) -> Cluster:
    """The machine's devices, as many as the mesh has, in nodes of as many processes as torchrun started on this one.

    Raises ClusterError for a device that no description fits.
    """
    if device.type == "cpu":
        return _sized("cpu", devices)
    found = torch.cuda.get_device_properties(device)
    cluster = _sized(kind_of(found.name), devices)
    memory = cluster.device.model_copy(update={"memory_bytes": float(found.total_memory)})
    return cluster.model_copy(update={"device": memory})


def kind_of(device_name: str) -> str:
    """The name of the description of a GPU that its driver calls `device_name`."""
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    fitting = [n for n in names() if n != "cpu" and all(part in words or f"{part}gb" in words for part in n.split("-"))]
    found = max(fitting, key=len, default=None)  # "a100-40" before "a100"
    if found is None or _OTHERS.search(device_name):
        raise ClusterError(
            f"autopar does not know the device {device_name!r}, so it cannot plan for it",
            fix=f'name the cluster that is most like yours, as in autopar.compile(..., cluster="{found or "h100"}:1x8") (nodes x devices), or a JSON file of '
            f'your own (start from one of clusters/*.json: {", ".join(names())}), or pass layout="fsdp" for a hand layout',
        )
    return found


def _sized(base: str, devices: int) -> Cluster:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", devices))
    per_node = max(1, min(local, devices, Cluster.of(base).devices_per_node))
    return Cluster.of(f"{base}:{-(-devices // per_node)}x{per_node}")
