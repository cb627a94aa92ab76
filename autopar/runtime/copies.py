"""Copies of a model whose parameters are on a mesh. DTensors hold their mesh, and process groups cannot be copied: a copy is on the same ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy(model, memo)`, with shards of its own on the meshes of the original."""
    for m in model.modules():
        for t in [*m._parameters.values(), *m._buffers.values(), *vars(m).values()]:
            if isinstance(t, DTensor) and id(t) not in memo:
                memo[id(t)] = _copy(t)
    other: nn.Module = copy.deepcopy(model, memo)
    return other


def _copy(t: DTensor) -> torch.Tensor:
    with torch.no_grad():
        new: torch.Tensor = t.detach().clone()
        if isinstance(t, nn.Parameter):
            new = nn.Parameter(new, requires_grad=t.requires_grad)
        if t.grad is not None:
            new.grad = t.grad.detach().clone()
    return new
