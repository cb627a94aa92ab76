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


def move_parameter(p: Any, there: Any) -> None:
    """The DTensor `p` lies as `there`, of the same values, does. In place: what autograd recorded of `p` stays, and so do its hooks."""
    p._local_tensor, p._spec = there._local_tensor, there._spec
