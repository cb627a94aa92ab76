"""Muon on a mesh: every matrix is orthogonalized whole, by one rank, and the matrices are dealt out over the ranks.

    m <- m + (1 - mu) (g - m),  u = g + mu (m - g)           on the shards
    gather u in bfloat16; its owner runs Newton-Schulz; the owner's result goes to all
    w <- (1 - lr decay) w - lr' u                            on the shards

(Jordan et al., Muon, 2024; `torch.optim.Muon`.) Work is dealt by FLOPs, the largest first. A round has one matrix of every rank, so that no more than that are whole at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from autopar import _torch
from autopar.distributed.failures import during
from autopar.distributed.groups import is_ours

Matrix = tuple[Any, Any, Any]  # parameter, gradient, momentum


def dealt(theirs: _torch.OptimizerStep) -> _torch.OptimizerStep:
    """A step like torch's own, which takes the parameters that are on no mesh of ours."""

    def step(params: Sequence[Any], grads: Sequence[Any], buffers: Sequence[Any], **how: Any) -> None:
        on: dict[DeviceMesh, list[Matrix]] = {}
        rest: list[Matrix] = []
        for each in zip(params, grads, buffers, strict=True):
            ours = all(isinstance(t, DTensor) for t in each) and each[1].ndim == 2 and is_ours(each[0].device_mesh)
            (on.setdefault(each[0].device_mesh, []) if ours else rest).append(each)
        for mesh, matrices in on.items():
            _step(mesh, matrices, **how)
        if rest:
            theirs(*map(list, zip(*rest, strict=True)), **how)

    return step


def _step(
    mesh: DeviceMesh, matrices: Sequence[Matrix], *, lr: Any, weight_decay: float, momentum: float, nesterov: bool, **how: Any
) -> None:
    lr, ranks = float(lr), mesh.mesh.flatten().tolist()
    # By rank, what it works on; a round is one of each.
    hands: list[list[int]] = [[] for _ in ranks]
    work = [0.0] * len(ranks)
    for i in sorted(range(len(matrices)), key=lambda i: (-_flops(matrices[i][0].shape), i)):
        owner = min(range(len(ranks)), key=lambda r: (work[r], r))
        work[owner] += _flops(matrices[i][0].shape)
        hands[owner].append(i)
    for turn in range(max(map(len, hands))):
        found = {r: matrices[hand[turn]] for r, hand in enumerate(hands) if turn < len(hand)}
        with during("optimizer: gathering matrices", ranks):
            updates = {r: _update(g, m, momentum, nesterov) for r, (_, g, m) in found.items()}
        here = ranks.index(dist.get_rank()) if len(ranks) > 1 else 0
        if here in updates:
            updates[here] = _torch.orthogonalized(updates[here], how["ns_coefficients"], how["ns_steps"], how["eps"]).contiguous()
        with during("optimizer: handing out matrices", ranks):
            for r, update in updates.items():
                _hand_out(update, r, mesh)
        for r, (p, _, _) in found.items():
            p.mul_(1 - lr * weight_decay)
            u = distribute_tensor(updates[r], p.device_mesh, p.placements, src_data_rank=None)
            p.add_(u, alpha=-_torch.adjusted_lr(lr, how["adjust_lr_fn"], p.shape))


def _hand_out(t: torch.Tensor, owner: int, mesh: DeviceMesh) -> None:
    """What the mesh's rank `owner` has of `t`, to all: along one dim of the mesh after the other, each time from where it is by then."""
    at = (mesh.mesh == mesh.mesh.flatten()[owner]).nonzero()[0].tolist()
    for dim, source in enumerate(at):
        if mesh.size(dim) > 1:
            dist.broadcast(t, group=mesh.get_group(dim), group_src=source)


def _update(grad: DTensor, buffer: DTensor, momentum: float, nesterov: bool) -> torch.Tensor:
    """The whole of what is to be orthogonalized."""
    buffer.lerp_(grad, 1 - momentum)
    update: Any = grad.lerp(buffer, momentum) if nesterov else buffer
    whole: torch.Tensor = update.bfloat16().full_tensor()
    return whole.clone(memory_format=torch.contiguous_format)


def _flops(shape: torch.Size) -> float:
    return float(shape[0] * shape[1] * min(shape))
