"""Best first: the candidate of the smallest bound is looked at next, by the cheapest thing that says more of it.

    shape       bound by compute alone     -> its families, bounded with pipeline and memory
    family      bound with ideal pieces    -> its micro-batch solved on tp x cp, bounded with its own pieces    -> priced

When the smallest bound of all is above the k-th best price, whatever is left is
worse than k layouts that are known, and nothing has been lost. Only what could be among the best is solved, which is what takes time.

Where time is limited that is no order to go by: bounds know nothing of what tensor and context parallelism send, so what has most of it is solved first. There what shares a
sequence least is solved first. Then a bound counts as often more as the least that it turned out to be too low by, of what was solved with the same tp and cp, or with no more of both; what
was solved is priced at once; and what is estimated to take longer than the k-th best is left alone. That proves nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter

from autopar.errors import LayoutError
from autopar.planner.expert_folding import EXPERTS, named
from autopar.search.bounds import Bounds
from autopar.search.lower_bound import Pieces
from autopar.search.price import Prices
from autopar.search.result import Progress, Ranked
from autopar.search.solutions import MicroBatches, said, share_of
from autopar.search.space import Family, Shape, Space, families, refuse_ep, shapes

AHEAD = 256  # of the smallest bounds, in which what to solve next is looked for

Node = tuple[float, int, Shape | Family, bool]  # bound, its number, what, whether its micro-batch was solved


@dataclass
class BestFirst:
    """micros: captures and solves micro-batches; below_s: no layout that takes as long is wanted; until_s: on `time.perf_counter`'s clock, after
    which the best that is known is the answer, if there is one. too_low: by tp and cp, the least that bounds were too low by."""

    space: Space
    bounds: Bounds
    prices: Prices
    micros: MicroBatches
    top_k: int
    on_progress: Callable[[Progress], None]
    below_s: float = math.inf
    until_s: float = math.inf
    too_low: dict[tuple[int, int], float] = field(default_factory=dict)
    found: list[Ranked] = field(default_factory=list)
    priced: int = 0
    pruned: int = 0
    total: int = 0
    layers: int = 0
    experts: int = 1

    def run(self) -> list[Ranked]:
        cluster, batch = self.bounds.cluster, self.prices.global_batch
        sizes = sorted(b for b in set(self.space.micro_batch) if batch % b == 0)
        for size in sizes:
            self.report(f"capturing a micro-batch of {size}")
            self.micros.alone(size)
        self.layers = sum(p.layers for p in self.micros.alone(sizes[0]))
        self.experts = self.micros.experts(sizes[0])
        refuse_ep(self.space, self.experts)
        number = count()
        heap: list[Node] = []
        for shape in shapes(self.space, cluster, batch, self.prices.tokens, self.layers, self.experts):
            n = sum(1 for _ in self.families(shape))
            self.total += n
            if n:
                heap.append((self.bounds.shape_s(self.lower_bound(shape), shape), next(number), shape, False))
        heapq.heapify(heap)
        if self.is_limited:
            self.begin(heap)
        while heap and heap[0][0] <= self.limit_s and not self.is_late:
            bound_s, _, node, solved = heapq.heappop(heap)
            if isinstance(node, Shape):
                later = [(f, False) for f in self.families(node)]
            elif solved:
                self.price(node)
                continue
            else:
                if not self.micros.is_solved(node.shape):
                    likely_s = self.estimate_s(bound_s, node)
                    if likely_s > bound_s:
                        heapq.heappush(heap, (likely_s, next(number), node, False))
                        continue
                    self.solve(node.shape, heap)
                later = [(node, True)]
                if self.is_limited:
                    self.price_now(node)
                    continue
            for family, known in later:
                new_s = self.family_s(family, known)
                if new_s > self.limit_s or math.isinf(new_s):
                    self.pruned += 1
                else:
                    heapq.heappush(heap, (max(bound_s, new_s), next(number), family, known))
        self.pruned = self.total - self.priced
        self.report("done")
        return self.best

    # ---- parts -----------------------------------------------------------------------------------------------------

    @property
    def is_limited(self) -> bool:
        return math.isfinite(self.until_s)

    @property
    def is_late(self) -> bool:
        return perf_counter() > self.until_s and (bool(self.found) or math.isfinite(self.below_s))

    def estimate_s(self, known_s: float, family: Family) -> float:
        """Of a family that was not solved, where time is limited; else the bound itself. known_s: its bound, or what was estimated before."""
        tp, cp = family.shape.tp, family.shape.cp
        fewer = max((r for (t, c), r in self.too_low.items() if t <= tp and c <= cp), default=1.0)
        ratio = self.too_low.get((tp, cp), fewer)
        return known_s if ratio <= 1 else max(known_s, ratio * self.family_s(family, False))

    def begin(self, heap: list[Node]) -> None:
        """Until some layout is known that fits: shapes in the order of how many devices share a sequence."""
        for _, _, shape, _ in sorted(heap, key=lambda n: (n[2].tp * n[2].cp if isinstance(n[2], Shape) else 0, n[:2])):
            assert isinstance(shape, Shape)
            likely = [f for f in self.families(shape) if math.isfinite(s := self.family_s(f, False)) and s <= self.limit_s]
            if likely and not self.micros.is_solved(shape):
                self.solve(shape, [])
            for family in likely:
                self.price_now(family)
            if self.found or self.is_late:
                return

    def price_now(self, family: Family) -> None:
        """Where time is limited: what was solved, if by its own bound it can be among the best."""
        key, at_least_s, real_s = (family.shape.tp, family.shape.cp), self.family_s(family, False), self.family_s(family, True)
        if math.isfinite(real_s) and at_least_s > 0:
            self.too_low[key] = min(self.too_low.get(key, math.inf), real_s / at_least_s)
        if real_s <= self.limit_s and math.isfinite(real_s):
            self.price(family)

    @property
    def limit_s(self) -> float:
        """What a layout must not exceed to be among the best."""
        known_s = self.found[self.top_k - 1].prediction.step_time_s if len(self.found) >= self.top_k else math.inf
        return min(known_s, self.below_s)

    @property
    def best(self) -> list[Ranked]:
        return [r.compared(self.found[0]) for r in self.found]

    def lower_bound(self, shape: Shape) -> Pieces:
        return self.micros.lower_bound(shape.sequences, shape.ways, shape.ep, named(shape.together, routed=EXPERTS))

    def families(self, shape: Shape) -> Iterator[Family]:
        return families(self.space, shape, self.layers, self.bounds.runtime)

    def solve(self, shape: Shape, heap: list[Node]) -> None:
        """And beside it, where there is a core for it, what will be asked for next."""
        share = share_of(shape)
        waiting = (
            (
                share_of(node.shape)
                for least_s, _, node, _ in heapq.nsmallest(AHEAD, heap)
                if isinstance(node, Family) and least_s <= self.limit_s
            )
            if self.micros.in_subprocess
            else ()
        )
        then = next((s for s in waiting if s != share and s not in self.micros.solved), None)
        shares = [share] if then is None else [share, then]
        self.report("solving " + " and ".join(map(said, shares)))
        self.micros.solve(shares)

    def family_s(self, family: Family, solved: bool) -> float:
        try:
            if not solved:
                return self.bounds.family_s(self.lower_bound(family.shape), family, False)
            pieces = self.micros.pieces(family.shape)
            return math.inf if pieces is None else self.bounds.family_s(pieces, family, True)
        except LayoutError:  # layers that cannot be dealt so
            return math.inf

    def price(self, family: Family) -> None:
        pieces = self.micros.pieces(family.shape)
        assert pieces is not None
        self.priced += 1
        done = self.prices.best(pieces, family)
        if done is not None and done.prediction.step_time_s < self.below_s:
            self.found = sorted([*self.found, done], key=Ranked.order)[: self.top_k]
        self.report("pricing")

    def report(self, stage: str) -> None:
        left = self.total - self.priced - self.pruned
        self.on_progress(Progress(stage, self.priced, self.pruned, left, tuple(self.best)))
