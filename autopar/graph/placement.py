"""Placements: where the pieces of a tensor live on the mesh.

Write the index along a dim in mixed radix. A mesh axis of size W that splits the dim owns one digit of it: with
`stride` elements to the right of the digit, element i lives at coordinate `(i // stride) % W`. What is not owned by an axis is
the local index. So a placement is a set of `(axis, dim, stride)`, nothing more, and says

- an ordinary shard of N over tp: stride N / W, the major digit;
- two axes on one dim, in either order: two neighbouring digits;
- a flattened `(b s)` of which s is split: a digit with b to its left;
- a block permutation, as for a fused q,k,v weight split block by block: a digit with "3" to its left.

Two placements are equal exactly if these sets are. Axes that own no digit hold replicas, or terms of a reduction
(`partial`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from autopar.graph.mesh import Mesh


class Split(NamedTuple):
    """Mesh axis `axis` owns the digit of tensor dim `dim` that has `stride` elements to its right."""

    dim: int
    stride: int
    axis: str


@dataclass(frozen=True)
class Placement:
    """shape: the global shape; splits: sorted; partial: sorted (axis, "sum" | "max" | "min")."""

    shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    partial: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(
        shape: tuple[int, ...],
        splits: dict[str, tuple[int, int]] | None = None,
        partial: dict[str, str] | None = None,
    ) -> Placement:
        """From axis -> (dim, stride) and axis -> reduction."""
        return Placement(
            tuple(shape),
            tuple(sorted((Split(d, s, a) for a, (d, s) in (splits or {}).items()))),
            tuple(sorted((partial or {}).items())),
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # placements are keys of many tables, and are made once and looked up often
        return hash((self.shape, self.splits, self.partial))

    @cached_property
    def where(self) -> dict[str, tuple[int, int]]:
        """axis -> (dim, stride)."""
        return {s.axis: (s.dim, s.stride) for s in self.splits}

    @cached_property
    def reductions(self) -> dict[str, str]:
        return dict(self.partial)

    def without_partial(self) -> Placement:
        return Placement(self.shape, self.splits)

    def permuted(self, order: tuple[int, ...]) -> Placement:
        """Of a tensor whose dim i is dim order[i] of this one."""
        to = {d: i for i, d in enumerate(order)}
        splits = tuple(sorted(Split(to[s.dim], s.stride, s.axis) for s in self.splits))
        return Placement(tuple(self.shape[d] for d in order), splits, self.partial)

    @property
    def is_replicate(self) -> bool:
        return not self.splits and not self.partial

    def digits(self, dim: int, mesh: Mesh) -> list[tuple[int, str | None]]:
        """The digits of `dim`, major first: (size, axis or None for local). Digits of size 1 are left out."""
        out: list[tuple[int, str | None]] = []
        left = self.shape[dim]
        for s in sorted((s for s in self.splits if s.dim == dim), reverse=True):
            w = mesh.axis_size(s.axis)
            if left > s.stride * w:
                out.append((left // (s.stride * w), None))
            out.append((w, s.axis))
            left = s.stride
        if left > 1 or not out:
            out.append((left, None))
        return out

    def is_valid(self, mesh: Mesh) -> bool:
        """Every digit divides, and no two overlap."""
        dim, left = -1, 0
        for s in reversed(self.splits):
            if s.dim != dim:
                if not 0 <= s.dim < len(self.shape):
                    return False
                dim, left = s.dim, self.shape[s.dim]
            if s.stride < 1 or left % (s.stride * mesh.axis_size(s.axis)):
                return False
            left = s.stride
        return True

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        found = self._local_shapes.get(mesh)
        if found is None:
            shape = list(self.shape)
            for s in self.splits:
                shape[s.dim] //= mesh.axis_size(s.axis)
            found = self._local_shapes[mesh] = tuple(shape)
        return found

    def share(self, mesh: Mesh) -> float:
        """How much of the whole a rank holds."""
        return math.prod(self.local_shape(mesh)) / max(1, math.prod(self.shape))

    @cached_property
    def _local_shapes(self) -> dict[Mesh, tuple[int, ...]]:
        return {}

    def local_stride(self, split: Split, mesh: Mesh) -> int:
        """How many local elements lie to the right of `split`'s digit."""
        return split.stride // math.prod(mesh.axis_size(s.axis) for s in self.splits if s.dim == split.dim and s.stride < split.stride)

    def with_axis(self, axis: str, at: tuple[int, int] | str | None) -> Placement:
        """The same but for `axis`: at (dim, stride), partial with reduction `at`, or replicated (None)."""
        splits = tuple(s for s in self.splits if s.axis != axis)
        partial = tuple(p for p in self.partial if p[0] != axis)
        if isinstance(at, str):
            partial = tuple(sorted((*partial, (axis, at))))
        elif at is not None:
            splits = tuple(sorted((*splits, Split(*at, axis))))
        return Placement(self.shape, splits, partial)

    def at(self, axis: str) -> tuple[int, int] | str | None:
        """Where `axis` is: (dim, stride), a reduction's name, or None when replicated."""
        return self.where.get(axis) or self.reductions.get(axis)

    def on(self, axes: tuple[str, ...]) -> tuple[tuple[int, int] | str | None, ...]:
        """Where each of `axes` is."""
        found = self._on.get(axes)
        if found is None:
            found = self._on[axes] = tuple(self.at(a) for a in axes)
        return found

    @cached_property
    def _on(self) -> dict[tuple[str, ...], tuple[tuple[int, int] | str | None, ...]]:
        return {}

    def __str__(self) -> str:
        if self.is_replicate:
            return "R"
        parts = [f"{s.axis}:S({s.dim}" + (f"/{s.stride}" if s.stride > 1 else "") + ")" for s in self.splits]
        parts += [f"{a}:P({r})" for a, r in self.partial]
        return " ".join(parts)


def shard(shape: tuple[int, ...], dim: int, axes: tuple[str, ...], mesh: Mesh) -> Placement:
    """`dim` split evenly over `axes`, major first; its size must divide."""
    where: dict[str, tuple[int, int]] = {}
    left = shape[dim]
    for a in axes:
        left //= mesh.axis_size(a)
        where[a] = (dim, left)
    return Placement.of(shape, where)
