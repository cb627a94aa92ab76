"""`autopar.compile(mesh="auto")`: the mesh, the pipeline and the micro-batches that are best for a first call, planned before there is a mesh. One rank plans."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.capture import off_cache
from autopar.distributed.agreement import from_first
from autopar.distributed.groups import Groups
from autopar.errors import AutoparError, InputError
from autopar.hardware.detect import here
from autopar.plan.plan import Plan
from autopar.plan.schema import dumps
from autopar.planner.micro_batches import AUTO
from autopar.search import everywhere

TARGET = "target"  # of a loss function


def best_for(
    every: DeviceMesh,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    loss_fn: Callable[..., torch.Tensor] | None,
    **how: Any,
) -> Plan:
    """every: all devices on one axis; how: as `autopar.plan` has it, with cluster. Collective. Raises AutoparError, InfeasibleError."""
    device, groups = torch.device(every.device_type), Groups(every, every)
    cluster = how.pop("cluster", None) or here(device, every.size())
    if how.get("micro_batches") is None:
        how["micro_batches"] = AUTO
    given = tensors_of(model, loss_fn, args, kwargs)
    modes = {m: m.training for m in model.modules()}

    def work() -> str:
        try:
            with torch.random.fork_rng(devices=[]):
                return dumps(everywhere.plan(model, given, cluster, loss_fn=loss_fn, **how))
        finally:
            for m, mode in modes.items():
                m.training = mode

    return Plan.loads(from_first(groups, work))


def checked_mesh(mesh: str, inputs: str, others: Mapping[str, object]) -> None:
    """others: arguments that a mesh which is to be found cannot have beside it. Raises AutoparError."""
    if mesh != "auto":
        raise AutoparError(f"a mesh of {mesh!r}", fix='pass axis sizes such as {"dp": 2, "tp": 4}, or "auto" to have them planned')
    checked_auto(inputs, others)


def checked_auto(inputs: str, others: Mapping[str, object]) -> None:
    """For what is planned for the first training call, before that. others: arguments that cannot be beside it. Raises AutoparError."""
    given = [name for name, x in others.items() if x is not None]
    if given:
        raise AutoparError(
            f'"auto" leaves what it stands for to the planner, and {given[0]}= is passed',
            fix=f"leave {given[0]}= out, or pass a mesh and numbers",
        )
    if inputs != "global":
        raise InputError(
            '"auto" says into how many parts a batch is dealt, and inputs="local" that it has been',
            fix='pass the whole batch (inputs="global"), or a mesh and numbers',
        )


def tensors_of(
    model: nn.Module, loss_fn: Callable[..., torch.Tensor] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The call's tensors, by keyword; with a loss_fn, its target. Raises InputError."""
    kwargs = dict(kwargs)
    if loss_fn is not None and args and TARGET not in kwargs:
        args, kwargs[TARGET] = args[:-1], args[-1]
    target = {TARGET: kwargs.pop(TARGET)} if loss_fn is not None and TARGET in kwargs else {}
    try:
        named = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError as e:
        raise InputError(f"the first call is none of {type(model).__name__}: {e}", fix="call it as the model itself is called") from e
    flat: dict[str, Any] = {}
    for name, x in {**named, **target}.items():
        flat |= x if isinstance(x, Mapping) and name not in kwargs else {name: x}  # **kwargs of forward
    usual = off_cache(model, {})  # arguments that every call of such a model has
    flat = {name: x for name, x in flat.items() if name not in usual or x is not usual[name]}
    odd = [name for name, x in flat.items() if not isinstance(x, torch.Tensor) and x is not None]
    if odd:
        raise InputError(
            f"argument {odd[0]} of the first call is no tensor, and a mesh is planned for calls of tensors alone",
            fix="pass a mesh, or leave it out of the first call",
        )
    return {name: x for name, x in flat.items() if x is not None}
