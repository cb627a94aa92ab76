"""torch's norm of all gradients, where a rank has those of a pipeline's stage alone."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad


class Stage(Protocol):
    """What a rank has of a model in a pipeline."""

    def counted(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Those of its gradients that no rank before it counts, too; None where the gradients are not this model's."""

    def total(self, norm: torch.Tensor, order: float) -> torch.Tensor:
        """The norm over all stages of what is `norm` here. Collective."""


_stages: weakref.WeakSet[Any] = weakref.WeakSet()


def norms_over(stage: Stage) -> None:
    """From here on `clip_grad_norm_` and `get_total_norm` of this rank's gradients of `stage` give the whole model's norm: every rank of the pipeline then calls them."""
    _stages.add(stage)
    norm: Any = clip_grad._get_total_norm
    if not hasattr(norm, "__wrapped__") or not getattr(norm, "of_stages", False):
        ours: Any = _over_stages(norm)
        clip_grad._get_total_norm = ours
        torch.nn.utils.get_total_norm = ours


def _over_stages(norm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(norm)
    def total(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        for stage in list(_stages):
            mine = stage.counted(given)
            if mine is not None:
                here = norm(mine, norm_type, False, foreach)
                whole: torch.Tensor = stage.total(here.full_tensor() if hasattr(here, "full_tensor") else here, float(norm_type))
                return norm([whole], 2.0, error_if_nonfinite)
        return norm(given, norm_type, error_if_nonfinite, foreach)

    total.of_stages = True  # type: ignore[attr-defined]
    return total
