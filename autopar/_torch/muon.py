"""torch.optim.Muon's step, which takes matrices one by one: a place to put another in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Step = Callable[..., None]


def replace_muon_step(step: Callable[[Step], Step]) -> None:
    """`step` makes the function that Muon calls of torch's own. Once; nothing where torch has no Muon."""
    try:
        from torch.optim import _muon as theirs
    except ImportError:
        return
    own: Any = theirs._single_tensor_muon
    if not hasattr(own, "__wrapped__"):
        theirs._single_tensor_muon = functools.update_wrapper(step(own), own)


def orthogonalized(matrix: torch.Tensor, coefficients: Any, steps: int, eps: float) -> torch.Tensor:
    """The Newton-Schulz iteration, in bfloat16."""
    from torch.optim import _muon as theirs

    return theirs._zeropower_via_newtonschulz(matrix, coefficients, steps, eps)


def adjusted_lr(lr: float, how: str | None, shape: torch.Size) -> float:
    from torch.optim import _muon as theirs

    return float(theirs._adjust_lr(lr, how, shape))
