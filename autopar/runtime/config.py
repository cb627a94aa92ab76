"""What a model was compiled with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from autopar.pipeline import Lists
from autopar.plan.plan import Plan
from autopar.planner.layout import Layout
from autopar.planner.loss_head import AUTO
from autopar.planner.precision import Precision
from autopar.planner.request import PlanRequest


@dataclass(frozen=True)
class Config:
    """The arguments of `autopar.compile`. layout: a hand layout; None: planned, as `request` says. find: the plan of a first training call, mesh and all, where that is to be found: of the model and the call's arguments."""

    loss_fn: Callable[..., torch.Tensor] | None
    inputs: str
    layout: str | Layout | None
    precision: Precision
    optimizer: str | type[torch.optim.Optimizer]
    grad_accumulation: int
    backend: str
    outputs: str
    request: PlanRequest
    dynamic: bool | None = None
    buckets: tuple[int, ...] | None = None
    bucket_collectives: bool = True
    micro_batches: int | str | None = None
    schedule: Lists | None = None  # of a mesh with an axis `pp`
    loss_head: str = AUTO
    artifacts: Path | None = None
    find: Callable[[nn.Module, tuple[object, ...], Mapping[str, object]], Plan] | None = None
