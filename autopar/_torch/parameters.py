"""Parameters: their hooks, and another value in their place."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._python_dispatch
import torch.utils._pytree


def hooks_of(t: torch.Tensor) -> tuple[Any, Any]:
    """The dicts of its hooks, as `set_hooks` takes them; None where it has none."""
    return t._post_accumulate_grad_hooks, t._backward_hooks


def set_hooks(t: torch.Tensor, hooks: tuple[Any, Any]) -> None:
    """`t` has these hooks. They stay the same dicts, so that the handle of a hook still removes it."""
    after, before = hooks
    if after:
        t._post_accumulate_grad_hooks = after
    if before:
        t._backward_hooks = before


def swap_parameter(p: torch.Tensor, new: torch.Tensor) -> None:
    """`p` becomes `new` in place, and keeps its own hooks (a swap moves them away with the autograd state)."""
    hooks = hooks_of(p)
    torch.utils.swap_tensors(p, new)
    set_hooks(p, hooks)
