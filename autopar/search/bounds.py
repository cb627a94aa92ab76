"""What a family of layouts takes at least, without a replay: the step's formula (`autopar.predict.step`) with something smaller for each of its terms.

A step takes  run + max over ranks ( wait + update ),  run being the replay of the pipeline. With pieces that are no more than the real ones
(`lower_bound.py`, or the real ones themselves):

    run     >= lower_bound_s of stage times without hops      no replay is shorter (`pipeline.closed`), and none gets shorter when a time grows (`pipeline.replay`);
                                                              seconds of a stage grow with the FLOPs and bytes of its pieces
    update  >= update of no more parameters                   it is linear in them, or a curve that does not fall
    wait    >= share x traffic                                the share that is waited for, of no more bytes: collectives' prices grow with bytes
    run + wait  >=  traffic + run - window                    the other branch, of what all has to fit into. Once a step, that is from the last chunk's last backward on, and until its first
                and run - window >= (m - 1) of its micro-batches    forward is done: between them it does all of its other micro-batches. Else it is the rank's compute

Of a shape, whatever its virtual stages and what it makes again: the slowest of p ranks has at least a p-th of a micro-batch's compute, m times.

Memory: what a rank holds grows with every quantity of its pieces and falls in ZeRO's level and in what is offloaded, so a family whose
every level does not fit with all of its activations offloaded has no member that fits. Sums are made in another order than in `step`, hence `SLACK`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.cost.model import Cost
from autopar.hardware.cluster import Cluster
from autopar.pipeline import Schedule, Times, lower_bound_s
from autopar.planner.expert_folding import EXPERTS
from autopar.predict import memory
from autopar.predict.data import Windows, is_once_a_step, sharded_over, traffic
from autopar.predict.held import Held
from autopar.predict.pieces import Piece
from autopar.predict.runtime import Runtime
from autopar.predict.seconds import Seconds
from autopar.predict.step import cost_of, halves_of, schedule_of, stages_of, update_s
from autopar.search.lower_bound import Pieces
from autopar.search.space import Family, Shape, Space, part, zeros

SLACK = 1 - 1e-9

Halves = Mapping[Piece, tuple[Seconds, Seconds]]


@dataclass
class Bounds:
    """Of layouts on `cluster`. short_bytes: of what did not fit, the least that was missing, or less. What is computed for one family and holds for others is kept, by all that it depends on."""

    space: Space
    cluster: Cluster
    runtime: Runtime
    optimizer: str | type
    budget_bytes: float
    short_bytes: float = math.inf
    _cost: dict[tuple[object, ...], Cost] = field(default_factory=dict)
    _halves: dict[tuple[Pieces, str, Shape | tuple[int, ...]], Halves] = field(default_factory=dict)
    _stages: dict[tuple[Pieces, int, int], list[dict[Piece, int]]] = field(default_factory=dict)

    def shape_s(self, pieces: Pieces, shape: Shape) -> float:
        """pieces: at most the shape's, without collectives but what experts exchange."""
        halves = self.halves(pieces, Family(shape, 1, "none"), False)
        once = sum(max(1, p.layers) * (f.total_s + b.total_s) for p, (f, b) in halves.items())
        return SLACK * shape.micro_batches * once / shape.pp

    def family_s(self, pieces: Pieces, family: Family, real: bool) -> float:
        """Infinite where nothing fits. pieces: at most the family's; real: they are, collectives and all."""
        shape = family.shape
        if self.runtime.balanced:  # smaller pieces may be dealt otherwise
            return self.shape_s(pieces, shape)
        layout = family.layout(0)
        cost = self.cost(shape)
        schedule = schedule_of(layout, shape.micro_batches)
        halves, stages = self.halves(pieces, family, real), self.stages(pieces, schedule)
        forward = [sum(n * halves[p][0].total_s for p, n in stage.items()) for stage in stages]
        backward = [sum(n * halves[p][1].total_s for p, n in stage.items()) for stage in stages]
        times = Times(tuple(forward), tuple(backward), (0.0,) * shape.pp)
        run_s = lower_bound_s(schedule, times)
        params = [memory.params_of(stages[r :: shape.pp]) for r in range(shape.pp)]
        return SLACK * min(
            (self.level_s(family, z, schedule, stages, times, run_s, params, cost) for z in zeros(self.space, shape)), default=math.inf
        )

    def level_s(
        self,
        family: Family,
        zero: int,
        schedule: Schedule,
        stages: list[dict[Piece, int]],
        times: Times,
        run_s: float,
        params: list[Held],
        cost: Cost,
    ) -> float:
        shape, layout = family.shape, family.layout(zero, 1.0 if self.space.offload else 0.0)
        m, ways = shape.micro_batches, sharded_over(layout, shape.dp)
        for rank in {0, shape.pp - 1}:
            short = SLACK * sum(memory.peak_bytes(rank, schedule, stages, layout, self.runtime, ways).values()) - self.budget_bytes
            if short > 0:
                self.short_bytes = min(self.short_bytes, short)
                return math.inf
        least = 0.0
        share = min(1.0, self.runtime.data_exposed)
        for rank, mine in enumerate(params):
            moved_s = traffic(mine, layout, self.runtime, cost, shape.dp, m, Windows()).seconds
            done_s = update_s(mine, layout, self.runtime, cost, ways, self.optimizer)
            last = rank + (schedule.chunks - 1) * shape.pp
            beside_s = (m - 1) * (times.forward_s[last] + times.backward_s[last]) if is_once_a_step(layout, m) else 0.0
            least = max(least, run_s + share * moved_s + done_s, moved_s + beside_s + done_s)
        return least

    # ---- parts -----------------------------------------------------------------------------------------------------

    def cost(self, shape: Shape) -> Cost:
        key = (shape.pp, shape.dp, shape.cp, shape.tp, shape.together)
        if key not in self._cost:
            layout = Family(shape, 1, "none").layout(0)
            self._cost[key] = cost_of(layout, shape.dp, self.runtime, part(self.cluster, shape.devices))
        return self._cost[key]

    def halves(self, pieces: Pieces, family: Family, real: bool) -> Halves:
        """Pieces without collectives depend on no mesh; those with what experts exchange alone on what is inside of ep."""
        key = (pieces, family.recompute, family.shape if real else self._links(family.shape))
        if key not in self._halves:
            layout, cost = family.layout(0), self.cost(family.shape)
            self._halves[key] = {p: halves_of(p, layout, self.runtime, cost) for p in pieces}
        return self._halves[key]

    def _links(self, shape: Shape) -> tuple[int, ...]:
        """Sizes of the group that experts are split over, and of what lies inside of it."""
        if shape.ep == 1:
            return ()
        innermost = max(i for i, p in enumerate(shape.together) if p.routed == EXPERTS)
        inside = math.prod(p.size for p in shape.together[innermost + 1 :])
        return shape.ep, inside, min(shape.devices, self.cluster.devices_per_node)

    def stages(self, pieces: Pieces, schedule: Schedule) -> list[dict[Piece, int]]:
        key = (pieces, schedule.ranks, schedule.chunks)
        if key not in self._stages:
            self._stages[key] = stages_of(pieces, schedule)[1]
        return self._stages[key]
