"""Plans for n, n - 1, ..., n - f devices or nodes, made before anything fails.

A template is the fastest group on k units (groups.py). For each number that may be left the answer is the faster of: one group over all that is left; groups of the template sizes
beside each other, each with the share of the global batch that its speed earns, in whole micro-batches, combined exactly (combine.py; heterogeneous templates: Jang et al., "Oobleck", SOSP
'23, section 4); the answer for fewer, where that is faster: micro-batches are whole. The global batch is kept. Where units are devices a template lies within a node, and survivors are taken to be spread: each further device is lost on a
node that has the most, which leaves the fewest whole nodes. `Templates.of` answers for any other distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autopar.elastic.plans.combine import Combination, best, even, fillable, frobenius
from autopar.elastic.plans.groups import Group, Groups
from autopar.elastic.plans.moves import places as ranks_of
from autopar.elastic.plans.moves import worst
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.memory import Memory
from autopar.predict.api import tokens_of
from autopar.text.sizes import format_bytes
from autopar.text.times import format_time

UNITS = ("node", "device")


@dataclass(frozen=True)
class Size:
    """A number of units that may be left. step_s: None where nothing keeps to the memory, and `why` says so. groups: "units x how many (parts of the batch)"; layouts: of each size. one_s: of one group over
    all; even_s: of groups that all get as much. moved_bytes: from the size above, after the worst loss; busiest_bytes: of it, to one device. filled: whether template sizes fill it without rest."""

    units: int
    devices: int
    step_s: float | None
    memory_bytes: float = 0.0
    groups: str = ""
    layouts: Mapping[int, str] = field(default_factory=dict)
    shares: tuple[tuple[int, int], ...] = ()
    sync_s: float = 0.0
    idle: int = 0
    one_s: float | None = None
    even_s: float | None = None
    moved_bytes: float = 0.0
    busiest_bytes: float = 0.0
    filled: bool = True
    why: str = ""


@dataclass(frozen=True)
class Templates:
    """sizes: the largest first. templates: units -> the layout of a group of so many; lacking: sizes without one, with the bytes that are missing. state_bytes: of parameters and optimizer
    state that a checkpoint has; link_Bps: of a device, between nodes. filled_from: template sizes fill every number of units from this one on; None: there is none."""

    model: str
    cluster: str
    unit: str
    batch: int
    micro_batch: int
    tokens: int
    sizes: tuple[Size, ...]
    templates: Mapping[int, str]
    lacking: Mapping[int, float]
    filled_from: int | None
    state_bytes: float
    link_Bps: float
    cost_of: Callable[[Sequence[int]], Combination | None] | None = field(default=None, repr=False, compare=False)

    @property
    def without_plan(self) -> tuple[int, ...]:
        return tuple(s.units for s in self.sizes if s.step_s is None)

    def of(self, places: Sequence[int]) -> Combination | None:
        """The best combination of templates where survivors are distributed so: devices left on each node; of nodes, their number alone. None where no group fits. Not of templates that were read from a file."""
        if self.cost_of is None:
            raise AutoparError(
                "templates from a file have no prices of other distributions",
                where="of",
                fix="make them anew: autopar.elastic.plans.templates",
            )
        return self.cost_of(places)

    def document(self) -> dict[str, Any]:
        plain = {k: v for k, v in self.__dict__.items() if k not in ("cost_of", "sizes")}
        return {"kind": "elastic-templates", "version": 1, **plain, "sizes": [asdict(s) for s in self.sizes]}

    def text(self) -> str:
        head = (
            f"{self.model} on {self.cluster}, {self.batch} sequences of {self.tokens} in micro-batches of {self.micro_batch}; a unit is a {self.unit}\n"
            f"templates: {'; '.join(f'{k}: {lay}' for k, lay in sorted(self.templates.items())) or 'none'}"
        )
        if self.lacking:
            head += "\nwithout a plan within memory: " + ", ".join(
                f"{k} (lacks {format_bytes(b)} a device)" for k, b in sorted(self.lacking.items())
            )
        head += "\n" + (
            "template sizes fill no number of units from some one on: they have a common divisor, or there are none" if self.filled_from is None
            else f"template sizes fill every number of units of one place from {self.filled_from} on, without rest"
        )  # fmt: skip
        rows = [("units", "devices", "step", "memory", "moves at most", "one group", "idle", "groups (micro-batches of each)")]
        for s in self.sizes:
            if s.step_s is None:
                rows.append((str(s.units), str(s.devices), "NO PLAN", "", "", "", "", s.why))
                continue
            one = "" if s.one_s is None else format_time(s.one_s)
            rows.append(
                (
                    str(s.units),
                    str(s.devices),
                    format_time(s.step_s),
                    format_bytes(s.memory_bytes),
                    format_bytes(s.moved_bytes),
                    one,
                    str(s.idle),
                    s.groups,
                )
            )
        widths = [max(len(r[i]) for r in rows) for i in range(7)]
        table = "\n".join("  ".join(c.rjust(w) for c, w in zip(r[:7], widths, strict=True)) + "  " + r[7] for r in rows)
        idle = [str(s.units) for s in self.sizes if s.step_s is not None and s.idle]
        unfilled = [str(s.units) for s in self.sizes if not s.filled]
        tail = [f"devices idle at: {', '.join(idle)}"] if idle else ["no size leaves a device idle"]
        if unfilled:
            tail.append(f"not filled by templates alone: {', '.join(unfilled)}")
        return "\n".join([head, table, *tail])

    __str__ = text


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
    node = where.devices_per_node
    if unit not in UNITS:
        raise AutoparError(f"a unit of {unit!r}", where="unit", fix='pass "node" or "device"')
    per, total = (node, where.nodes) if unit == "node" else (1, where.size)
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
    most = where.nodes if unit == "node" else node
    asked = tuple(range(1, min(8, most) + 1)) if sizes is None else tuple(sorted({*sizes}))
    if not asked or any(isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= most for k in asked):
        raise AutoparError(f"groups of {list(asked)} {unit}s", where="sizes", fix=f"give numbers from 1 to {most}")
    request = Memory.of(memory)
    if request.least:
        raise AutoparError("templates of the least memory are not made", where="memory", fix="give the bytes that a device may use")
    budget = where.device.usable_bytes if request.budget_bytes is None else request.budget_bytes
    parts, tell = global_batch // micro_batch, progress or (lambda what: None)
    of = Groups(model, inputs, where, micro_batch, budget, precision, optimizer, loss_fn, in_subprocess=in_subprocess)
    each = max(1, round(parts / where.size))
    known: dict[int, Group] = {}
    lacking: dict[int, float] = {}

    def group(units: int) -> Group | None:
        if units not in known and units not in lacking:
            tell(f"group of {units} {unit}{'s' if units > 1 else ''}")
            share = parts if units > most or units >= total - survive else max(1, round(parts * units / total))
            found, short = of.group(units, units * per, each, share)
            if found is None:
                lacking[units] = short
            else:
                known[units] = found
        return known.get(units)

    small = {k: g for k in asked if (g := group(k)) is not None}
    speeds = {k: g.seconds for k, g in small.items()}

    def sync_of(left: int) -> Callable[[int, int], float]:
        params = next((g.params() for g in small.values()), 0.0)
        kept: dict[tuple[int, int], float] = {}

        def sync(groups: int, units: int) -> float:
            key = groups, units
            if key not in kept:
                kept[key] = of.sync_s(params, groups, units * per, left * per)
            return kept[key]

        return sync

    def combined(places: Sequence[int]) -> Combination | None:
        return best(speeds, places, parts, sync_of(sum(places)))

    filled = fillable(tuple(small), total) if small else (False,) * (total + 1)
    gap = frobenius(tuple(small))
    answers: dict[int, Answer] = {}
    for units in range(total, total - survive - 1, -1):
        where_left = (units,) if unit == "node" else spread(where.nodes, node, where.size - units)
        tell(f"{units} {unit}s")
        one = group(units) if one_group else None
        one_s = None if one is None else one.seconds(parts)
        same = even(speeds, where_left, parts, sync_of(units)) if small else None
        made = combined(where_left)
        if one_s is not None and (made is None or one_s <= made.step_s):
            made = Combination(((units, parts),), one_s, 0.0, 0)
        answers[units] = Answer(made, one_s, None if same is None else same.step_s, all(filled[u] for u in where_left))
        if made is None and units == total:
            short = min(lacking.values(), default=0.0)
            raise InfeasibleError(
                constraint=f"memory of all {total} {unit}s", shortfall_bytes=int(short) if math.isfinite(short) else 0,
                remedy="more devices, larger groups (sizes), a smaller micro-batch",
            )  # fmt: skip
    spared(answers)
    rows: list[Size] = []
    above: tuple[Combination, dict[int, Group]] | None = None
    for units, answer in answers.items():
        made = answer.made
        if made is None:
            short = min(lacking.values(), default=0.0)
            why = f"no group fits: {format_bytes(short)} a device are missing" if math.isfinite(short) else "no group fits"
            rows.append(Size(units, units * per, None, filled=answer.filled, why=why))
            above = None
            continue
        its = {k: known[k] for k in made.counts}
        everywhere, busiest = _moves(above, (made, its), per)
        state = STATE_BYTES * next(iter(its.values())).params()
        rows.append(
            Size(
                units, units * per, made.step_s, max(its[k].step(x).fullest_bytes for k, x in made.groups), made.text(), {k: str(g.layout) for k, g in its.items()}, made.groups, made.sync_s,
                made.idle * per, answer.one_s, answer.even_s, everywhere * state, busiest * state, answer.filled,
            )
        )  # fmt: skip
        above = made, its
    link = where.inter.reached_Bps if where.nodes > 1 else where.intra.reached_Bps
    params = next(iter(known.values())).params()
    return Templates(
        type(model).__name__, where.name, unit, global_batch, micro_batch, tokens_of(inputs), tuple(rows), {k: str(g.layout) for k, g in small.items()},
        {k: b for k, b in lacking.items() if k in asked or k >= total - survive}, None if gap is None else gap + 1, STATE_BYTES * params, link, combined,
    )  # fmt: skip


@dataclass
class Answer:
    """Of so many units. one_s, even_s, filled: as of Size."""

    made: Combination | None
    one_s: float | None
    even_s: float | None
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


def _moves(above: tuple[Combination, dict[int, Group]] | None, now: tuple[Combination, dict[int, Group]], per: int) -> tuple[float, float]:
    if above is None:
        return 0.0, 0.0

    def ranks(c: Combination, of: Mapping[int, Group]) -> list[Any]:
        return [ranks_of(of[k].layout, of[k].devices) for k, _ in c.groups]

    return worst(ranks(*above), ranks(*now), per)
