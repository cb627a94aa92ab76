"""Which layouts are tried.

A `Shape` says how many devices do what; a `Family` adds how deep virtual stages go and what is made again. Of a family only the fastest member that fits counts, over ZeRO's
levels; so layouts that differ in nothing else are one answer, and the best few are plans that are worth a test of their own.

Devices of a shape are whole nodes, or a part of one node; what is left of the cluster idles. Every set of sizes that a cluster allows is allowed by each multiple of
it, too: twice the nodes never have a worse best layout.

Not tried, because something tried is never worse: gpipe (1f1b takes as long and holds less), ZeRO where nothing shares the state, recompute
"selective" where attention is one kernel ("none" is the same then). ZeRO-3 is tried without a pipeline only: within one it would gather every layer for every micro-batch of every stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from autopar.errors import LayoutError
from autopar.hardware.cluster import Cluster
from autopar.planner.expert_folding import DATA, ROLES, Part, together
from autopar.planner.layout import RECOMPUTE, Layout
from autopar.predict.runtime import Runtime

MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Space:
    """Sizes that are tried; None for what is usual.

    ep: divisors of the number of routed experts. expert_tp: of models with routed experts; None, as all else is split, and 1, experts over the ranks of tp and cp, too.
    Both where a micro-batch's devices have two roles then (`Layout`).
    tp: powers of two and divisors, up to a node's devices. cp: powers of two up to a node's devices that divide the sequence. pp: divisors of the devices and of the layers.
    virtual: all that deal the layers evenly, but for the first and the last stage, which may have one less. micro_batch: 1 to 8. offload: whether
    activations may be kept in host memory. sequence_parallel: None is as is fastest. idle: whether devices may be left without work. whole_nodes: whether
    more devices than a node has are whole nodes.
    """

    tp: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    virtual: tuple[int, ...] | None = None
    micro_batch: tuple[int, ...] = MICRO_BATCHES
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = RECOMPUTE
    offload: bool = True
    sequence_parallel: tuple[bool | None, ...] = (None,)
    idle: bool = True
    whole_nodes: bool = True
    ep: tuple[int, ...] | None = None
    expert_tp: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "pp", "ep", "expert_tp", "virtual", "micro_batch"):
            sizes = getattr(self, name)
            if name == "expert_tp" and sizes:
                sizes = tuple(1 if n is None else n for n in sizes)
            if sizes is not None and (not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes)):
                raise LayoutError(f"{name} is {sizes!r}", where="what is searched", fix="give whole numbers from 1, or leave it out")
        for name, known in (("zero", (0, 1, 2, 3)), ("recompute", RECOMPUTE), ("sequence_parallel", (None, False, True))):
            if not getattr(self, name) or not set(getattr(self, name)) <= set(known):
                raise LayoutError(
                    f"{name} is {getattr(self, name)!r}", where="what is searched", fix=f"give some of {', '.join(map(str, known))}"
                )

    @staticmethod
    def of(x: Space | Mapping[str, object] | None) -> Space:
        if isinstance(x, Space):
            return x
        given: dict[str, Any] = dict(x or {})
        odd = given.keys() - {f.name for f in fields(Space)}
        if odd:
            raise LayoutError(
                f"{', '.join(sorted(odd))} cannot be restricted", where="options", fix=f"use {', '.join(f.name for f in fields(Space))}"
            )
        sizes: dict[str, Any] = {k: v if k in ("offload", "idle", "whole_nodes") else tuple(v) for k, v in given.items()}
        return Space(**sizes)


@dataclass(frozen=True)
class Shape:
    """micro_batches: of a step, of each of the dp replicas, some of which share routed experts (`Layout`)."""

    micro_batch: int
    tp: int
    cp: int
    pp: int
    dp: int
    micro_batches: int
    sequence_parallel: bool | None = None
    ep: int = 1
    expert_tp: int | None = None

    @property
    def devices(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def together(self) -> tuple[Part, ...]:
        """What the devices do that share them, the outermost first."""
        return together(self.tp, self.cp, self.ep, self.expert_tp)

    @property
    def sharing(self) -> int:
        """Replicas whose micro-batches are computed together."""
        return math.prod(p.size for p in self.together if p.dense == DATA)

    @property
    def sequences(self) -> int:
        """Of the micro-batches that are computed together."""
        return self.micro_batch * self.sharing

    @property
    def ways(self) -> int:
        """Devices that share them."""
        return self.tp * self.cp * self.sharing


@dataclass(frozen=True)
class Family:
    shape: Shape
    virtual: int
    recompute: str

    def layout(self, zero: int, offload: float | tuple[float, ...] = 0.0) -> Layout:
        s = self.shape
        return Layout(
            tp=s.tp, cp=s.cp, pp=s.pp, dp=s.dp, virtual=self.virtual, micro_batch=s.micro_batch, zero=zero, recompute=self.recompute,
            offload=offload, sequence_parallel=s.sequence_parallel, ep=s.ep, expert_tp=s.expert_tp,
        )  # fmt: skip


def shapes(space: Space, cluster: Cluster, global_batch: int, tokens: int, layers: int, experts: int = 1) -> Iterator[Shape]:
    """layers: that can be dealt to stages; tokens: of a sequence; experts: whose divisors can share them."""
    size, node = cluster.size, cluster.devices_per_node
    tps = space.tp or tuple(sorted({*_powers(node), *_divisors(node)}))
    cps = space.cp or tuple(n for n in _powers(node) if tokens % n == 0)
    pps = space.pp or tuple(n for n in sorted({*_divisors(size), *_divisors(max(1, layers))}) if n <= layers + 2)
    eps = [n for n in space.ep or _divisors(experts) if experts % n == 0]
    etps = (None, 1) if space.expert_tp is None else space.expert_tp
    etps = etps if experts > 1 else (None,)
    for b in space.micro_batch:
        if global_batch % b:
            continue
        dps = _divisors(global_batch // b)
        for tp in tps:
            for cp in cps:
                for pp in pps:
                    if (pp > 1 and not layers) or tp * cp * pp > size:
                        continue
                    for dp in dps:
                        n = tp * cp * pp * dp
                        if (n == size if not space.idle else n <= size) and (n <= node or n % node == 0 or not space.whole_nodes):
                            for sp in space.sequence_parallel if tp > 1 else (None,):
                                for ep, expert_tp in itertools.product(eps, etps):
                                    shape = Shape(b, tp, cp, pp, dp, global_batch // b // dp, sp, ep, expert_tp)
                                    if _is_new(shape, etps) and dp % shape.sharing == 0:
                                        yield shape


def _is_new(shape: Shape, etps: Sequence[int | None]) -> bool:
    """Whether there is such a layout, and experts lie otherwise than where nothing is said of them, if that is tried."""
    try:
        mine = shape.together
    except LayoutError:
        return False
    said = shape.expert_tp is not None and None in etps
    return len(mine) <= ROLES and not (said and mine == together(shape.tp, shape.cp, shape.ep, None))


def refuse_ep(space: Space, experts: int) -> None:
    """Raises LayoutError where none of the ep that are asked for can be, or none of expert_tp."""
    if space.expert_tp is not None and None not in space.expert_tp and experts == 1:
        raise LayoutError(
            f"expert_tp is {space.expert_tp!r}, and there are no routed experts", where="what is searched", fix="leave expert_tp out"
        )
    if space.ep is not None and all(experts % n for n in space.ep):
        raise LayoutError(
            f"ep is {space.ep!r}, and {f'{experts} experts are not' if experts > 1 else 'there are no routed experts to be'} shared so",
            where="what is searched",
            fix=f"allow {' or '.join(map(str, _divisors(experts)))}, or leave ep out",
        )


def families(space: Space, shape: Shape, layers: int, runtime: Runtime) -> Iterator[Family]:
    recomputes = [r for r in space.recompute if r != "selective" or runtime.unfused_passes or "none" not in space.recompute]
    for v in virtuals(space, shape, layers):
        for r in recomputes:
            yield Family(shape, v, r)


def virtuals(space: Space, shape: Shape, layers: int) -> list[int]:
    p, m = shape.pp, shape.micro_batches
    if p == 1:
        return [1] if space.virtual is None or 1 in space.virtual else []
    found = []
    for v in space.virtual or range(1, (layers + 2) // p + 1):
        stages = p * v
        even = space.virtual is not None or v == 1 or any((layers + short) % stages == 0 for short in (0, 1, 2))
        # Interleaved, what remains of groups of p micro-batches must fill the ranks: nothing may remain.
        if even and stages - 2 <= layers and (v == 1 or (m >= p and m % p == 0)):
            found.append(v)
    return found


def zeros(space: Space, shape: Shape) -> list[int]:
    """ZeRO's levels that say something else than a lower one."""
    shared = shape.dp * shape.cp > 1
    allowed = {0: True, 1: shared, 2: shared, 3: shared and shape.pp == 1}
    return [z for z in space.zero if allowed[z]] or ([0] if not shared else [])


def part(cluster: Cluster, devices: int) -> Cluster:
    """So many devices of `cluster`: whole nodes, or a part of one."""
    if devices == cluster.size:
        return cluster
    node = cluster.devices_per_node
    return cluster.part(devices // node, node) if devices % node == 0 else cluster.part(1, devices)


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})
