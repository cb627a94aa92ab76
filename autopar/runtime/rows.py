"""Rows: how a mesh splits the first dim of what a model returns, and what moves between a rank's rows and the whole.

Every rank's program is the same, and so is every plain tensor in it. Hence the pairs of a forward and its backward:

    whole     all-gather            | cut
    cut       cut                   | all-gather       of what was plain, and has as many rows
    copy      as it is              | all-reduce       of what was plain, and every row is computed with
    sum       all-reduce            | as it is         of parts of a sum over rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.distributed.failures import during
from autopar.distributed.groups import Groups
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement, shard


@dataclass(frozen=True)
class Rows:
    """axes: of the user's mesh, over which rows are dealt out, the first one's ranks having the longest stretches."""

    groups: Groups
    axes: tuple[str, ...]

    @property
    def parts(self) -> int:
        return self.groups.mesh.sizes_product(self.inner)

    @property
    def inner(self) -> tuple[str, ...]:
        mesh = self.groups.mesh
        return tuple(c for a in self.axes for c in mesh.children(a))

    def placement(self, shape: tuple[int, ...]) -> Placement:
        return shard(shape, 0, self.inner, self.groups.mesh)

    def gathered(self, local: torch.Tensor) -> torch.Tensor:
        """The whole, on every rank. Collective."""
        with during("outputs: gathered for an operation that needs the whole", self.groups.ranks):
            return self.groups.gathered(local, self.inner)

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of `whole`: a view."""
        at, n = 0, whole.shape[0] // self.parts
        for a in self.inner:
            at = at * self.groups.mesh.axis_size(a) + self.groups.coordinates[a]
        return whole.narrow(0, at * n, n)

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """Added up over all rows' ranks. Collective."""
        with during("outputs: a sum over samples", self.groups.ranks):
            return self.groups.summed(part, self.inner)


def rows_of(shape: tuple[int, ...], p: Placement, groups: Groups) -> Rows | None:
    """Over which axes the rows of an output at `p` are dealt out: as many as its rows divide by, those first that split them already. None where none does."""
    mesh, n = groups.mesh, shape[0]
    already = {s.axis for s in p.splits if s.dim == 0}
    axes: list[str] = []
    for a in sorted(groups.axes, key=lambda a: not already & set(mesh.children(a))):
        size = _size(a, mesh)
        if size > 1 and n % size == 0:
            axes.append(a)
            n //= size
    return Rows(groups, tuple(a for a in groups.axes if a in axes)) if axes else None


def _size(axis: str, mesh: Mesh) -> int:
    return mesh.sizes_product(mesh.children(axis))


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        return rows.gathered(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.rows.mine(grad).contiguous(), None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        return rows.mine(whole).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.rows.gathered(grad), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.rows.summed(grad), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, rows: Rows) -> torch.Tensor:
        return rows.summed(part)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


Moved = Callable[[torch.Tensor, Rows], torch.Tensor]
whole: Moved = _Whole.apply
cut: Moved = _Cut.apply
copy: Moved = _Copy.apply
total: Moved = _Sum.apply
