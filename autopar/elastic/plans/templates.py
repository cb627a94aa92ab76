"""Plans for n, n - 1, ..., n - f devices or nodes, made before anything fails.

A template is the fastest group on k units (groups.py). For each number that may be left the answer is the faster of: one group over all that is left; groups of the template sizes
beside each other, each with the share of the global batch that its speed earns, in whole micro-batches, combined exactly (combine.py; heterogeneous templates: Jang et al., "Oobleck", SOSP
'23, section 4); the answer for fewer, where that is faster: micro-batches are whole. The global batch is kept. Where units are devices a template lies within a node, and survivors are taken to be spread: each further device is lost on a
node that has the most, which leaves the fewest whole nodes. `Templates.of` answers for any other distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from autopar.elastic.plans.combine import Combination, best, even, fillable, frobenius
from autopar.elastic.plans.groups import Group, Groups
from autopar.elastic.plans.moves import Rectangles, moved, worst
from autopar.elastic.plans.moves import places as ranks_of
from autopar.elastic.plans.table import Size, Templates
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.memory import Memory
from autopar.predict.api import tokens_of
from autopar.text.sizes import format_bytes

Placed = list[Rectangles]  # of each group, what its ranks hold
UNITS = ("node", "device")


def templates(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor | Sequence[int]],
    cluster: str | Cluster,
    *,
    global_batch: int,
    survive: int,
    unit: str = "node",
    sizes: Sequence[int] | None = None,
    micro_batch: int = 1,
    memory: float | str | None = None,
    precision: str | torch.dtype | None = "bfloat16",
    optimizer: str | type[torch.optim.Optimizer] = "adamw",
    loss_fn: Callable[..., torch.Tensor] | None = None,
    one_group: bool = True,
    in_subprocess: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Templates:
    """Plans for all of `cluster` and for each number of units down to `survive` fewer. Nothing is computed; the model may lie on the meta device.

    inputs: keyword arguments of a call, tensors or shapes. global_batch: sequences of a step, whatever is left. unit: what fails as one, "node" or "device". sizes: units of the groups
    that may train beside each other; default 1 to 8. micro_batch: sequences that are dealt as one. one_group: whether one group over all that is left is tried too.

    Raises InfeasibleError where all devices have no plan; AutoparError for numbers that cannot be. Sizes without a plan have step_s None.
    """
    where = Cluster.of(cluster)
    asked = checked(where, global_batch, survive, unit, sizes, micro_batch)
    request = Memory.of(memory)
    if request.least:
        raise AutoparError("templates of the least memory are not made", where="memory", fix="give the bytes that a device may use")
    budget = where.device.usable_bytes if request.budget_bytes is None else request.budget_bytes
    groups = Groups(model, inputs, where, micro_batch, budget, precision, optimizer, loss_fn, in_subprocess=in_subprocess)
    maker = Maker(groups, unit, global_batch // micro_batch, survive, asked, one_group, progress or (lambda what: None))
    rows = maker.rows()
    link = where.inter.reached_Bps if where.nodes > 1 else where.intra.reached_Bps
    gap = frobenius(tuple(maker.small))
    lacking = {k: b for k, b in maker.lacking.items() if k in asked or k >= maker.total - survive}
    return Templates(
        type(model).__name__, where.name, unit, global_batch, micro_batch, tokens_of(inputs), tuple(rows), {k: str(g.layout) for k, g in maker.small.items()},
        lacking, None if gap is None else gap + 1, STATE_BYTES * next(iter(maker.known.values())).params(), link, where.host.reached_Bps, where.devices_per_node // maker.per, maker.combined,
    )  # fmt: skip


def units_of(cluster: Cluster, unit: str) -> tuple[int, int]:
    """(units in all, devices of each). Raises AutoparError."""
    if unit not in UNITS:
        raise AutoparError(f"a unit of {unit!r}", where="unit", fix='pass "node" or "device"')
    return (cluster.nodes, cluster.devices_per_node) if unit == "node" else (cluster.size, 1)


def checked(
    cluster: Cluster, global_batch: int, survive: int, unit: str = "node", sizes: Sequence[int] | None = None, micro_batch: int = 1
) -> tuple[int, ...]:
    """Sizes of groups in order. Raises AutoparError for numbers that cannot be."""
    total, _ = units_of(cluster, unit)
    if isinstance(survive, bool) or not isinstance(survive, int) or not 0 <= survive < total:
        raise AutoparError(
            f"{survive!r} of {total} {unit}s are to be survived", where="survive", fix=f"give a number from 0 to {total - 1}"
        )
    if (
        isinstance(global_batch, bool)
        or not isinstance(global_batch, int)
        or micro_batch < 1
        or global_batch < 1
        or global_batch % micro_batch
    ):
        raise AutoparError(
            f"a batch of {global_batch!r} is no number of micro-batches of {micro_batch}",
            where="global_batch",
            fix="give a multiple of micro_batch",
        )
    most = largest_of(cluster, unit)
    asked = tuple(range(1, min(8, most) + 1)) if sizes is None else tuple(sorted({*sizes}))
    if not asked or any(isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= most for k in asked):
        raise AutoparError(f"groups of {list(asked)} {unit}s", where="sizes", fix=f"give numbers from 1 to {most}")
    return asked


def largest_of(cluster: Cluster, unit: str) -> int:
    """Units of a group beside others at most: devices lie in one node."""
    return cluster.nodes if unit == "node" else cluster.devices_per_node


class Maker:
    """What is known while templates are made. known: groups by units; lacking: bytes that those without a plan miss; small: the templates."""

    def __init__(
        self, of: Groups, unit: str, parts: int, survive: int, asked: Sequence[int], one_group: bool, tell: Callable[[str], None]
    ) -> None:
        self.of, self.unit, self.parts, self.survive, self.one_group, self.tell = of, unit, parts, survive, one_group, tell
        self.total, self.per = units_of(of.cluster, unit)
        self.most = largest_of(of.cluster, unit)
        self.known: dict[int, Group] = {}
        self.lacking: dict[int, float] = {}
        self.small = {k: g for k in asked if (g := self.group(k)) is not None}
        self.speeds = {k: g.seconds for k, g in self.small.items()}
        self.filled = fillable(tuple(self.small), self.total) if self.small else (False,) * (self.total + 1)

    def group(self, units: int) -> Group | None:
        if units not in self.known and units not in self.lacking:
            self.tell(f"group of {units} {self.unit}{'s' if units > 1 else ''}")
            alone = units > self.most or units >= self.total - self.survive
            share = self.parts if alone else max(1, round(self.parts * units / self.total))
            found, short = self.of.group(units, units * self.per, max(1, round(self.parts / self.of.cluster.size)), share)
            if found is None:
                self.lacking[units] = short
            else:
                self.known[units] = found
        return self.known.get(units)

    def sync_of(self, left: int) -> Callable[[int, int], float]:
        params = next((g.params() for g in self.small.values()), 0.0)
        kept: dict[tuple[int, int], float] = {}

        def sync(groups: int, units: int) -> float:
            key = groups, units
            if key not in kept:
                kept[key] = self.of.sync_s(params, groups, units * self.per, left * self.per)
            return kept[key]

        return sync

    def combined(self, places: Sequence[int]) -> Combination | None:
        return best(self.speeds, places, self.parts, self.sync_of(sum(places)))

    def answers(self) -> dict[int, Answer]:
        """Of each number of units, the largest first. Raises InfeasibleError where all of them have none."""
        found: dict[int, Answer] = {}
        where = self.of.cluster
        for units in range(self.total, self.total - self.survive - 1, -1):
            places = (units,) if self.unit == "node" else spread(where.nodes, where.devices_per_node, where.size - units)
            self.tell(f"{units} {self.unit}s")
            one = self.group(units) if self.one_group else None
            one_s = None if one is None else one.seconds(self.parts)
            same = even(self.speeds, places, self.parts, self.sync_of(units)) if self.small else None
            made = self.combined(places)
            if one_s is not None and (made is None or one_s <= made.step_s):
                made = Combination(((units, self.parts),), one_s, 0.0, 0)
            found[units] = Answer(made, one_s, same, all(self.filled[u] for u in places))
            if made is None and units == self.total:
                raise InfeasibleError(
                    constraint=f"memory of all {units} {self.unit}s", shortfall_bytes=int(self.short) if math.isfinite(self.short) else 0,
                    remedy="more devices, larger groups (sizes), a smaller micro-batch",
                )  # fmt: skip
        spared(found)
        return found

    @property
    def short(self) -> float:
        """The least that any group misses, bytes."""
        return min(self.lacking.values(), default=0.0)

    def rows(self) -> list[Size]:
        found: list[Size] = []
        above: Placed | None = None
        for units, a in self.answers().items():
            if a.made is None:
                why = f"no group fits: {format_bytes(self.short)} a device are missing" if math.isfinite(self.short) else "no group fits"
                found.append(Size(units, units * self.per, None, filled=a.filled, why=why))
                above = None
                continue
            its = {k: self.known[k] for k in a.made.counts}
            here = [ranks_of(its[k].layout, its[k].devices) for k, _ in a.made.groups]
            state = STATE_BYTES * next(iter(its.values())).params()
            everywhere, busiest = (0.0, 0.0) if above is None else worst(above, here, self.per)
            if above is not None:
                found[-1] = replace(found[-1], grown_bytes=moved(here, above, 0)[1] * state)
            above = here
            found.append(
                Size(
                    units, units * self.per, a.made.step_s, max(its[k].step(x).fullest_bytes for k, x in a.made.groups), a.made.text(),
                    {k: str(g.layout) for k, g in its.items()}, a.made.groups, a.made.sync_s, a.made.idle * self.per, a.one_s,
                    None if a.even is None else a.even.step_s, 0 if a.even is None else len(a.even.groups), everywhere * state, busiest * state, filled=a.filled,
                )
            )  # fmt: skip
        return found


@dataclass
class Answer:
    """Of so many units. even: the best of groups that get as much; one_s, filled: as of Size."""

    made: Combination | None
    one_s: float | None
    even: Combination | None
    filled: bool


def spared(answers: dict[int, Answer]) -> None:
    """Where fewer units are faster than all, as whole micro-batches may have it, the rest idle. Keys: neighbouring numbers."""
    for units in sorted(answers):
        fewer = answers[units - 1].made if units - 1 in answers else None
        mine = answers[units]
        if fewer is not None and (mine.made is None or fewer.step_s < mine.made.step_s):
            mine.made = replace(fewer, idle=fewer.idle + 1)


STATE_BYTES = 12.0  # of a parameter: what is stepped and two moments, in single precision


def spread(nodes: int, per_node: int, lost: int) -> tuple[int, ...]:
    """Devices left on each node, of which the fewest are whole."""
    each, more = divmod(lost, nodes)
    return tuple(n for i in range(nodes) if (n := per_node - each - (i < more)) > 0)
