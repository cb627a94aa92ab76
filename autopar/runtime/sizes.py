"""Which sizes of a call's inputs vary, by what was seen and what the user says.

A size that was seen to differ once will differ again, so it is taken for one that varies (as torch.compile does); dims that always had the same size as each other have one
in common. What is marked (`torch._dynamo.mark_dynamic`, `maybe_mark_dynamic`) varies from the first call on, what is marked static never does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar import _torch
from autopar.capture.capture import Call, Shapes
from autopar.graph.graph import Tensor
from autopar.graph.varying import Varying
from autopar.planner.storage import batch_size

REMEMBERED = 64  # calls of different sizes
MOST = 4  # sizes that vary independently of each other: with more of them, each call is one of its own

Dim = tuple[int, int]


class SizesSeen:
    """Of calls of one structure. dynamic: as in `autopar.compile`."""

    def __init__(self, dynamic: bool | None) -> None:
        self.dynamic = dynamic
        self.given_up = ""  # why the program is another one at every size
        self.tell = False  # whether the user is to hear of it
        self.coarse = False  # sizes are multiples of what all that were seen are multiples of
        self.common = False  # whether they are multiples of anything
        self.missed: set[Shapes] = set()  # what a program for all sizes that was made for them turned out not to hold for
        self.seen: dict[Shapes, None] = {}

    def refused(self, why: str) -> None:
        """There is no program for all sizes of what `varying` said last. It will say less."""
        if self.dynamic:
            self.dynamic = None
        elif self.common and not self.coarse:
            self.coarse = True
        else:
            self.given_up = self.given_up or why
            self.tell = True

    def varying(self, call: Call, shapes: Shapes, ranks: int, planned: bool) -> tuple[Varying, ...]:
        """What varies of a call that there is no program for, by what was seen before and this one. ranks: over how many the batch is split, or may be (not planned)."""
        self.seen[shapes] = None
        while len(self.seen) > REMEMBERED:
            del self.seen[next(iter(self.seen))]
        if self.dynamic is False or self.given_up or shapes in self.missed:
            return ()
        marks = [_torch.marks_of(t) for t in call.tensors]
        batch = batch_size(tuple(Tensor("", s, "") for s, _ in shapes))
        groups: dict[tuple[bool, tuple[int, ...]], list[Dim]] = {}
        for i, (s, _) in enumerate(shapes):
            for d in range(len(s)):
                sizes = tuple(other[i][0][d] for other in self.seen)
                changes = (self.dynamic or len(set(sizes)) > 1) and d not in marks[i].static
                if changes or d in marks[i].dynamic:
                    groups.setdefault((d == 0 and s[0] == batch, sizes), []).append((i, d))
        found = []
        for (is_batch, sizes), dims in groups.items():
            now = sizes[-1]
            step = ranks if planned else math.gcd(ranks, now)
            if not is_batch:
                common = math.gcd(*sizes)
                self.common = self.common or common > 1
                step = common if self.coarse else 1
            stated = [marks[i].most[d] for i, d in dims if d in marks[i].most]
            if now < 2 * step or now % step:
                return ()  # of its own: what holds of one element, or of a part of a unit, does of no other number
            found.append(Varying(tuple(dims), step, max([now, *stated] if stated else sizes)))
        return tuple(found) if len(found) <= MOST else ()


def units_of(varying: Sequence[Varying], general: Shapes, shapes: Shapes) -> tuple[int, ...] | None:
    """How many units of each size a call of `shapes` has, whose other sizes are those of `general`; None for any other call."""
    left = [list(s) for s, _ in shapes]
    units = []
    for v in varying:
        sizes = {left[i][d] for i, d in v.dims}
        n = v.counted(sizes.pop())
        if sizes or n < 2:
            return None
        units.append(n)
        for i, d in v.dims:
            left[i][d] = general[i][0][d]
    same = all(tuple(s) == g and d == e for s, (g, e), (_, d) in zip(left, general, shapes, strict=True))
    return tuple(units) if same else None
