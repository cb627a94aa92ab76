"""What this machine is, as a Cluster: what a plan is made for when the user names none."""

from __future__ import annotations

import os
import re

import torch
import torch.distributed as dist

from autopar.hardware.cluster import Cluster, ClusterError, names
from autopar.kernels.triton import why_not

# Cards of one name that differ in clock, memory or links from those described, and parts of cards.
_OTHERS = re.compile(r"\b(pcie|nvl|mig)\b", re.IGNORECASE)


def detect() -> Cluster:
    """This machine, with as many devices as there are processes: of the group, or as torchrun's variables say; without either all that it has.

    A GPU that no description fits is an error that says what to do about it.
    """
    gpu = torch.cuda.is_available() and not (dist.is_initialized() and dist.get_backend() == "gloo")
    if dist.is_initialized():
        devices = dist.get_world_size()
    else:
        whole = Cluster.of("cpu").devices_per_node
        devices = int(os.environ.get("WORLD_SIZE", 0)) or (torch.cuda.device_count() if gpu else min(os.cpu_count() or 1, whole))
    return here(torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu"), devices)


def here(device: torch.device, devices: int) -> Cluster:
    """The machine's devices, as many as the mesh has, in nodes of as many processes as torchrun started on this one.

    Raises ClusterError for a device that no description fits.
    """
    if device.type == "cpu":
        return _sized("cpu", devices)
    found = torch.cuda.get_device_properties(device)
    cluster = _sized(kind_of(found.name), devices)
    memory = cluster.device.model_copy(update={"memory_bytes": float(found.total_memory)})
    return with_triton_of(cluster.model_copy(update={"device": memory}), device)


def with_triton_of(cluster: Cluster, device: torch.device) -> Cluster:
    """`cluster`, of GPUs that run Triton kernels, or not, as this one does. A CPU says nothing: a program for GPUs may be looked at on one."""
    if device.type == "cpu":
        return cluster
    return cluster.model_copy(update={"device": cluster.device.model_copy(update={"without_triton": why_not(device, torch.float32)})})


def kind_of(device_name: str) -> str:
    """The name of the description of a GPU that its driver calls `device_name`."""
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    fitting = [n for n in names() if n != "cpu" and all(part in words or f"{part}gb" in words for part in n.split("-"))]
    found = max(fitting, key=len, default=None)  # "a100-40" before "a100"
    if found is None or _OTHERS.search(device_name):
        raise ClusterError(
            f"autopar does not know the device {device_name!r}, so it cannot plan for it",
            fix="measure it: `autopar calibrate --out mine.json` writes a description for cluster=; or name the cluster that is most like yours, as in "
            f'autopar.compile(..., cluster="{found or "h100"}:1x8") (nodes x devices), or a JSON file of your own (copy one of clusters/*.json: '
            f'{", ".join(names())}), or pass layout="fsdp" for a hand layout',
        )
    return found


def _sized(base: str, devices: int) -> Cluster:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", devices))
    per_node = max(1, min(local, devices, Cluster.of(base).devices_per_node))
    return Cluster.of(f"{base}:{-(-devices // per_node)}x{per_node}")
