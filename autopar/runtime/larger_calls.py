"""A call that is larger than the plan was made for: whether it fits."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from autopar.graph.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.text.sizes import format_bytes


def larger(plan: Plan, planned: int, now: int, params: Mapping[str, torch.Tensor], mesh: Mesh, state_bytes: float) -> str:
    """What to tell where inputs of `now` elements may not fit, "" where they do. The plan was made for `planned`: activations grow as inputs do, parameters and their
    optimizer's state (state_bytes an element) do not."""
    peak, budget = plan.predicted["peak_memory_bytes"], plan.predicted["budget_bytes"]
    held = math.fsum(
        math.prod(c.storage.local_shape(mesh)) * (params[n].element_size() + state_bytes * c.trainable)
        for n, c in plan.params.items()
        if n in params
    )
    wanted = held + max(0.0, peak - held) * now / planned
    if wanted <= budget:
        return ""
    return (
        f"inputs of {now:,} elements, {now / planned:.1f} times what the plan was made for, take about {format_bytes(wanted)} a device, where {format_bytes(budget)} are "
        "to be used: call the model with the largest batch first, or say the largest size by torch._dynamo.mark_dynamic(t, dim, max=...), and the plan is made for it"
    )
