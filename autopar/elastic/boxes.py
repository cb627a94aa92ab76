"""Parts of a tensor that ranks hold, and what is common to two of them: arithmetic of (start, length) by dim."""

from __future__ import annotations

import math
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
ALIGNED = 16  # bytes: where a tensor may begin in a flat buffer


@dataclass(frozen=True)
class Spec:
    """A tensor of the state. dim: that ranks have chunks of, of ceil(N / W), as DTensor cuts; None: all have all of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    element_bytes: int
    dim: int | None

    def box(self, rank: int, ranks: int) -> Box:
        if self.dim is None:
            return tuple((0, n) for n in self.shape)
        n = self.shape[self.dim]
        chunk = -(-n // ranks)
        start = min(chunk * rank, n)
        return tuple((start, min(chunk, n - start)) if d == self.dim else (0, m) for d, m in enumerate(self.shape))


def elements(box: Box) -> int:
    return math.prod(n for _, n in box)


def common(a: Box, b: Box) -> Box | None:
    """What is in both; None where nothing is."""
    out = []
    for (start, n), (other, m) in zip(a, b, strict=True):
        begin, end = max(start, other), min(start + n, other + m)
        if begin >= end:
            return None
        out.append((begin, end - begin))
    return tuple(out)


def within(part: Box, whole: Box) -> tuple[slice, ...]:
    """Where `part` lies in what `whole` holds."""
    return tuple(slice(a - b, a - b + n) for (a, n), (b, _) in zip(part, whole, strict=True))


def offsets(specs: tuple[Spec, ...], rank: int, ranks: int) -> tuple[dict[str, int], int]:
    """Where each tensor's part begins in the flat buffer of a rank, and the buffer's length, in bytes."""
    at, out = 0, {}
    for s in specs:
        out[s.name] = at
        at += -(-elements(s.box(rank, ranks)) * s.element_bytes // ALIGNED) * ALIGNED
    return out, at


@dataclass(frozen=True)
class Move:
    """A piece of a tensor that rank `old` of the old layout had, and rank `new` of the new one gets. old_box, new_box: what those hold of the tensor."""

    spec: Spec
    piece: Box
    old_box: Box
    new_box: Box


def moves(specs: tuple[Spec, ...], dims: dict[str, int | None], old: int, olds: int, new: int, news: int, home: int = 0) -> list[Move]:
    """Of what `old` of `olds` ranks has, what `new` of `news` wants. dims: by which dim each tensor is cut there. What all olds have, `home` gives: the one that `new` was."""
    out = []
    for s in specs:
        if s.dim is None and old != home:
            continue
        before = s.box(old, olds)
        after = Spec(s.name, s.shape, s.dtype, s.element_bytes, dims[s.name]).box(new, news)
        piece = common(before, after)
        if piece is not None:
            out.append(Move(s, piece, before, after))
    return out
