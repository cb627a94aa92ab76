"""Parts of a tensor that ranks hold, and what is common to two of them: arithmetic of (start, length) by dim."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.tensors.owned import chunk

Box = tuple[tuple[int, int], ...]
Sizes = tuple[int, ...]  # of a mesh's axes
Lies = tuple[tuple[int | None, ...], tuple[int, tuple[int, ...]] | tuple[()]]  # dims and stages of a `Spec`
ALIGNED = 16  # bytes: where a tensor may begin in a flat buffer


@dataclass(frozen=True)
class Spec:
    """A tensor of the state. dims: by axis of the mesh, the dim that its ranks have chunks of, of ceil(N / W), axis by axis, as DTensor cuts; None: each has all of it.

    stages: of a pipeline, its axis of the mesh and the places along it that have the tensor; empty: all have. A tensor of one number has the shape (1,). on_host: it is in host memory on
    whatever device parameters are, as the counts of most optimizers."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    element_bytes: int
    dims: tuple[int | None, ...]
    stages: tuple[int, tuple[int, ...]] | tuple[()] = ()
    on_host: bool = False

    def box(self, rank: int, sizes: Sizes) -> Box:
        """sizes: of the mesh, whose last axis is the innermost."""
        at = [rank // math.prod(sizes[axis + 1 :]) % size for axis, size in enumerate(sizes)]
        if self.stages and at[self.stages[0]] not in self.stages[1]:
            return ((0, 0),) * len(self.shape)
        return chunk(self.shape, ((d, n, i) for d, n, i in zip(self.dims, sizes, at, strict=True) if d is not None))


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


def missing(wanted: Box, held: Iterable[Box]) -> int:
    """Elements of `wanted` that are in none of a few boxes, by inclusion and exclusion."""
    known = list(dict.fromkeys(c for box in held if elements(box) and (c := common(wanted, box)) is not None))
    found = elements(wanted)
    for k in range(1, len(known) + 1):
        for some in itertools.combinations(known, k):
            both: Box | None = some[0]
            for box in some[1:]:
                both = None if both is None else common(both, box)
            found += (-1) ** k * (0 if both is None else elements(both))
    return found


def within(part: Box, whole: Box) -> tuple[slice, ...]:
    """Where `part` lies in what `whole` holds."""
    return tuple(slice(a - b, a - b + n) for (a, n), (b, _) in zip(part, whole, strict=True))


def offsets(specs: Sequence[Spec], rank: int, sizes: Sizes) -> tuple[dict[str, int], int]:
    """Where each tensor's part begins in the flat buffer of a rank, and the buffer's length, in bytes."""
    at, out = 0, {}
    for s in specs:
        out[s.name] = at
        at += -(-elements(s.box(rank, sizes)) * s.element_bytes // ALIGNED) * ALIGNED
    return out, at


@dataclass(frozen=True)
class Move:
    """A piece of a tensor that a new rank gets `by` a survivor, from what rank `old` of the old layout had. old_box, new_box: what those two hold of the tensor."""

    by: int
    old: int
    spec: Spec
    piece: Box
    old_box: Box
    new_box: Box


class Moves:
    """From an old layout to a new one. specs, olds: the tensors as they lay, and the sizes of the mesh there; after, news: as they are to lie; source: by old rank and new one, the
    survivor that gives the one's shard to the other."""

    def __init__(self, specs: Sequence[Spec], olds: Sizes, after: Sequence[Spec], news: Sizes, source: Sequence[Sequence[int]]) -> None:
        self.after, self.news, self.source = after, news, source
        self.had: list[tuple[Spec, dict[Box, list[int]]]] = []  # by tensor, each part that there was, with those that had it
        for s in specs:
            parts: dict[Box, list[int]] = {}
            for old in range(math.prod(olds)):
                box = s.box(old, olds)
                if elements(box):
                    parts.setdefault(box, []).append(old)
            self.had.append((s, parts))

    def to(self, new: int, only: int | None = None) -> Iterator[Move]:
        """What `new` is to get, each element once: from itself what it has, of what several have from one of them. only: what this survivor gives."""
        for (spec, parts), there in zip(self.had, self.after, strict=True):
            wanted: Box | None = None
            for box, olds in parts.items():
                old = next((o for o in olds if self.source[o][new] == new), olds[new % len(olds)])
                by = self.source[old][new]
                if only is not None and by != only:
                    continue
                wanted = there.box(new, self.news) if wanted is None else wanted
                piece = common(box, wanted)
                if piece is not None:
                    yield Move(by, old, spec, piece, box, wanted)


def laid_out(specs: Sequence[Spec], lies: Mapping[str, Lies]) -> tuple[Spec, ...]:
    """The same tensors on another mesh."""
    return tuple(replace(s, dims=lies[s.name][0], stages=lies[s.name][1]) for s in specs)
