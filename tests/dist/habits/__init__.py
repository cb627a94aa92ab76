"""Habits of ordinary training loops. Each is a function that takes `prepared` (what a user calls once on a model: `autopar.compile`, or nothing) and gives
what can be seen of the loop, so that the same text runs in plain PyTorch on one device and on a mesh.

To add one: a function in a file here, under `@habit`. `python -m tests.dist.test_habits --habits its_name` runs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

Prepared = Callable[..., Any]  # (module, **arguments of compile for this habit) -> the module that is used
Habit = Callable[[Prepared], dict[str, Any]]
HABITS: dict[str, Habit] = {}
BOUNDS: dict[str, float] = {}
_FILES = ("outputs", "updates", "weights", "models", "loops", "outside", "customs", "tricks")


def habit(bound: float = 1e-5) -> Callable[[Habit], Habit]:
    """bound: relative error allowed; rounding of float32, if nothing says why more."""

    def register(fn: Habit) -> Habit:
        HABITS[fn.__name__] = fn
        BOUNDS[fn.__name__] = bound
        return fn

    return register


def load() -> dict[str, Habit]:
    for f in _FILES:
        importlib.import_module(f"tests.dist.habits.{f}")
    return HABITS


def plain(model: nn.Module, **kw: Any) -> nn.Module:
    return model
