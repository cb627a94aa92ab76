"""The functions that torch.optim's classes call with lists of parameters, gradients and state: a place to put others in."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

Step = Callable[..., None]

# An element of a parameter and of its state depends on that element of the gradient and of the state alone.
BY_ELEMENTS = ("adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")


def replace_steps_by_elements(step: Callable[[Step], Step]) -> None:
    """`step` makes the functions that optimizers which work by elements call, of torch's own. Once."""
    for name in BY_ELEMENTS:
        module: Any = importlib.import_module(f"torch.optim.{name}")
        own: Any = getattr(module, name)
        if not hasattr(own, "made_by_autopar"):
            made: Any = functools.update_wrapper(step(own), own)
            made.made_by_autopar = True
            setattr(module, name, made)


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
