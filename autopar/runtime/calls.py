"""How a module is called: its signature, and what of a call is a key."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch


def signed(forward: Callable[..., object], like: Callable[..., object]) -> Callable[..., object]:
    """`forward` with the signature of `like`, by which libraries choose what they pass."""

    def called(*args: object, **kwargs: object) -> object:
        return forward(*args, **kwargs)

    called.__name__, called.__doc__ = "forward", like.__doc__
    with contextlib.suppress(TypeError, ValueError):
        vars(called)["__signature__"] = inspect.signature(like)
    return called


def hashable(constants: tuple[Any, ...]) -> tuple[Any, ...]:
    out = []
    for c in constants:
        try:
            hash(c)
            out.append(c)
        except TypeError:
            out.append(repr(c))
    return tuple(out)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Of the surrounding torch.autocast, if one is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
