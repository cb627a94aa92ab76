"""Ways to live with failures: what each does when a unit is lost, or comes back.

A policy goes from event to event; between two of them it trains in whole steps, or stands (recovers, waits for units), which is summed up at once: no step of time is taken. A place of the
run whose unit is lost is filled by one that stands by, if there is one, else by the next that is repaired; what is repaired and not needed stands by.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from autopar.elastic.plans.failures import Failure
from autopar.elastic.plans.ledger import Ledger, Mark, Seconds

SLACK = 1e-6  # of a step: times are sums of many


@dataclass(frozen=True)
class Mode:
    """A number of units that trains. step_s: of a step, without copies; copies_s: that it stands for copies; sent_s: after its begin until they are whole elsewhere; recovery_s: from a failure
    that leaves so many to the next step; join_s: that it stands while it grows to so many; replicas: groups that have the whole state; devices: that work."""

    step_s: float
    copies_s: float = 0.0
    sent_s: float = 0.0
    recovery_s: float = 0.0
    join_s: float = 0.0
    replicas: int = 1
    devices: int = 1

    @property
    def whole_s(self) -> float:
        return self.step_s + self.copies_s


class Policy(ABC):
    """spares: units that stand by, inf for always one; fills_s: until one that is there can join. losses: units; interrupted: steps; undone: whole steps that are done again; restarts: ways back
    to a checkpoint; course: (seconds, useful ones) after each event."""

    def __init__(self, name: str, units: int, full_step_s: float, spares: float, fills_s: float) -> None:
        self.name, self.units, self.full_step_s, self.spares, self.fills_s = name, units, full_step_s, spares, fills_s
        self.ledger = Ledger()
        self.live = set(range(units))
        self.empty: deque[int] = deque()  # places that wait for a repair: then nothing stands by
        self.agenda: list[tuple[float, int, str, int]] = []
        self.planned = 0
        self.now = 0.0
        self.since = 0.0  # training goes on then; inf: it waits for units
        self.training = False
        self.losses = self.interrupted = self.undone = self.restarts = 0
        self.generation = 0
        self.course = [(0.0, 0.0)]

    # ---- events --------------------------------------------------------------------------------------------------

    def replay(self, failures: Sequence[Failure], end_s: float) -> None:
        """To the end. failures: in order of time."""
        for f in failures:
            if f.time_s >= end_s:
                break
            self._heed_until(f.time_s)
            if f.unit in self.live:
                self._hit(f)
        self._heed_until(end_s)
        self.until(end_s)
        if self.training:
            self.end()
        self._note()

    def plan(self, time_s: float, what: str, of: int) -> None:
        self.planned += 1
        heappush(self.agenda, (time_s, self.planned, what, of))

    def _heed_until(self, at: float) -> None:
        while self.agenda and self.agenda[0][0] <= at:
            time_s, _, what, of = heappop(self.agenda)
            if what == "repaired" and not self.empty:
                self.spares += 1
            elif what == "repaired":
                self.plan(time_s + self.fills_s, "filled", self.empty.popleft())
            elif what == "filled" or of == self.generation:
                self.until(time_s)
                self.fill(of, time_s) if what == "filled" else self.join(time_s)
                self._note()

    def _hit(self, f: Failure) -> None:
        self.until(f.time_s)
        self.losses += 1
        self.generation += 1
        self.live.remove(f.unit)
        if math.isfinite(f.repair_s):
            self.plan(f.time_s + f.repair_s, "repaired", f.unit)
        if self.spares > 0:
            self.spares -= 1
            self.plan(f.time_s + self.fills_s, "filled", f.unit)
        else:
            self.empty.append(f.unit)
        self.lose(f.unit, f.time_s)
        self._note()

    def _note(self) -> None:
        self.course.append((self.now, self.ledger.spent.useful))

    # ---- time ------------------------------------------------------------------------------------------------------

    def until(self, at: float) -> None:
        """Stands, and trains."""
        stands = min(at, self.since) - self.now
        if stands > 0:
            self.ledger.add(Seconds(waiting=stands) if math.isinf(self.since) else Seconds(recovering=stands))
            self.now += stands
        if at >= self.since:
            if not self.training:
                self.training = True
                self.begin()
            self.train(at)
            self.now = at

    def stop(self, since: float) -> None:
        """Training goes on then."""
        self.training, self.since = False, since

    # ---- what a policy is ------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self) -> None:
        """Training goes on, at `since`."""

    @abstractmethod
    def train(self, at: float) -> None:
        """From where it was until `at`."""

    @abstractmethod
    def lose(self, unit: int, at: float) -> None:
        """A unit fails."""

    @abstractmethod
    def fill(self, unit: int, at: float) -> None:
        """A unit is there for a place."""

    def join(self, at: float) -> None:
        """What was planned as "join" is due, and nothing came between. One that plans none has none due."""
        raise AssertionError(f"{self.name} plans no join")

    @abstractmethod
    def end(self) -> None:
        """What is unfinished counts as far as it is."""


class Checkpointed(Policy):
    """All units or none: from the last checkpoint, once all places are filled again. every: steps between checkpoints; stalls_s: that training waits for one; written_s: after that, until it
    is there (0 where training waits for all of it); restart_s: from when all are there to the next step."""

    def __init__(
        self, name: str, units: int, mode: Mode, every: int, stalls_s: float, written_s: float, restart_s: float, spares: float
    ) -> None:
        super().__init__(name, units, mode.step_s, spares, 0.0)
        self.mode, self.every, self.stalls_s, self.written_s, self.restart_s = mode, every, stalls_s, written_s, restart_s
        self.cycle_s = every * mode.step_s + stalls_s
        self.first = self.ledger.mark(0.0)  # what this stretch of training began with
        self.running_s = 0.0  # of the step that is not done

    def begin(self) -> None:
        self.first = self.ledger.mark(self.since)

    def train(self, at: float) -> None:
        """The stretch anew, from its begin: checkpoints, steps after the last, and the rest."""
        step_s, ran = self.mode.step_s, at - self.since
        cycles, rest = _whole(ran, self.cycle_s, step_s)
        more = min(self.every, _whole(rest, step_s, step_s)[0])
        rest = max(0.0, rest - more * step_s)
        self.running_s, writing = (0.0, rest) if more == self.every else (rest, 0.0)
        self.ledger.used += (at - self.now) * self.mode.devices
        self.ledger.steps = self.first.steps + cycles * self.every + more
        spent = Seconds(useful=(cycles * self.every + more) * step_s, writing=cycles * self.stalls_s + writing)
        self.ledger.spent = self.first.spent + spent

    def lose(self, unit: int, at: float) -> None:
        if self.training:
            self.interrupted += 1
            self.restarts += 1
            self.ledger.add(Seconds(lost=self.running_s))
            saved = self.every * _whole(at - self.since - self.written_s, self.cycle_s, self.mode.step_s)[0]
            kept = self.first.spent + Seconds(useful=saved * self.mode.step_s)
            self.undone += self.ledger.back_to(Mark(at, self.first.steps + saved, kept))
        self.stop(math.inf)

    def fill(self, unit: int, at: float) -> None:
        self.live.add(unit)
        if len(self.live) == self.units:
            self.stop(at + self.restart_s)

    def end(self) -> None:
        self.ledger.add(Seconds(useful=self.running_s))


class Elastic(Policy):
    """Goes on with those that are left, from the step before, as long as there is a plan for so many and their state is somewhere; else from a checkpoint.

    full_step_s: of the best step of all units, which is what counts. modes: by units left. beside: how far in the order of places the partner is whose host has a unit's copy; None: nobody has. save_s: between checkpoints, which are written beside training
    in write_s; a loss breaks one that is being written. restart_s: from one, as for all.
    """

    def __init__(
        self, name: str, units: int, full_step_s: float, modes: Mapping[int, Mode], beside: int | None, fills_s: float, save_s: float, write_s: float, restart_s: float, spares: float
    ) -> None:  # fmt: skip
        super().__init__(name, units, full_step_s, spares, fills_s)
        assert all(n + 1 in modes for n in modes if n < units), "more units never have less of a plan"
        self.modes, self.beside, self.save_s, self.write_s, self.restart_s = modes, beside, save_s, write_s, restart_s
        self.mode = modes[units]  # of this stretch of training
        self.whole = tuple(range(units))  # who had the state at its begin
        self.done = 0  # steps of it
        self.dead: set[int] = set()  # since then
        self.ready: set[int] = set()  # to join
        self.from_disk = False
        self.marks = [self.ledger.mark(0.0)]  # the last checkpoint that is written, and those that are on the way
        self.saved = 0  # checkpoints that were begun

    @property
    def boundary(self) -> float:
        """Where the last whole step ended."""
        return self.since + self.done * self.mode.whole_s

    def begin(self) -> None:
        self.mode, self.whole, self.done = self.modes[len(self.live)], tuple(sorted(self.live)), 0
        self.dead, self.from_disk = set(), False

    def train(self, at: float) -> None:
        while (due := (self.saved + 1) * self.save_s) <= at:
            self._steps(due)
            self.saved += 1
            self.marks = [*self._valid(due), self.ledger.mark(due + self.write_s)]
        self._steps(at)

    def _steps(self, at: float) -> None:
        n = _whole(at - self.since, self.mode.whole_s, self.mode.whole_s)[0] - self.done
        if n > 0:
            self.done += n
            self.ledger.add(self._step().times(n), n, self.mode.devices)

    def _step(self) -> Seconds:
        return Seconds(self.full_step_s, self.mode.step_s - self.full_step_s, self.mode.copies_s)

    def _valid(self, at: float) -> list[Mark]:
        """The newest checkpoint that is written, and those that are not yet."""
        return [*[m for m in self.marks if m.time_s <= at][-1:], *(m for m in self.marks if m.time_s > at)]

    def lose(self, unit: int, at: float) -> None:
        if self.training:
            running_s = max(0.0, at - self.boundary)
            self.interrupted += 1
            self.ledger.add(Seconds(lost=running_s), 0, self.mode.devices)
            if self.done and running_s < self.mode.sent_s:  # the copies of the step before were on the way
                self.ledger.add(self._step().times(-1) + Seconds(lost=self.mode.whole_s), -1)
                self.undone += 1
        self.marks = self._valid(at)[:1]
        self.dead.add(unit)
        if not self.from_disk and (len(self.live) not in self.modes or self._is_gone()):
            self.from_disk = True
            self.restarts += 1
            self.undone += self.ledger.back_to(self.marks[0])
        if self.from_disk:  # whoever is there begins
            self.live |= self.ready
            self.ready = set()
        left = self.modes.get(len(self.live))
        self.stop(math.inf if left is None else at + (self.restart_s if self.from_disk else left.recovery_s))
        self._arm()

    def _is_gone(self) -> bool:
        """Whether some state is nowhere. Where groups have it all, as many losses as groups are taken to have hit the same piece of each."""
        dead = self.dead.intersection(self.whole)
        if self.mode.replicas > 1:
            return len(dead) >= self.mode.replicas
        if self.beside is None:
            return bool(dead)
        n = len(self.whole)
        return any(unit in dead and self.whole[(i + self.beside) % n] in dead for i, unit in enumerate(self.whole))

    def _arm(self) -> None:
        """Those that are ready join at the end of a step: of the running one, or of the first after a recovery."""
        if self.ready:
            self.plan((self.boundary if self.training else self.since) + self.modes[len(self.live)].whole_s, "join", self.generation)

    def fill(self, unit: int, at: float) -> None:
        self.generation += 1
        if not math.isinf(self.since):
            self.ready.add(unit)
            self._arm()
            return
        self.live.add(unit)
        if len(self.live) in self.modes:
            self.stop(at + self.restart_s)

    def join(self, at: float) -> None:
        self.live |= self.ready
        self.ready = set()
        self.stop(at + self.modes[len(self.live)].join_s)

    def end(self) -> None:
        self.ledger.add(self._step().times(max(0.0, self.now - self.boundary) / self.mode.whole_s), 0, self.mode.devices)


def _whole(seconds: float, each_s: float, step_s: float) -> tuple[int, float]:
    """How often `each_s` is in it, and the rest; what rounding lacks of a step is forgiven."""
    n = max(0, math.floor((seconds + SLACK * step_s) / each_s))
    return n, max(0.0, seconds - n * each_s)
