"""Gradients that are handed over have memory of their own.

Autograd adds to a gradient in place, clipping and scaling do, and a graph may give one tensor as the gradient of two parameters (the biases of two layers whose
outputs are added), or what it was given itself. Eager autograd copies such a gradient; so do we.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class OwnMemory:
    """Of the gradients of one backward. others: tensors that somebody else holds."""

    def __init__(self, others: Iterable[torch.Tensor]) -> None:
        self._taken: dict[int, list[tuple[int, int]]] = {}
        for t in others:
            self.of(t, copies=False)

    def of(self, t: torch.Tensor, copies: bool = True) -> torch.Tensor:
        """`t`, or a copy where another lies in its place. Parts of one buffer that do not overlap stay where they are."""
        storage = t.untyped_storage().data_ptr()
        if t.numel() == 0 or storage == 0:
            return t
        start = int(t.storage_offset()) * t.element_size()
        end = start + (1 + sum((int(n) - 1) * int(s) for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()
        taken = self._taken.setdefault(storage, [])
        if copies and any(start < b and a < end for a, b in taken):
            return t.clone()
        taken.append((start, end))
        return t
