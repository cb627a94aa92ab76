"""When gathered parameters and unreduced gradients live: the passes issue a gather a stretch before the one that reads it, and await a reduction
a stretch after the one that made the gradient (`autopar.passes.prefetch`, `autopar.passes.defer`).

Here on operators, by the rule of `autopar.passes.overlap`: each copy of a layer is a stretch of either direction; what lies outside of layers is cut
where W bytes of parameters are together. W: the most that a layer's parameters take together, without layers the most of two that follow each other.
The passes cut by the bytes of collectives that there are then; a copy's cut may lie elsewhere in its period. Both shift a life within a layer.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import pairwise

from autopar.graph.graph import Graph
from autopar.solver.stacks import Stack


class OverlapWindows:
    def __init__(self, graph: Graph, stacks: Sequence[Stack]) -> None:
        ops = graph.ops
        self.turn = next((i for i, op in enumerate(ops) if op.direction == "backward"), len(ops))
        self.end = len(ops)
        position = {op.name: i for i, op in enumerate(ops)}
        layers = sorted(
            (min(where), max(where) + 1)
            for stack in stacks
            for copies in (stack.forward, stack.backward)
            for names in copies
            if (where := [position[n] for n in names])
        )
        leaves = {t.name: t.nbytes for t in graph.params.values()}
        read = [sum(leaves.get(t.name, 0) for t in dict.fromkeys(op.inputs)) for op in ops]
        inside = [sum(read[a:b]) for a, b in layers]
        sizes = [n for n in read if n]
        limit = max(inside) if any(inside) else max((a + b for a, b in pairwise(sizes)), default=sum(sizes))
        self.starts: list[int] = []
        for low, high in ((0, self.turn), (self.turn, self.end)):
            at = low
            for a, b in [*((a, b) for a, b in layers if low <= a < high), (high, high)]:
                self.starts += self.cut(read, at, a, limit)
                if b > a:
                    self.starts.append(a)
                at = max(at, b)
        self.starts = sorted(set(self.starts))

    @staticmethod
    def cut(read: list[int], start: int, stop: int, limit: int) -> list[int]:
        """Starts of the stretches of [start, stop), which is outside of layers."""
        out, gathered = [start] if stop > start else [], 0
        for i in range(start, stop):
            if read[i] and gathered >= limit:
                out.append(i)
                gathered = 0
            gathered += read[i]
        return out

    def at(self, position: int) -> int:
        """The index of the stretch that `position` lies in."""
        return max(0, bisect.bisect_right(self.starts, position) - 1)

    def issued(self, use: int) -> int:
        """The position from which a parameter that is first read at `use` is being gathered."""
        i = bisect.bisect_right(self.starts, use) - 1
        before = self.starts[max(0, i - 1)]
        return before if before >= self.turn or use < self.turn else self.turn

    def awaited(self, made: int) -> int:
        """The last position at which a gradient made at `made` is still being reduced."""
        i = bisect.bisect_right(self.starts, made) + 1
        return (self.starts[i] if i < len(self.starts) else self.end) - 1


def window_of(graph: Graph, stacks: Sequence[Stack]) -> dict[str, int]:
    """The stretch of every operator of a whole program, for the passes that move things between them."""
    found = OverlapWindows(graph, stacks)
    return {op.name: found.at(i) for i, op in enumerate(graph.ops)}
