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
from torch.distributed.tensor import DTensor, distribute_tensor

from autopar import _torch
from autopar.distributed.failures import during
from autopar.distributed.groups import Groups, groups_of


def dealt(theirs: _torch.MuonStep) -> _torch.MuonStep:
    """A step like torch's own, which takes the parameters that are on no mesh of ours."""

    def step(params: Sequence[Any], grads: Sequence[Any], buffers: Sequence[Any], **how: Any) -> None:
        on: dict[Groups, list[tuple[Any, Any, Any]]] = {}
        rest: list[tuple[Any, Any, Any]] = []
        for each in zip(params, grads, buffers, strict=True):
            groups = groups_of(each[0].device_mesh) if all(isinstance(t, DTensor) for t in each) and each[1].ndim == 2 else None
            (rest if groups is None else on.setdefault(groups, [])).append(each)
        for groups, ours in on.items():
            _step(groups, ours, **how)
        if rest or not on:
            theirs(*(list(x) for x in zip(*rest, strict=True)) if rest else ([], [], []), **how)

    return step


def _step(
    groups: Groups, ours: Sequence[tuple[Any, Any, Any]], *, lr: Any, weight_decay: float, momentum: float, nesterov: bool, **how: Any
) -> None:
    lr = float(lr)
    n = len(groups.ranks)
    # By rank, what it works on; a round is one of each.
    hands: list[list[int]] = [[] for _ in range(n)]
    work = [0.0] * n
    for i in sorted(range(len(ours)), key=lambda i: (-_flops(ours[i][0].shape), i)):
        owner = min(range(n), key=lambda r: (work[r], r))
        work[owner] += _flops(ours[i][0].shape)
        hands[owner].append(i)
    for turn in range(max(map(len, hands))):
        found = {r: ours[hand[turn]] for r, hand in enumerate(hands) if turn < len(hand)}
        with during("optimizer: gathering matrices", groups.ranks):
            updates = {r: _update(g, m, momentum, nesterov) for r, (_, g, m) in found.items()}
        mine = updates.get(groups.rank)
        if mine is not None:
            updates[groups.rank] = _torch.orthogonalized(mine, how["ns_coefficients"], how["ns_steps"], how["eps"]).contiguous()
        with during("optimizer: handing out matrices", groups.ranks):
            if n > 1:
                sent = [dist.broadcast(updates[r], groups.ranks[r], group=groups.everyone, async_op=True) for r in updates]
                for s in sent:
                    s.wait()
        for r, (p, _, _) in found.items():
            p.mul_(1 - lr * weight_decay)
            u = distribute_tensor(updates[r], p.device_mesh, p.placements, src_data_rank=None)
            p.add_(u, alpha=-_torch.adjusted_lr(lr, how["adjust_lr_fn"], p.shape))


def _update(grad: DTensor, buffer: DTensor, momentum: float, nesterov: bool) -> torch.Tensor:
    """The whole of what is to be orthogonalized."""
    buffer.lerp_(grad, 1 - momentum)
    update: Any = grad.lerp(buffer, momentum) if nesterov else buffer
    whole: torch.Tensor = update.bfloat16().full_tensor()
    return whole.clone(memory_format=torch.contiguous_format)


def _flops(shape: torch.Size) -> float:
    return float(shape[0] * shape[1] * min(shape))
