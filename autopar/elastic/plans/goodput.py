"""What failures cost: one series of them, replayed on predicted times by every way to live with them (policies.py).

    goodput = steps whose result is there at the end x time of a step of all units, undisturbed / time of the run

Without failures an elastic run of one sharded group copies each step's state to the host (state / devices / host link, which training waits for) and on to a partner (over the link between
nodes, beside the next step; what is longer than that is waited for). Where several groups have the whole state, nothing is copied. After a loss: what was measured on four processes
(DETECT_S, REGROUP_S), what the busiest device gets by the plan, over its link, and new copies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from autopar.elastic.plans.checkpoints import best_s, best_steps, daly_s, young_s
from autopar.elastic.plans.failures import Failure
from autopar.elastic.plans.ledger import Seconds
from autopar.elastic.plans.policies import Checkpointed, Elastic, Mode, Policy
from autopar.elastic.plans.table import Size, Templates
from autopar.errors import AutoparError
from autopar.text.sizes import format_amount, format_bytes
from autopar.text.times import format_time

# The slowest of benchmarks/results/elastic.json (detect; new group and state) and elastic_joins.json (start; the others stand): four gloo processes on two cores.
DETECT_S, REGROUP_S, START_S, JOIN_S = 0.07, 0.301, 25.7, 0.953
# A node's share of what Meta's storage sustains: 2 TB/s beside 16,384 H100 ("The Llama 3 Herd of Models", 2024, section 3.3.1: storage).
STORAGE_BPS = 1e9
MAX_CHECKPOINTS = 1_000_000


@dataclass(frozen=True)
class Setting:
    """What is not planned. detect_s, regroup_s: of a loss, beside what moves; start_s: until a process that is started could join, the others train meanwhile; join_s: that they stand for it,
    beside what moves; storage_Bps: of a node; restart_s: from when all units are there until a run from a checkpoint trains, without reading it; save_s: between the checkpoints of an
    elastic run; spares: units that stand by. The first four are measured, restart_s is assumed."""

    detect_s: float = DETECT_S
    regroup_s: float = REGROUP_S
    start_s: float = START_S
    join_s: float = JOIN_S
    storage_Bps: float = STORAGE_BPS
    restart_s: float = 300.0
    save_s: float = 3600.0
    spares: int = 2

    def __post_init__(self) -> None:
        for name, x in self.__dict__.items():
            if not (math.isfinite(x) and x >= 0) or (name in ("storage_Bps", "save_s") and x <= 0):
                raise AutoparError(f"{name} is {x!r}", where="simulate", fix="give a finite positive number, or 0 where nothing is taken")


@dataclass(frozen=True)
class Outcome:
    """Of a way to live with failures. in_use: devices that train, over those of all units, on average; held: goodput over all devices, those that stand by too; seconds: where the run's go; losses: units;
    interrupted: steps; undone: whole steps that were done again; restarts: from a checkpoint; interval_s: of work between checkpoints; course: (seconds, useful ones)."""

    name: str
    goodput: float
    held: float
    in_use: float
    steps: int
    seconds: Seconds
    losses: int
    interrupted: int
    undone: int
    restarts: int
    interval_s: float | None = None
    course: tuple[tuple[float, float], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Simulation:
    """failures: within the run; mtbf_s: of all units together, by which checkpoints are written; write_s: of a checkpoint; young_s, daly_s, best_s: of work between checkpoints that are waited for; covered: fewest units with a plan."""

    model: str
    cluster: str
    unit: str
    units: int
    days: float
    failures: int
    mtbf_s: float
    step_s: float
    state_bytes: float
    write_s: float
    young_s: float
    daly_s: float
    best_s: float
    covered: int
    setting: Setting
    outcomes: tuple[Outcome, ...]

    def document(self) -> dict[str, Any]:
        """As JSON has it, without the courses."""
        plain = asdict(self)
        for o in plain["outcomes"]:
            del o["course"]
        return {"kind": "elastic-simulation", "version": 1, **plain}

    def text(self) -> str:
        s = self.setting
        lines = [
            f"{self.model} on {self.cluster}, {self.units} {self.unit}s, {self.days:g} days: {self.failures} failures, one in {format_time(self.mtbf_s)} expected; a step takes {format_time(self.step_s)}",
            f"templates: {self.units} down to {self.covered} {self.unit}s; fewer go back to a checkpoint",
            f"a loss: the step that runs; detected in {format_time(s.detect_s)}, regrouped in {format_time(s.regroup_s)}, ready to join after {format_time(s.start_s)}, joined in {format_time(s.join_s)} "
            "(defaults: measured, four gloo processes on two cores); what moves and is copied, by plan",
            f"a checkpoint: {format_bytes(self.state_bytes)} at {format_amount(s.storage_Bps, 'B/s')} a node, {format_time(self.write_s)}; a restart {format_time(s.restart_s)} (assumed), and reading. "
            f"Best interval {format_time(self.best_s)} (Daly's {format_time(self.daly_s)}, Young's {format_time(self.young_s)})",
        ]  # fmt: skip
        head = [
            "",
            "goodput",
            "of all held",
            "in use",
            "steps",
            "interrupted",
            "done again",
            "restarts",
            *(f"{k}" for k in Seconds().named() if k != "useful"),
        ]
        rows = [head]
        for o in self.outcomes:
            shares = [f"{x / o.seconds.total:.3%}" if x else "-" for k, x in o.seconds.named().items() if k != "useful"]
            counts = [f"{n:,}" for n in (o.steps, o.interrupted, o.undone, o.restarts)]
            rows.append([o.name, f"{o.goodput:.3%}", f"{o.held:.3%}", f"{o.in_use:.2%}", *counts, *shares])
        widths = [max(len(r[i]) for r in rows) for i in range(len(head))]
        lines += ["  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))).rstrip() for r in rows]
        return "\n".join(lines)

    __str__ = text


def simulate(
    templates: Templates, failures: Sequence[Failure], days: float, setting: Setting | None = None, mtbf_s: float | None = None
) -> Simulation:
    """failures: in order of time, of the templates' units. mtbf_s: between failures of all units together, where it is known: checkpoints are written by it; else as there were failures.

    Raises AutoparError for numbers that cannot be.
    """
    s = setting or Setting()
    if not (math.isfinite(days) and days > 0) or days * 86400 / s.save_s > MAX_CHECKPOINTS:
        fix = f"give a positive number, of at most {MAX_CHECKPOINTS:,} checkpoints"
        raise AutoparError(f"{days!r} days are no run that can be simulated", where="simulate", fix=fix)
    end_s, full = days * 86400, templates.sizes[0]
    units, hit = full.units, [f for f in failures if f.time_s < end_s]
    _check(hit, units, templates.unit)
    assert full.step_s is not None, "templates of no plan are not made"
    mtbf_s = end_s / max(1, len(hit)) if mtbf_s is None else mtbf_s
    if not 0 < mtbf_s < math.inf:
        raise AutoparError(f"{mtbf_s!r} s between failures", where="simulate", fix="give a positive number")
    write_s = templates.state_bytes / (s.storage_Bps * max(1, units // templates.node_units))
    ours, theirs = modes(templates, s), even_modes(templates, s)
    every = best_steps(full.step_s, write_s, mtbf_s)
    stalls_s = templates.state_bytes / full.devices / templates.host_Bps
    often = max(best_steps(full.step_s, stalls_s, mtbf_s), math.ceil(write_s / full.step_s))
    beside = templates.node_units  # the partner is on another node

    whole = Mode(full.step_s, devices=full.devices)
    restart_s = s.detect_s + s.restart_s + write_s  # read as it is written

    def checkpointed(name: str, spares: float) -> tuple[Policy, float]:
        return Checkpointed(name, units, whole, every, write_s, 0.0, restart_s, spares), every * whole.step_s

    def elastic(name: str, of: Mapping[int, Mode], beside: int | None, spares: int) -> tuple[Policy, None]:
        return Elastic(name, units, whole.step_s, of, beside, s.start_s, s.save_s, write_s, restart_s, spares), None

    stand_by = f"{s.spares} spare{'' if s.spares == 1 else 's'}" if s.spares else "no spares"
    policies: list[tuple[Policy, float | None]] = [
        checkpointed("checkpoints, always a spare", math.inf),
        checkpointed(f"checkpoints, {stand_by}", s.spares),
        (
            Checkpointed(f"checkpoints beside training, {stand_by}", units, whole, often, stalls_s, write_s, restart_s, s.spares),
            often * whole.step_s,
        ),
        elastic("Oobleck-like, no spares", theirs, None, 0),
        elastic("templates, no spares", ours, beside, 0),
    ]  # fmt: skip
    if s.spares:
        policies += [
            elastic(f"Oobleck-like, {stand_by}", theirs, None, s.spares),
            elastic(f"templates, {stand_by}", ours, beside, s.spares),
        ]
    ideal = Outcome(
        "ideal: nothing fails",
        1.0,
        1.0,
        1.0,
        int(end_s / full.step_s),
        Seconds(useful=end_s),
        0,
        0,
        0,
        0,
        None,
        ((0.0, 0.0), (end_s, end_s)),
    )
    outcomes = [ideal]
    for policy, interval_s in policies:
        spares = 0 if math.isinf(policy.spares) else policy.spares
        policy.replay(hit, end_s)
        outcomes.append(outcome(policy, end_s, full.devices, units / (units + spares), interval_s))
    return Simulation(
        templates.model, templates.cluster, templates.unit, units, days, len(hit), mtbf_s, full.step_s, templates.state_bytes, write_s, young_s(write_s, mtbf_s),
        daly_s(write_s, mtbf_s), best_s(write_s, mtbf_s), min(ours), s, tuple(outcomes),
    )  # fmt: skip


def outcome(policy: Policy, end_s: float, devices: int, held: float, interval_s: float | None = None) -> Outcome:
    """Of a policy that was replayed. held: units in the run over units that are paid for."""
    spent = policy.ledger.spent
    goodput = spent.useful / end_s
    return Outcome(
        policy.name, goodput, goodput * held, policy.ledger.used / end_s / devices, policy.ledger.steps, spent, policy.losses, policy.interrupted, policy.undone,
        policy.restarts, interval_s, tuple(policy.course),
    )  # fmt: skip


def modes(templates: Templates, s: Setting) -> dict[int, Mode]:
    """Of templates, with state beside neighbours where one group has it all."""
    found: dict[int, Mode] = {}
    for size in _planned(templates):
        assert size.step_s is not None
        busy, single = size.devices - size.idle, len(size.shares) == 1
        own = templates.state_bytes / busy if single else 0.0
        copies_s, sent_s = own / templates.host_Bps, own / templates.link_Bps
        grown_s, moves_s = size.grown_bytes / templates.link_Bps, size.busiest_bytes / templates.link_Bps
        found[size.units] = Mode(
            size.step_s, copies_s + max(0.0, sent_s - size.step_s), min(sent_s, size.step_s), s.detect_s + s.regroup_s + moves_s + copies_s + sent_s,
            s.join_s + grown_s + copies_s + sent_s, len(size.shares), busy,
        )  # fmt: skip
    return found


def even_modes(templates: Templates, s: Setting) -> dict[int, Mode]:
    """Of groups that all get as much, as Oobleck's pipelines: no copies, state is in the other groups; those of the group that was hit start again, and get it from there."""
    found: dict[int, Mode] = {}
    for size in _planned(templates):
        if size.even_s is None:
            break
        moves_s = templates.state_bytes * size.even_groups / size.devices / templates.link_Bps
        found[size.units] = Mode(
            size.even_s, 0.0, 0.0, s.detect_s + s.start_s + s.regroup_s + moves_s, s.join_s + moves_s, size.even_groups, size.devices
        )
    return found


def _planned(templates: Templates) -> list[Size]:
    """From all units down to the first number without a plan."""
    gap = next((i for i, size in enumerate(templates.sizes) if size.step_s is None), len(templates.sizes))
    return list(templates.sizes[:gap])


def _check(failures: Sequence[Failure], units: int, unit: str) -> None:
    before = 0.0
    for f in failures:
        if not 0 <= f.unit < units:
            raise AutoparError(f"there is no {unit} {f.unit}", where="failures", fix=f"number them from 0 to {units - 1}")
        if not f.time_s >= before or not f.repair_s > 0:
            raise AutoparError(
                f"a failure at {f.time_s!r} s, after one at {before!r} s",
                where="failures",
                fix="give them in order of time, with a repair that takes time",
            )
        before = f.time_s
