"""Names of torch's modules, replaced for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.utils._python_dispatch
import torch.utils._pytree


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


@contextlib.contextmanager
def replaced(*items: tuple[Any, str, Any]) -> Iterator[None]:
    """While open, `name` of a module or class is something else; what this torch does not have is left out."""
    with ExitStack() as stack:
        for where, name, new in items:
            if hasattr(where, name):
                stack.enter_context(mock.patch.object(where, name, new))
        yield


@contextlib.contextmanager
def replaced_composites(new: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """While open, what these operators are composed of is what their functions say."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    before = {op: op.py_kernels.get(key) for op in new}
    for op, fn in new.items():
        op.py_kernels[key] = fn
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, fn in before.items():
            if fn is None:
                del op.py_kernels[key]
            else:
                op.py_kernels[key] = fn
            op._dispatch_cache.clear()


@contextlib.contextmanager
def other_code(*functions: tuple[Any, Any]) -> Iterator[None]:
    """While open, each of these functions runs the code beside it, under whatever names it was imported: of a function that uses no names of its file."""
    before = [(f, f.__code__, f.__defaults__, f.__kwdefaults__) for f, _ in functions]
    try:
        for f, code in functions:
            f.__code__ = code
        yield
    finally:
        for f, code, defaults, named in before:
            f.__code__, f.__defaults__, f.__kwdefaults__ = code, defaults, named
