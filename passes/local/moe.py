"""Grouped matrix products of a rank that has some of the experts: the rows of these move to the front, the others give zero.

The rows of expert j are those from offsets[j - 1] to offsets[j]. With a rank's rows brought together in order, the running sum of its
experts' row counts are the offsets that the kernel wants; what it computes is sent back to where the rows came from.

Masked scatter: a place takes the element whose number is the count of true places before it in the whole mask, which every rank has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from autopar.graph.placement import Placement
from autopar.passes.local import local, operator
from autopar.passes.local.context import Local


class _Rows:
    """The rows of this rank's experts (their global indices), of so many rows in all."""

    def __init__(self, experts: torch.Tensor, rows: int, offsets: torch.Tensor) -> None:
        counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
        self.offsets = counts.index_select(0, experts).cumsum(0).to(offsets.dtype)
        # One more for rows behind the last offset, which belong to no expert.
        owned = torch.zeros(offsets.shape[0] + 1, dtype=torch.bool).index_fill(0, experts, True)
        mine = owned[torch.searchsorted(offsets, torch.arange(rows, dtype=offsets.dtype), right=True)]
        self.mine = mine.unsqueeze(1)
        self.front = torch.argsort((~mine).to(torch.int64), stable=True)
        self.back = (mine.cumsum(0) - 1).clamp(min=0)

    def to_front(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, self.front)

    def to_back(self, x: torch.Tensor) -> torch.Tensor:
        """Also drops what the kernel leaves in the rows of other experts: anything at all."""
        return torch.where(self.mine, x.index_select(0, self.back), 0)


def _out(ctx: Local) -> Placement:
    p = ctx.outputs[0]
    assert p is not None
    return p


@local("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
def _grouped_mm(ctx: Local, x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
    op: Callable[..., torch.Tensor] = operator(ctx.op.target)
    if w.dim() == 2:
        features_last = x.mT
        if ctx.is_split("e"):
            rows = _Rows(ctx.index(_out(ctx), 0), w.shape[0], offs)
            features_last, w, offs = rows.to_front(features_last), rows.to_front(w), rows.offsets
        # The dim that is stored last has to be of whole units: features are, rows are as many as there are tokens.
        return op(features_last.contiguous().mT, w, offs, *rest, **kwargs)
    if not ctx.is_split("e"):
        return op(x, w, offs, *rest, **kwargs)
    rows = _Rows(ctx.index(ctx.inputs[1], 0), x.shape[0], offs)
    return rows.to_back(op(rows.to_front(x), w, rows.offsets, *rest, **kwargs))


@local("transformers.grouped_mm_fallback_backward.default")
def _grouped_mm_backward(ctx: Local, x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, grad: torch.Tensor) -> Any:
    op = operator(ctx.op.target)
    if not ctx.is_split("e"):
        return op(x, w, offs, grad)
    rows = _Rows(ctx.index(ctx.inputs[1], 0), x.shape[0], offs)
    dx, dw = op(rows.to_front(x), w, rows.offsets, rows.to_front(grad))
    return rows.to_back(dx), dw


def _here(ctx: Local, placement: Placement, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part, under `placement`, of a whole mask, and the number of the source's element at every place of it."""
    mask = mask.expand(placement.shape)
    order = (mask.reshape(-1).cumsum(0) - 1).reshape(mask.shape)
    for dim in sorted({s.dim for s in placement.splits}):
        index = ctx.index(placement, dim)
        mask, order = mask.index_select(dim, index), order.index_select(dim, index)
    return mask, order


@local("aten.masked_scatter.default")
def _masked_scatter(ctx: Local, x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    mask, order = _here(ctx, _out(ctx), mask)
    # One more, for the places where the mask is false.
    elements = torch.cat([source.reshape(-1), source.new_zeros(1)])
    return torch.where(mask, elements[torch.where(mask, order, source.numel())], x)


@local("aten.masked_scatter_backward.default")
def _masked_scatter_backward(ctx: Local, grad: torch.Tensor, mask: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    mask, order = _here(ctx, ctx.inputs[0], mask)
    elements = math.prod(sizes)
    # One more, dropped, for the places where the mask is false.
    out = grad.new_zeros(elements + 1).scatter(0, torch.where(mask, order, elements).reshape(-1), grad.reshape(-1))
    return out[:elements].reshape(sizes)
