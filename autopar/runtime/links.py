"""What collectives cost where this runs: for passes that put some beside others, and join small ones."""

from __future__ import annotations

import torch

from autopar.cost import Cost
from autopar.distributed.agreement import from_first
from autopar.distributed.groups import Groups
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster, ClusterError
from autopar.hardware.detect import here
from autopar.text.log import log


def prices(groups: Groups, cluster: Cluster | None, device: torch.device, mesh: Mesh) -> Cost | None:
    """On a mesh, as the first rank knows the cluster: what it is given, else what it finds. None where there is no description, or of fewer devices. Collective."""

    def known() -> str:
        try:
            found = cluster or here(device, mesh.size)
        except ClusterError as e:
            log.info("collectives are not joined: %s", e.what)
            return ""
        return found.model_dump_json() if found.size >= mesh.size else ""

    text = from_first(groups, known)
    return Cost(Cluster.model_validate_json(text), mesh) if text else None
