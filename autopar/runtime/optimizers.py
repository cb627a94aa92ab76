"""Seeing the optimizer that steps our parameters: is it the one planned for, and does its state live where the parameters do?"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.cost.optimizers import KINDS, Kind, kind_of, known
from autopar.errors import OptimizerError


@dataclass
class _Watch:
    """What one parallel module was planned for, and the optimizers already seen."""

    planned: str | type[Optimizer]
    seen: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)


_watched: weakref.WeakKeyDictionary[nn.Module, _Watch] = weakref.WeakKeyDictionary()


def watch(module: nn.Module, planned: str | type[Optimizer]) -> None:
    """Checks every optimizer that holds parameters of `module` at its first step."""
    if isinstance(planned, str):
        known(planned)
    _watched[module] = _Watch(planned)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for module, w in list(_watched.items()):
        if optimizer in w.seen:
            continue
        w.seen.add(optimizer)
        ours = {id(p) for p in module.parameters()}
        if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            _check(optimizer, w.planned)
            _move_state(optimizer)


register_optimizer_step_pre_hook(_before_step)


def _name(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__.lower()
    if name == "sgd" and any(g.get("momentum") for g in optimizer.param_groups):
        name = "sgd-momentum"
    if f"{name}-fused" in KINDS and all(g.get("fused") for g in optimizer.param_groups):
        name += "-fused"
    return name


def _check(optimizer: Optimizer, planned: str | type[Optimizer]) -> None:
    if isinstance(planned, type):
        wrong = not isinstance(optimizer, planned)
    else:
        # One that is not listed is accepted.
        ours, theirs = kind_of(planned), KINDS.get(_name(optimizer), Kind(0, 0.0, 0.0))
        wrong = any(_bytes(theirs, wide) > _bytes(ours, wide) for wide in (2, 4))
    if wrong:
        name = planned if isinstance(planned, str) else planned.__name__
        raise OptimizerError(
            f"the plan counts on the memory of {name}, but {type(optimizer).__name__} steps these parameters",
            fix=f'pass optimizer="{_name(optimizer)}" (or the class) to autopar.compile',
        )


def _bytes(kind: Kind, wide: int) -> float:
    return kind.state_bytes + wide * (kind.moments + kind.temporaries)


def _move_state(optimizer: Optimizer) -> None:
    """State made (or loaded) before the first call follows the parameters to their final placement."""
    for p, state in optimizer.state.items():
        if not isinstance(p, DTensor):
            continue
        for key, value in state.items():
            if isinstance(value, DTensor) and value.shape == p.shape and value.placements != p.placements:
                state[key] = value.redistribute(p.device_mesh, p.placements)
