"""A group of devices that trains by itself, beside others: the fastest layout on so many devices, and what it takes for any part of a batch.

A part is a micro-batch. Of x parts each of the group's dp ranks has x / dp; where that does not divide some have one less and wait, so nothing has to divide a batch. All groups are
priced of one capture: a micro-batch is captured once, and solved once for each way to share it (`autopar.search.solutions`), whatever the number of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from autopar.hardware.cluster import Cluster
from autopar.planner.layout import Layout
from autopar.predict import memory
from autopar.predict.api import tokens_of
from autopar.predict.runtime import Runtime
from autopar.predict.step import Step, cost_of, schedule_of, stages_of, step
from autopar.search.best_first import BestFirst
from autopar.search.bounds import Bounds
from autopar.search.cache import Cache
from autopar.search.lower_bound import Pieces
from autopar.search.price import Prices
from autopar.search.solutions import MicroBatches
from autopar.search.space import Shape, Space

LAYOUTS = 8  # the best by as much for every device, of which one may be better where parts do not divide


class Survivors(Cluster):
    """What is left of a cluster: `left` devices, laid out node by node, the last node not full."""

    left: int

    @property
    def size(self) -> int:
        return self.left


def survivors(cluster: Cluster, devices: int) -> Cluster:
    """So many devices of `cluster`, in as few nodes as hold them."""
    node = cluster.devices_per_node
    if devices <= node:
        return cluster.part(1, devices)
    if devices % node == 0:
        return cluster.part(devices // node, node)
    whole = cluster.part(-(-devices // node), node)
    return Survivors(**{**whole.model_dump(), "name": f"{cluster.name.partition(':')[0]}:{devices} of {node} a node", "left": devices})


@dataclass(frozen=True)
class Group:
    """units: that it was asked for; pieces: of a micro-batch of its layout; dp: ranks that have parts of their own."""

    units: int
    cluster: Cluster
    layout: Layout
    pieces: Pieces
    runtime: Runtime
    optimizer: str | type
    _known: dict[int, Step] = field(default_factory=dict, repr=False, compare=False)

    @property
    def devices(self) -> int:
        return self.cluster.size

    @property
    def dp(self) -> int:
        return self.layout.replicas(self.devices)

    def step(self, parts: int) -> Step:
        """Of so many parts: as of the rank that has the most."""
        each = -(-parts // self.dp)
        if each not in self._known:
            batch = each * self.dp * self.layout.micro_batch
            self._known[each] = step(self.pieces, self.layout, self.runtime, self.cluster, batch, self.optimizer)
        return self._known[each]

    def seconds(self, parts: int) -> float:
        return self.step(parts).step_time_s

    def params(self) -> float:
        """Elements of the whole model."""
        stages = stages_of(self.pieces, schedule_of(Layout(dp=1), 1))[1]
        return memory.params_of(stages).total * self.layout.tp


@dataclass
class Groups:
    """Prices groups of devices of `cluster` for one model. micro_batch: sequences of a part."""

    model: nn.Module
    inputs: Mapping[str, torch.Tensor | Sequence[int]]
    cluster: Cluster
    micro_batch: int
    budget_bytes: float
    precision: str | torch.dtype | None = "bfloat16"
    optimizer: str | type = "adamw"
    loss_fn: Callable[..., torch.Tensor] | None = None
    runtime: Runtime = field(default_factory=lambda: Runtime.of("autopar"))
    in_subprocess: bool = False

    def __post_init__(self) -> None:
        self.micros = MicroBatches(
            self.model, self.inputs, self.cluster, self.runtime, self.loss_fn, self.precision, Cache(None), self.in_subprocess
        )

    def group(self, units: int, devices: int, each: int, parts: int) -> tuple[Group | None, float]:
        """The fastest group on so many devices: of the best layouts by `each` parts a device, the one that does `parts` soonest. None where none keeps to the memory, and the least that is
        missing then, bytes. Pipelines have one stage a rank, which any number of parts may go through; experts are not shared, since ranks may have one part less.
        """
        where = survivors(self.cluster, devices)
        space = Space(micro_batch=(self.micro_batch,), idle=False, whole_nodes=False, ep=(1,), expert_tp=(None,), virtual=(1,))
        bounds = Bounds(space, where, self.runtime, self.optimizer, self.budget_bytes)
        batch = self.micro_batch * each * devices
        prices = Prices(bounds, type(self.model).__name__, batch, tokens_of(self.inputs), self.precision)
        found = []
        for r in BestFirst(space, bounds, prices, self.micros, LAYOUTS, lambda p: None).run():
            lay, dp = r.layout, r.layout.replicas(devices)
            pieces = self.micros.pieces(
                Shape(lay.micro_batch, lay.tp, lay.cp, lay.pp, dp, batch // lay.micro_batch // dp, lay.sequence_parallel)
            )
            assert pieces is not None
            made = Group(units, where, lay, pieces, self.runtime, self.optimizer)
            if made.step(parts).fullest_bytes <= self.budget_bytes:
                found.append(made)
        return min(found, key=lambda g: g.seconds(parts), default=None), bounds.short_bytes

    def sync_s(self, params: float, groups: int, devices: int, left: int) -> float:
        """That R groups wait for the sum of their gradients: rings between ranks that hold the same part, 2 (R - 1) / R of a part to send, by the part of a rank of the
        smallest group, of `devices`. Nothing of it is counted as hidden behind backward."""
        if groups == 1:
            return 0.0
        where = survivors(self.cluster, max(left, groups * devices))
        cost = cost_of(Layout(tp=devices), groups, self.runtime, where)
        nbytes = 2 * (groups - 1) / groups * params * self.runtime.reduce_bytes / devices
        return cost.collective("all_reduce", cost.mesh.children("dp"), nbytes).seconds
