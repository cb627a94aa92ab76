"""The fastest member of a family that fits: over ZeRO's levels, each with the least offload that it needs, by `autopar.predict`'s own prices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from autopar.planner.imbalance import EVEN
from autopar.planner.precision import Precision
from autopar.predict.api import priced
from autopar.predict.data import sharded_over
from autopar.predict.step import schedule_of
from autopar.search.bounds import Bounds
from autopar.search.lower_bound import Pieces
from autopar.search.offload import fractions, said
from autopar.search.result import Ranked
from autopar.search.space import Family, part, zeros


@dataclass(frozen=True)
class Prices:
    bounds: Bounds
    model: str
    global_batch: int
    tokens: int
    precision: Precision | str | torch.dtype | None
    imbalance: float = EVEN

    def best(self, pieces: Pieces, family: Family) -> Ranked | None:
        """None where no member fits. pieces: the family's."""
        b = self.bounds
        shape = family.shape
        cluster = part(b.cluster, shape.devices)
        schedule = schedule_of(family.layout(0), shape.micro_batches)
        halves, stages = b.halves(pieces, family, True), b.stages(pieces, schedule)
        found: list[Ranked] = []
        for zero in zeros(b.space, shape):
            layout = family.layout(zero)
            offloaded = fractions(
                layout, schedule, stages, halves, b.runtime, cluster, sharded_over(layout, shape.dp), b.budget_bytes, b.space.offload
            )
            if offloaded is None:
                continue
            layout = replace(layout, offload=said(offloaded))
            done = priced(
                pieces, self.model, cluster, layout, b.runtime, self.global_batch, self.tokens, self.precision, b.optimizer, self.imbalance
            )
            found.append(Ranked(layout, done, cluster, b.cluster.size))
        return min(found, key=Ranked.order, default=None)
