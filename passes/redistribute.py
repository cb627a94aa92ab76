"""One redistribution step in torch ops on local tensors.

All four collectives have one shape: cut the local tensor into the digits of both placements, bring the digits that the
collective splits to the front, run it on dim 0, put the digits it joins where they belong. Where the digits are already at the
front (a shard of dim 0) the permutation is the identity and costs nothing. All-to-all is one collective also on CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar._torch import collectives
from autopar.graph.mesh import Mesh
from autopar.graph.redistribution import Step, union_digits
from autopar.tensors.memory_format import contiguous, inverse, order_of


def run_step(
    x: torch.Tensor, step: Step, mesh: Mesh, coordinate: Callable[[str], torch.Tensor], group: Callable[[tuple[str, ...]], str]
) -> torch.Tensor:
    """`x`, local in `step.src`, as the local tensor in `step.dst`. What lies channels last is sent as it lies, and arrives so. Nothing is sent of a tensor
    without elements."""
    if not x.numel():
        return x.new_empty(step.dst.local_shape(mesh))
    order = order_of(x)
    if order != contiguous(x.dim()):
        return run_step(x.permute(order), step.permuted(order), mesh, coordinate, group).permute(inverse(order))
    if step.kind == "all_reduce":
        reduced: torch.Tensor = collectives.wait_tensor(collectives.all_reduce(x.contiguous(), step.reduce, group(step.axes)))
        return reduced
    digits = union_digits(step.src, step.dst, list(step.axes), mesh)
    assert digits is not None
    flat = [d for dim in digits for d in dim]
    width = mesh.sizes_product(step.axes)
    # Before: the local tensor has the "local" and "to" digits; after: "local" and "from".
    before = [d for d in flat if d[1] != "from"]
    local = [d for d in flat if d[1] == "local"]
    rest = [d[0] for d in local]
    y: torch.Tensor
    if step.kind == "all_gather":
        y = x.contiguous()
    else:
        front = [before.index((mesh.axis_size(a), "to", a)) for a in step.axes]
        y = x.reshape([d[0] for d in before]).permute(front + [i for i, d in enumerate(before) if d[1] == "local"]).reshape([width, *rest])
    if step.kind == "slice":
        index = coordinate(step.axes[0])
        for a in step.axes[1:]:
            index = index * mesh.axis_size(a) + coordinate(a)
        return y.index_select(0, index.reshape(1)).reshape(step.dst.local_shape(mesh))
    if step.kind == "reduce_scatter":
        y = collectives.wait_tensor(collectives.reduce_scatter_tensor(y.contiguous(), step.reduce, width, group(step.axes)))
        return y.reshape(step.dst.local_shape(mesh))
    if step.kind == "all_to_all":
        y = collectives.wait_tensor(collectives.all_to_all_single(y.contiguous(), [1] * width, [1] * width, group(step.axes)))
    else:
        if y.dim() == 0:
            y = y.reshape(1)
        y = collectives.wait_tensor(collectives.all_gather_into_tensor(y, width, group(step.axes)))
    # Now dim 0 runs over the ranks of the group, i.e. over the "from" digits in mesh order.
    y = y.reshape([mesh.axis_size(a) for a in step.axes] + rest)
    after = [d for d in flat if d[1] != "to"]
    source = {("from", a): i for i, a in enumerate(step.axes)}
    n = len(step.axes)
    back: list[int] = []
    for d in after:
        if d[1] == "local":
            back.append(n)
            n += 1
        else:
            back.append(source[("from", d[2])])
    return y.permute(back).reshape(step.dst.local_shape(mesh))
