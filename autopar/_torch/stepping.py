"""The first step of an optimizer on parameters of a mesh, looked at operator by operator, so that one that fails is told with the parameter that it failed on.

torch says that a step begins and that it has ended, not that it has failed. So a mode that has seen a failure lets everything pass from then on, and leaves at the next
occasion (`leave`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

Refuse = Callable[[str, str, BaseException | None], Exception]
_open: list[Stepping] = []


class Stepping(TorchDispatchMode):
    """named: tensors and what they are ("gradient of a.weight"); what is computed of one keeps its name. refuse: makes the error of (operator, tensor, what torch said)."""

    def __init__(self, named: Mapping[torch.Tensor, str], refuse: Refuse) -> None:
        super().__init__()
        self.names: Any = WeakTensorKeyDictionary()
        self.refuse, self.failed, self.trying = refuse, False, False
        for t, name in named.items():
            self.names[t] = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.failed:
            return func(*args, **(kwargs or {}))
        ours = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t in self.names]
        try:
            out = func(*args, **(kwargs or {}))
        except Exception as e:
            if self.trying:
                raise
            self.failed = True
            if not ours:
                raise
            raise self.refuse(str(func), self.names[ours[0]], e) from e
        if ours:
            for t in torch.utils._pytree.tree_leaves(out):
                if isinstance(t, torch.Tensor):
                    self.names.setdefault(t, self.names[ours[0]])
        return out

    def memory_asked(self, t: torch.Tensor) -> None:
        """Somebody wants the address of a tensor, for a kernel of his own."""
        if not self.failed and t in self.names:
            self.failed = True
            raise self.refuse("data_ptr", self.names[t], None)


def begin(named: Mapping[torch.Tensor, str], refuse: Refuse) -> None:
    leave()
    mode = Stepping(named, refuse)
    mode.__enter__()
    _open.append(mode)


def leave() -> None:
    """The step has ended, or has failed some time ago."""
    while _open and _get_current_dispatch_mode() is _open[-1]:
        _open.pop().__exit__(None, None, None)


@contextlib.contextmanager
def trying() -> Iterator[None]:
    """What fails in here has another way."""
    mode, before = current(), False
    if mode is not None:
        before, mode.trying = mode.trying, True
    try:
        yield
    finally:
        if mode is not None:
            mode.trying = before


def current() -> Stepping | None:
    return _open[-1] if _open else None
