"""`autopar.compile(mesh="auto")`: the mesh, the pipeline and the micro-batches that are best for a first call, planned before there is a mesh. One rank plans."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.distributed.agreement import from_first
from autopar.distributed.groups import Groups
from autopar.errors import AutoparError, InputError
from autopar.hardware.detect import here
from autopar.plan.plan import Plan
from autopar.plan.schema import dumps
from autopar.planner.micro_batches import AUTO
from autopar.search import everywhere


def best_for(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | tuple[Any, ...] | None,
    every: DeviceMesh,
    *,
    inputs: str,
    loss_fn: Callable[..., torch.Tensor] | None,
    **how: Any,
) -> Plan:
    """every: all devices on one axis; how: as `autopar.plan` has it, with cluster. Collective. Raises AutoparError, InfeasibleError."""
    if example_inputs is None:
        raise AutoparError(
            'mesh="auto" is planned for a call, and there is none yet', fix="pass example_inputs=, a batch as the training loop has them"
        )
    if inputs != "global":
        raise InputError(
            'mesh="auto" says into how many parts a batch is dealt, and inputs="local" that it has been',
            fix='pass the whole batch (inputs="global"), or a mesh',
        )
    device, groups = torch.device(every.device_type), Groups(every, every)
    cluster = how.pop("cluster", None) or here(device, every.size())
    if how.get("micro_batches") is None:
        how["micro_batches"] = AUTO
    given = tensors_of(model, example_inputs)
    modes = {m: m.training for m in model.modules()}

    def work() -> str:
        try:
            with torch.random.fork_rng(devices=[]):
                return dumps(everywhere.plan(model, given, cluster, loss_fn=loss_fn, **how))
        finally:
            for m, mode in modes.items():
                m.training = mode

    return Plan.loads(from_first(groups, work))


def checked_mesh(mesh: str, others: Mapping[str, object]) -> None:
    """others: arguments that a mesh which is to be found cannot have beside it. Raises AutoparError."""
    if mesh != "auto":
        raise AutoparError(f"a mesh of {mesh!r}", fix='pass axis sizes such as {"dp": 2, "tp": 4}, or "auto" to have them planned')
    given = [name for name, x in others.items() if x is not None]
    if given:
        raise AutoparError(
            f'mesh="auto" leaves everything to the planner, and {given[0]}= is passed', fix=f"leave {given[0]}= out, or pass a mesh"
        )


def tensors_of(model: nn.Module, example_inputs: Mapping[str, Any] | tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """The call's tensors, by keyword. Raises InputError."""
    named = (
        dict(example_inputs) if isinstance(example_inputs, Mapping) else inspect.signature(model.forward).bind(*example_inputs).arguments
    )
    odd = [name for name, x in named.items() if not isinstance(x, torch.Tensor) and x is not None]
    if odd:
        raise InputError(
            f"argument {odd[0]} of the first call is no tensor, and a mesh is planned for calls of tensors alone",
            fix="pass a mesh, or leave it out of example_inputs",
        )
    return {name: x for name, x in named.items() if x is not None}
