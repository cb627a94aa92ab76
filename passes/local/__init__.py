"""Local lowerings: what a rank runs for an op that is split, where that is more than the same op on its shard.

To add one: a function `fn(ctx, *args, **kwargs)` registered with `@local("aten.op.overload")`. It receives the op's own
arguments with every tensor local (already in the placement the strategy asks for), and returns the local outputs, in
plain torch ops; it is traced into the graph. `ctx` (see `context.Local`) has the placements, rank coordinates, global
indices and reductions over mesh axes. Ops that are not registered run unchanged, with size arguments made local
(`sizes.SIZE_ARG`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, cast

import torch

from autopar.passes.local.context import Local

LocalFn = Callable[..., Any]
_LOCAL: dict[str, LocalFn] = {}
_MODULES = ("view", "reduction", "norm", "index", "factory", "attention", "conv", "loss", "random", "moe", "experts", "loss_head")


def local(*targets: str) -> Callable[[LocalFn], LocalFn]:
    def register(fn: LocalFn) -> LocalFn:
        for t in targets:
            assert t not in _LOCAL, f"two local lowerings for {t}"
            _LOCAL[t] = fn
        return fn

    return register


def lookup(target: str) -> LocalFn | None:
    _load()
    return _LOCAL.get(target)


@functools.cache
def _load() -> None:
    for m in _MODULES:
        importlib.import_module(f"autopar.passes.local.{m}")


def operator(target: str) -> Callable[..., Any]:
    """The torch operator named `target`, for a lowering that runs it on other arguments."""
    found: Callable[..., Any] = functools.reduce(getattr, target.split("."), cast(Any, torch.ops))
    return found


def one_tensor(result: Any) -> torch.Tensor:
    """The tensor that an operator returned; torch does not say which of its operators return one."""
    assert isinstance(result, torch.Tensor)
    return result


def apply(ctx: Local, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `ctx.op` (whose operator is `fn`) on local tensors, giving local outputs."""
    from autopar.passes.local.sizes import SIZE_ARG

    lowering = lookup(ctx.op.target)
    if lowering is not None:
        return lowering(ctx, *args, **kwargs)
    at = SIZE_ARG.get(ctx.op.target)
    if at is not None and at < len(args):
        args = (*args[:at], list(ctx.local_shape()), *args[at + 1 :])
    return fn(*args, **kwargs)
