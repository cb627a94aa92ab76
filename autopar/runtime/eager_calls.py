"""The model's own methods besides forward (`generate`, `encode`, ...), run as the plain PyTorch that they are.

They call modules one by one, outside of any captured step. While one runs, each module that is called has its own parameters whole, gathered when it is called and
given back when it returns, so no rank holds more than one module's: slow for many small calls, and right for any.

Gathering is collective. Ranks that do different things (one's samples end earlier) would wait for each other, or take one's data for another's: before every gather they compare which module it is
for, and each says when its call has ended.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.distributed.failures import during
from autopar.distributed.groups import Groups
from autopar.errors import AutoparError


def run_whole(model: nn.Module, method: Callable[..., Any], groups: Groups, own_inputs: bool) -> Callable[..., Any]:
    """`method` of `model`, which finds whole parameters in the modules that it calls. Collective. own_inputs: each rank has its own.

    Raises AutoparError, on all ranks, where they call different modules, or one ends before another.
    """

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if own_inputs and method.__name__ == "generate" and _waits(method, groups):
            kwargs.setdefault("synced_gpus", True)  # transformers': a rank whose samples have ended goes on with the others
        with during(f"{method.__name__}: gathering parameters", groups.ranks), whole_parameters(model, groups, method.__name__):
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


def _waits(method: Callable[..., Any], groups: Groups) -> bool:
    """It compares over all of the job."""
    return len(groups.ranks) > 1 and len(groups.ranks) == dist.get_world_size() and "synced_gpus" in inspect.signature(method).parameters


_open: set[nn.Module] = set()  # models of which a method runs
ENDED, FAILED = -1, -2  # what a rank is at, where it is no module


def _compare(at: int, names: list[str], groups: Groups, method: str) -> None:
    """All ranks are at the same module, or all have ended."""
    if len(groups.ranks) == 1:
        return
    mine = torch.tensor([at], dtype=torch.int64, device=groups.device_mesh.device_type)
    parts = [torch.empty_like(mine) for _ in groups.ranks]
    dist.all_gather(parts, mine, group=groups.everyone)
    found = [int(p) for p in parts]
    if len(set(found)) == 1 or at == FAILED:
        return
    said = {ENDED: "has returned", FAILED: "has failed"}
    lines = ", ".join(f"rank {r} {said.get(f) or 'calls ' + (names[f] or 'the model')}" for r, f in zip(groups.ranks, found, strict=True))
    raise AutoparError(
        f"{method} does different things on different ranks: {lines}",
        where=f"{method}, which runs eagerly and gathers parameters on all ranks at once",
        fix="call it on all ranks, with inputs that lead to the same calls: the same batch, or lengths and steps that do not depend on the samples",
    )


@contextlib.contextmanager
def whole_parameters(model: nn.Module, groups: Groups, method: str) -> Iterator[None]:
    """While open, modules of `model` that are called have whole parameters. A gradient goes where the parameter lies."""
    held: dict[nn.Module, list[dict[str, Any]]] = {}
    names = [n for n, _ in model.named_modules()]
    numbers = {m: i for i, m in enumerate(model.modules())}
    outer = model not in _open  # a method may call another

    def gather(m: nn.Module, args: Any) -> None:
        if any(isinstance(p, DTensor) for p in m._parameters.values()):
            _compare(numbers[m], names, groups, method)
        held.setdefault(m, []).append(dict(m._parameters))
        for name, p in m._parameters.items():
            if isinstance(p, DTensor):
                m._parameters[name] = _whole(p)

    def release(m: nn.Module, args: Any, output: Any) -> None:
        m._parameters.update(held[m].pop())

    handles = []
    try:
        _open.add(model)
        for m in model.modules():
            if any(isinstance(p, DTensor) for p in m._parameters.values()):
                handles += [m.register_forward_pre_hook(gather, prepend=True), m.register_forward_hook(release, always_call=True)]
        yield
    except BaseException as e:
        if outer and handles and isinstance(e, Exception) and not isinstance(e, (AutoparError, dist.DistError)):
            _compare(FAILED, names, groups, method)
        raise
    else:
        if outer and handles:
            _compare(ENDED, names, groups, method)
    finally:
        if outer:
            _open.discard(model)
        for h in handles:
            h.remove()
        for m, kept in held.items():
            if kept:  # an error on the way
                m._parameters.update(kept[0])


def _whole(p: DTensor) -> Any:
    whole = p.full_tensor()
    return whole if torch.is_grad_enabled() and p.requires_grad else whole.detach()
