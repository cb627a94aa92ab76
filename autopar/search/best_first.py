"""Best first: the candidate of the smallest bound is looked at next, by the cheapest thing that says more of it.

    shape       bound by compute alone     -> its families, bounded with pipeline and memory
    family      bound with ideal pieces    -> its micro-batch solved on tp x cp, bounded with its own pieces    -> priced

When the smallest bound of all is above the k-th best price, whatever is left is
worse than k layouts that are known, and nothing has been lost. Only what could be among the best is solved, which is what takes time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

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
    """micros: captures and solves micro-batches; below_s: no layout that takes as long is wanted."""

    space: Space
    bounds: Bounds
    prices: Prices
    micros: MicroBatches
    top_k: int
    on_progress: Callable[[Progress], None]
    below_s: float = math.inf
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
        while heap and heap[0][0] <= self.limit_s:
            bound_s, _, node, solved = heapq.heappop(heap)
            if isinstance(node, Shape):
                later = [(f, False) for f in self.families(node)]
            elif solved:
                self.price(node)
                continue
            else:
                if not self.micros.is_solved(node.shape):
                    self.solve(node.shape, heap)
                later = [(node, True)]
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
