"""Seeing the optimizer that steps our parameters: is it the one planned for, does its state live where the parameters do, and can it work on them at all?

The contract of an optimizer is in docs/optimizers.md: it computes with torch's operators on what it is given, or on `to_local()` of it.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar import _torch
from autopar._torch import stepping
from autopar.cost.optimizers import KINDS, Kind, kind_of, known
from autopar.distributed.shards import on_mesh, redistributed
from autopar.errors import OptimizerError
from autopar.runtime.by_elements import on_parts
from autopar.runtime.muon import dealt
from autopar.runtime.staged_calls import StagedCalls


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
            move_state(optimizer, getattr(module, "_stages", None))
            stepping.begin(_named(module, optimizer), functools.partial(_refused, type(optimizer).__name__))


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepping.leave()


_torch.replace_muon_step(dealt)
_torch.replace_steps_by_elements(on_parts)
register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)


def _named(module: nn.Module, optimizer: Optimizer) -> dict[torch.Tensor, str]:
    """What the optimizer has of `module`: parameters, gradients, state."""
    names = {id(p): n for n, p in module.named_parameters()}
    out: dict[torch.Tensor, str] = {}
    for p in (p for group in optimizer.param_groups for p in group["params"] if id(p) in names):
        name = names[id(p)]
        out[p] = f"parameter {name!r}"
        if p.grad is not None:
            out[p.grad] = f"the gradient of {name!r}"
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, DTensor):
                out[value] = f"the state {key!r} of {name!r}"
    return out


def _refused(optimizer: str, operation: str, name: str, error: BaseException | None) -> OptimizerError:
    said = f": {str(error).splitlines()[0][:200]}" if error is not None and str(error) else ""
    if operation == "data_ptr":
        said = ": it is handed to a kernel as an address, and the memory of a sharded tensor is that of its parts"
    reshaped = "t.reshape(...) works where a view does not; else " if ".view" in operation else ""
    return OptimizerError(
        f"{optimizer} cannot step parameters of a mesh: {operation} of {name}{said}",
        fix=f"{reshaped}an optimizer must use torch's operators on parameters, gradients and state like them, or work on t.to_local() of each where elements do not "
        "depend on each other (docs/optimizers.md)",
    )


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


def move_state(optimizer: Optimizer, stages: StagedCalls | None = None) -> None:
    """State made (or loaded) before the first call follows the parameters to their final placement; of a parameter that is on no stage here, none is left."""
    for p, state in list(optimizer.state.items()):
        if not isinstance(p, DTensor):
            continue
        for key, value in list(state.items()):
            if not isinstance(value, DTensor) or value.shape != p.shape:
                continue
            if stages is not None and value.device_mesh != p.device_mesh:
                there = stages.pipeline.followed(value, p)
                if there is None:
                    optimizer.state.pop(p, None)
                else:
                    state[key] = there
            elif value.device_mesh != p.device_mesh:
                state[key] = on_mesh(value, p.device_mesh, p.placements)
            elif value.placements != p.placements:
                state[key] = redistributed(value, tuple(p.placements))
