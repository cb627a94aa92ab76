"""Hooks of modules that cannot run, or not be called as torch calls them: told by name before a step is captured, where the error would speak of capture."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from autopar.errors import AutoparError


def refuse_unfit_hooks(module: nn.Module, name: str) -> None:
    """Raises AutoparError for a hook of `module`, which is called `name`, on its backward; for one on its forward that does not take what it is given."""
    for hook in (*module._backward_pre_hooks.values(), *module._backward_hooks.values()):
        raise AutoparError(
            f"module backward hooks cannot run ({getattr(hook, '__qualname__', type(hook).__qualname__)}): the backward pass is one compiled graph",
            where=f"module {name!r}",
            fix="use a hook on the parameters (register_post_accumulate_grad_hook), or on a tensor in forward, or remove it before training",
        )
    for kind, hook, given in _hooks(module):
        try:
            signature = inspect.signature(hook)
        except (TypeError, ValueError):
            continue  # a builtin: it is found out when it is called
        try:
            signature.bind(*given)
        except TypeError:
            takes = ", ".join(map(str, signature.parameters.values()))
            raise AutoparError(
                f"the {kind} {getattr(hook, '__qualname__', type(hook).__qualname__)} takes ({takes}), and is called with ({', '.join(given)})",
                where=f"module {name!r}",
                fix=f"let it take {len(given)} arguments; with_kwargs=True, where it is registered, adds the keywords of the call",
            ) from None


def _hooks(module: nn.Module) -> Iterator[tuple[str, Any, list[str]]]:
    """Kind, hook, and what torch calls it with."""
    for i, hook in module._forward_pre_hooks.items():
        yield "forward pre-hook", hook, ["module", "args", *(["kwargs"] if i in module._forward_pre_hooks_with_kwargs else [])]
    for i, hook in module._forward_hooks.items():
        yield "forward hook", hook, ["module", "args", *(["kwargs"] if i in module._forward_hooks_with_kwargs else []), "output"]
