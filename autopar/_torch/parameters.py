"""Parameters: their hooks, and another value in their place; values of many buffers at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
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


class _WithGradient:
    """A hook that is not called where there is no gradient. after: it takes the parameter, else the gradient."""

    def __init__(self, hook: Callable[[Any], Any], after: bool) -> None:
        functools.update_wrapper(self, hook, updated=())
        self.hook, self.after = hook, after

    def __call__(self, x: Any) -> Any:
        return None if (x.grad if self.after else x) is None else self.hook(x)


def quiet_without_gradient(p: torch.Tensor) -> None:
    """autograd calls hooks of `p` with None when a Function gives it no gradient: those that there are by now are then not called."""
    for after, hooks in zip((True, False), hooks_of(p), strict=True):
        for key, hook in (hooks or {}).items():
            if not isinstance(hook, _WithGradient):
                hooks[key] = _WithGradient(hook, after)


def move_parameter(p: Any, there: Any) -> None:
    """The DTensor `p` lies as `there`, of the same values, does. In place: what autograd recorded of `p` stays, and so do its hooks."""
    p._local_tensor, p._spec = there._local_tensor, there._spec


def copy_each(to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """`a.copy_(b)` for each pair, in one call."""
    if to:
        torch._foreach_copy_(to, values)
