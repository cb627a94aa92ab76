"""Micro-batches of one replica, or of those that share experts: captured once for each size, solved once for each way to share them, whatever stands around them.

What was solved is kept in the cache; it is captured again, because only the program itself says whether an answer is its answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from autopar.capture.in_subprocess import beside
from autopar.errors import LayoutError
from autopar.hardware.cluster import Cluster
from autopar.planner.expert_axes import experts_of
from autopar.planner.imbalance import EVEN
from autopar.planner.layout import Layout
from autopar.planner.other_batch import at_batch
from autopar.planner.precision import Precision
from autopar.planner.task import Task
from autopar.predict.api import answered, captured
from autopar.predict.pieces import pieces
from autopar.predict.runtime import Runtime
from autopar.rules import lookup
from autopar.search.cache import Cache, key_of
from autopar.search.lower_bound import Pieces, shared
from autopar.search.space import Shape

Share = tuple[int, int, int, int, int | None, bool | None]  # sequences, tp, cp, ep, expert_tp, sequence parallel


@dataclass
class MicroBatches:
    model: nn.Module
    inputs: Mapping[str, torch.Tensor | Sequence[int]]
    cluster: Cluster
    runtime: Runtime
    loss_fn: Callable[..., torch.Tensor] | None
    precision: Precision | str | torch.dtype | None
    cache: Cache
    in_subprocess: bool = False
    imbalance: float = EVEN
    tasks: dict[int, Task] = field(default_factory=dict)
    solved: dict[Share, Pieces | None] = field(default_factory=dict)
    _keys: dict[Share, str] = field(default_factory=dict)
    _lower_bounds: dict[tuple[int, int, int, tuple[str, ...]], Pieces] = field(default_factory=dict)

    def is_solved(self, shape: Shape) -> bool:
        return share_of(shape) in self.solved

    def solve(self, shares: Sequence[Share]) -> None:
        """One or two, at once if this process may have a copy (`autopar.capture.in_subprocess`)."""
        missing = [s for s in shares if self.key(s) not in self.cache]
        if self.in_subprocess and len(missing) == 2:
            found = list(beside(lambda: self.answer(missing[0]), lambda: self.answer(missing[1])))
        else:
            found = [self.answer(s) for s in missing]
        for share, made in zip(missing, found, strict=True):
            self.cache[self.key(share)] = made
        for share in shares:
            self.solved[share] = self.cache[self.key(share)]

    def pieces(self, shape: Shape) -> Pieces | None:
        """None where the model cannot be shared so."""
        return self.solved[share_of(shape)]

    def of(self, layout: Layout) -> Pieces | None:
        """As `pieces`, of a layout that no shape stands for; solved now if it was not."""
        share = share_of_layout(layout)
        if share not in self.solved:
            self.solve([share])
        return self.solved[share]

    def alone(self, size: int) -> Pieces:
        """Of a micro-batch on one device."""
        found = self.of(Layout(micro_batch=size))
        assert found is not None
        return found

    def experts(self, size: int) -> int:
        """Whose divisors ranks can share: the largest number that divides that of the experts of every operator which has some; 1 without any."""
        found = (experts_of(rule) for op in self.task(size).folded.graph.ops if (rule := lookup(op)).pairs)
        return math.gcd(*found) or 1

    def lower_bound(self, size: int, ways: int, ep: int = 1, axes: tuple[str, ...] = ("ep",)) -> Pieces:
        """At most the pieces of so many sequences that so many devices share, ep of which, on `axes`, share experts."""
        key = size, ways, ep, axes
        if key not in self._lower_bounds:
            as_ours = not (self.runtime.two_level or self.runtime.keeps_rows)  # of others' exchanges there are fewer, or of fewer bytes
            self._lower_bounds[key] = shared(self.alone(size), ways, ep if as_ours else 1, axes)
        return self._lower_bounds[key]

    # ---- parts -----------------------------------------------------------------------------------------------------

    def task(self, size: int) -> Task:
        if size not in self.tasks:
            self.tasks[size] = self.of_others(size) or captured(
                self.model, self.inputs, size, self.cluster, self.loss_fn, self.precision, None, self.in_subprocess, self.imbalance
            )
        return self.tasks[size]

    def of_others(self, size: int) -> Task | None:
        """What is captured of two other sizes tells it of larger ones, which ranks that share experts compute together."""
        known = sorted(n for n in self.tasks if n > 1)[:2]
        if len(known) < 2 or size <= known[1]:
            return None
        few, many = (self.tasks[n] for n in known)
        folded = at_batch(few.folded, many.folded, known[0], known[1], size)
        return None if folded is None else replace(few, folded=folded)

    def key(self, share: Share) -> str:
        if share not in self._keys:
            self._keys[share] = key_of(self.task(share[0]), share[1:], self.runtime.fusion)
        return self._keys[share]

    def answer(self, share: Share) -> Pieces | None:
        size, tp, cp, ep, expert_tp, sequence_parallel = share
        layout = Layout(tp=tp, cp=cp, ep=ep, expert_tp=expert_tp, sequence_parallel=sequence_parallel)
        try:
            return pieces(answered(self.task(size), layout), self.runtime.fusion)
        except LayoutError:
            if not layout.together:
                raise
            return None


def share_of(shape: Shape) -> Share:
    return (shape.sequences, shape.tp, shape.cp, shape.ep, shape.expert_tp, shape.sequence_parallel)


def share_of_layout(layout: Layout) -> Share:
    return (layout.micro_batch * layout.sharing, layout.tp, layout.cp, layout.ep, layout.expert_tp, layout.sequence_parallel)


def said(share: Share) -> str:
    size, tp, cp, ep, expert_tp, _ = share
    sharing = Layout(tp=tp, cp=cp, ep=ep, expert_tp=expert_tp).sharing
    folded = "" if expert_tp is None else f", expert-tp {expert_tp}"
    return f"micro-batch {size // sharing} on tp {tp} x cp {cp}" + (f" x ep {ep}" if ep > 1 else "") + folded
