"""Grouped matrix products of a rank that has some of the experts: the rows of these move to the front, the others give zero.

The rows of expert j are those from offsets[j - 1] to offsets[j]. With a rank's rows brought together in order, the running sum of its
experts' row counts are the offsets that the kernel wants; what it computes is sent back to where the rows came from.
"""

from __future__ import annotations

from typing import Any

import torch

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


@local("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
def _grouped_mm(ctx: Local, x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, *rest: Any, **kwargs: Any) -> torch.Tensor:
    op = operator(ctx.op.target)
    if not ctx.is_split("e"):
        return op(x, w, offs, *rest, **kwargs)  # type: ignore[no-any-return]
    if w.dim() == 2:
        experts = ctx.outputs[0]
        assert experts is not None
        rows = _Rows(ctx.index(experts, 0), w.shape[0], offs)
        return op(x.index_select(1, rows.front), rows.to_front(w), rows.offsets, *rest, **kwargs)  # type: ignore[no-any-return]
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
