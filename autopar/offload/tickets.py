"""Tensors that stand for, and own, something that is no tensor.

A ticket is a CPU int64 tensor [1] with a number. Its storage holds the object: autograd, Inductor and whoever else keeps the tensor, in
Python or C++, keep the object, and the last to let go frees it. Several tickets may own one object. A copy of a ticket has the number and
owns nothing.
"""

from __future__ import annotations

import itertools
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from autopar.offload.errors import OffloadError

T = TypeVar("T")

_OBJECTS: WeakValueDictionary[int, Any] = WeakValueDictionary()  # of the process: an op finds by number what another op made
_NUMBERS = itertools.count(1)


class _Owner(np.ndarray):
    """An array with an attribute; torch.from_numpy holds the array object itself until the storage dies."""

    thing: object


def ticket_of(thing: object) -> Tensor:
    number = next(_NUMBERS)
    _OBJECTS[number] = thing
    array = np.full(1, number, dtype=np.int64).view(_Owner)
    array.thing = thing
    return torch.from_numpy(array)


def empty_ticket() -> Tensor:
    """What a ticket looks like, for shape propagation."""
    return torch.empty(1, dtype=torch.int64, device="cpu")


def redeem(ticket: Tensor, kind: type[T]) -> T:
    thing = _OBJECTS.get(int(ticket[0]))
    if not isinstance(thing, kind):
        fix = "keep the tensor that the op gave, not a copy of it; in backward: a graph that was freed cannot run again (retain_graph=True)"
        raise OffloadError(f"ticket {int(ticket[0])} stands for no {kind.__name__.lower()} that is alive", fix=fix)
    return thing
