"""Gradients that are handed over have memory of their own.

Autograd adds to a gradient in place, clipping and scaling do. A graph may give one tensor as the gradient of two parameters (the biases of two layers whose outputs are added), one
that is expanded (of a parameter that is summed), or what it was given itself. Eager autograd copies such a gradient; so do we.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import torch


class OwnMemory:
    """Of the gradients of one backward. others: tensors that somebody else holds."""

    def __init__(self, others: Iterable[torch.Tensor]) -> None:
        # Stretches of memory that are taken, in order: where each begins and ends.
        self._first: list[int] = []
        self._end: list[int] = []
        for t in others:
            self._take(*_bytes(t))

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """`t`, or a copy where another lies in its place, or several of its elements in one (of a sum's gradient, which is expanded). Parts of one buffer that do not
        overlap stay where they are."""
        if not t.is_contiguous() and _is_expanded(t):
            return t.contiguous()
        first, end = _bytes(t)
        at = bisect_right(self._end, first)
        if at < len(self._first) and self._first[at] < end and first < end:
            return t.clone()
        self._take(first, end)
        return t

    def _take(self, first: int, end: int) -> None:
        """Together with what it overlaps."""
        if first == end:
            return
        at = bisect_right(self._end, first)
        until = at
        while until < len(self._first) and self._first[until] < end:
            first, end = min(first, self._first[until]), max(end, self._end[until])
            until += 1
        self._first[at:until], self._end[at:until] = [first], [end]


def _is_expanded(t: torch.Tensor) -> bool:
    """Whether several elements may lie in one place."""
    reach = 0  # of the dims looked at so far, from the first element to the last
    for size, stride in sorted(zip(t.shape, t.stride(), strict=True), key=lambda x: x[1]):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _bytes(t: torch.Tensor) -> tuple[int, int]:
    """Addresses of its first byte and behind its last."""
    first = t.data_ptr()
    if t.numel() == 0:
        return first, first
    if t.is_contiguous():
        return first, first + t.nbytes
    last = sum((int(n) - 1) * int(s) for n, s in zip(t.shape, t.stride(), strict=True))
    return first, first + (last + 1) * t.element_size()
