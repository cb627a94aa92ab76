"""Optimizers that work by elements step the parts themselves.

Adam, SGD and their kind ask an element of the gradient and of the state for each element of a parameter, so that on parts of all of them, split alike, they do what they
do on the whole. A DTensor's operator costs some 50 microseconds beside a tensor's 5: of a step of many small parameters that is more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.distributed.groups import is_ours


def on_parts(theirs: _torch.OptimizerStep) -> _torch.OptimizerStep:
    """A step like torch's own: it takes lists, with an entry for each parameter, first the parameters, then gradients and state. An entry of state may be None, and
    a tensor afterwards."""

    def step(*lists: Any, **how: Any) -> None:
        if torch.compiler.is_compiling() or how.get("differentiable") or any(isinstance(v, DTensor) for v in how.values()):
            return theirs(*lists, **how)
        rows = [each for each in lists if isinstance(each, list) and each]
        if any(len(each) != len(lists[0]) for each in rows):
            return theirs(*lists, **how)
        meshes: dict[int, bool] = {}
        ours = [i for i, each in enumerate(zip(*rows, strict=True)) if _split_alike(each, meshes)]
        if not ours:
            return theirs(*lists, **how)
        parts = [_parts(each, ours) for each in lists]
        theirs(*parts, **how)
        for whole, part in zip(lists, parts, strict=True):
            if whole is not lists[1] and isinstance(whole, list):
                _written(whole, part, ours, lists[1])
        rest = [i for i in range(len(lists[0])) if i not in set(ours)] if len(ours) < len(lists[0]) else []
        if rest:
            others = [[each[i] for i in rest] if isinstance(each, list) and each else each for each in lists]
            theirs(*others, **how)
            for whole, some in zip(lists, others, strict=True):
                for i, t in zip(rest, some, strict=True) if isinstance(whole, list) and whole else ():
                    whole[i] = t
        return None

    return step


def _split_alike(of_one: Sequence[Any], meshes: dict[int, bool]) -> bool:
    """Of a parameter, its gradient and its state: whether an operator by elements may take the parts for the whole. meshes: by id, whether it is one of ours."""
    p = of_one[0]
    if not isinstance(p, DTensor) or not isinstance(of_one[1], DTensor):
        return False
    spec = last = _torch.dtensor_spec(p)
    if (known := meshes.get(id(spec.mesh))) is None:
        known = meshes[id(spec.mesh)] = is_ours(spec.mesh)
    if not known:
        return False
    for t in of_one[1:]:
        if isinstance(t, DTensor):
            other = _torch.dtensor_spec(t)  # state that was made of a gradient shares its
            alike = other is last or (other.placements == spec.placements and other.mesh == spec.mesh and other.shape == spec.shape)
            last = other
        else:
            alike = not isinstance(t, torch.Tensor) or t.numel() == 1
        if not alike:
            return False
    return not any(x.is_partial() for x in spec.placements)


def _parts(each: Any, ours: Sequence[int]) -> Any:
    if not isinstance(each, list) or not each:
        return each
    return [_torch.local_tensor(t) if isinstance(t, DTensor) else t for t in (each[i] for i in ours)]


def _written(whole: list[Any], part: list[Any], ours: Sequence[int], grads: Sequence[Any]) -> None:
    """Tells autograd what was written, and gives back what was made."""
    written = []
    for i, t in zip(ours, part, strict=True) if whole else ():
        if isinstance(whole[i], DTensor):
            written.append(whole[i])
        elif whole[i] is not t:
            whole[i] = _torch.wrapped(t.view_as(t), _torch.dtensor_spec(grads[i]))
    if written:
        torch.autograd.graph.increment_version(written)
