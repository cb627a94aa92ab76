"""Gradients that are handed over have memory of their own.

Autograd adds to a gradient in place, clipping and scaling do. A graph may give one tensor as the gradient of two parameters (the biases of two layers whose outputs are added), one
that is expanded (of a parameter that is summed), or what it was given itself. Eager autograd copies such a gradient; so do we.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class OwnMemory:
    """Of the gradients of one backward. others: tensors that somebody else holds."""

    def __init__(self, others: Iterable[torch.Tensor]) -> None:
        self._lie: dict[int, list[torch.Tensor]] = {}  # in a storage
        for t in others:
            self._lie.setdefault(t.untyped_storage().data_ptr(), []).append(t)

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """`t`, or a copy where another lies in its place, or several of its elements in one (of a sum's gradient, which is expanded). Parts of one buffer that do not
        overlap stay where they are."""
        if not t.is_contiguous() and _is_expanded(t):
            return t.contiguous()
        here = self._lie.setdefault(t.untyped_storage().data_ptr(), [])
        if any(_overlap(t, other) for other in here):
            return t.clone()
        here.append(t)
        return t


def _is_expanded(t: torch.Tensor) -> bool:
    """Whether several elements may lie in one place."""
    reach = 0  # of the dims looked at so far, from the first element to the last
    for size, stride in sorted(zip(t.shape, t.stride(), strict=True), key=lambda x: x[1]):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of tensors in one storage, by the first and last byte of each."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    (a_first, a_end), (b_first, b_end) = _bytes(a), _bytes(b)
    return a_first < b_end and b_first < a_end


def _bytes(t: torch.Tensor) -> tuple[int, int]:
    last = int(t.storage_offset()) + sum((int(n) - 1) * int(s) for n, s in zip(t.shape, t.stride(), strict=True))
    return int(t.storage_offset()) * t.element_size(), (last + 1) * t.element_size()
