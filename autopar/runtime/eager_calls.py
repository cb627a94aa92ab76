"""The model's own methods besides forward (`generate`, `encode`, ...), run as the plain PyTorch that they are.

They call modules one by one, outside of any captured step. While one runs, each module that is called has its own parameters whole, gathered when it is called and
given back when it returns, so no rank holds more than one module's: slow for many small calls, and right for any.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar import _torch


def run_whole(model: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` of `model`, which finds whole parameters in the modules that it calls. Collective."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with whole_parameters(model):
            out = method(*args, **kwargs)
        if any(isinstance(t, torch.Tensor) and t.grad_fn is not None for t in _torch.pytree.tree_leaves(out)):
            warnings.warn(
                f"{type(model).__name__}.{method.__name__} ran as plain PyTorch, all of it on every rank, and what it returned has gradients: only forward is compiled "
                "and split over the mesh",
                stacklevel=2,
            )
        return out

    return run


def is_method_of(model: nn.Module, value: object) -> bool:
    """Whether `value` is a method that a class of the model's own gave it; torch's are run as they are."""
    if not inspect.ismethod(value) or value.__self__ is not model:
        return False
    return not value.__func__.__module__.startswith("torch.")


@contextlib.contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """While open, modules of `model` that are called have whole parameters. A gradient goes where the parameter lies."""
    held: dict[nn.Module, list[dict[str, Any]]] = {}

    def gather(m: nn.Module, args: Any) -> None:
        held.setdefault(m, []).append(dict(m._parameters))
        for name, p in m._parameters.items():
            if isinstance(p, DTensor):
                m._parameters[name] = _whole(p)

    def release(m: nn.Module, args: Any, output: Any) -> None:
        m._parameters.update(held[m].pop())

    handles = []
    try:
        for m in model.modules():
            if any(isinstance(p, DTensor) for p in m._parameters.values()):
                handles += [m.register_forward_pre_hook(gather, prepend=True), m.register_forward_hook(release, always_call=True)]
        yield
    finally:
        for h in handles:
            h.remove()
        for m, kept in held.items():
            if kept:  # an error on the way
                m._parameters.update(kept[0])


def _whole(p: DTensor) -> Any:
    whole = p.full_tensor()
    return whole if torch.is_grad_enabled() and p.requires_grad else whole.detach()
