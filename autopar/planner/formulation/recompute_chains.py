"""When what backward makes again is made, and what lives meanwhile.

`passes.partition` makes a call again right before backward first needs its result: at the earliest position that reads it, or at which a call is made again
that reads it. So with m an operator's "runs again" (0 or 1), what has run by position p of backward is

    ran(o, p) = m(o)                                      from where backward itself first reads a result of o
    ran(o, p) = m(o) and (ran(r, p) for one reader r)     before

and a result that backward reads no more lives on while a reader is still to run: m(r) and not ran(r, p). These are `Event`s of the program. Calls that one position
needs run in the order of forward. What only they read is gone when the position itself runs; so there is a row for a call behind which something is let go, and
one for those that need room of their own.

What a layer hands on is not made again; so a chain ends with its layer, or goes on into what is outside of layers. Where a graph has long chains, there would be too many
events. Then of an operator's positions the first and the last few are told apart; between them, an operator counts as having run already, and what
it reads as still needed: more than there is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from autopar.graph.graph import Op, Tensor
from autopar.planner.formulation.lifetimes import Lifetimes
from autopar.solver.problem import Event, Key, Member

STEPS = 64, 32, 16, 8, 4, 3  # positions of one operator that are told apart: as many as
EVENTS = 4000  # in all allow,
GROUPED = 8000  # where layers are taken together (for want of memory: too much counted is a plan that is not found),
UNFOLDED = 600  # and so many where no layers repeat: chains go through the whole model, and the solver takes minutes for more


class Events:
    """The program's events, each once."""

    def __init__(self) -> None:
        self.known: dict[Event, int] = {}

    def of(self, every: Iterable[Member], one: Iterable[Member | None] = (), no: Member | None = None) -> Member | None:
        """All of `every`, one of `one` if there are any, and not `no`; None: never."""
        first = tuple(dict.fromkeys(every))
        others = {m for m in one if m is not None}
        if no in first:
            return None
        if others & set(first):
            others = set()
        if len(first) == 1 and not others and no is None:
            return first[0]
        event = Event(first, tuple(sorted(others)), () if no is None else (no,))
        return "z", self.known.setdefault(event, len(self.known))


@dataclass(frozen=True)
class Made:
    """A tensor that may be made again. first, last: positions of backward that read it (None, -1: none does)."""

    nbytes: float
    first: int | None
    last: int
    readers: tuple[str, ...]


@dataclass
class Run:
    """An operator of forward that may run again.

    number: of its rerun; direct: where backward first reads a result of it; latest: where it runs at the latest; at, ran: positions of backward from which on
    another event says that it has run; sure: from where on that is so (None: the event may say so too early); merged: first and last of positions that are not told apart.
    """

    op: Op
    number: int
    direct: int | None
    readers: tuple[str, ...]
    made: tuple[Made, ...]
    latest: int = -1
    at: list[int] = field(default_factory=list)
    ran: list[Member] = field(default_factory=list)
    sure: list[int | None] = field(default_factory=list)
    merged: tuple[int, int] | None = None

    @property
    def recompute(self) -> Member:
        return "r", self.number

    def add(self, at: int, ran: Member | None, sure: int | None) -> None:
        if ran is not None and (not self.ran or self.ran[-1] != ran):
            self.at.append(at)
            self.ran.append(ran)
            self.sure.append(sure)
        elif ran is not None and self.sure[-1] is None:
            self.sure[-1] = sure

    def by(self, position: int) -> Member | None:
        """That it has run again by then, or may count so."""
        k = bisect_right(self.at, position)
        return self.ran[k - 1] if k else None

    def surely_by(self, position: int) -> Member | None:
        """That it has run again by then; None also where only less is known."""
        found = [m for m, p in zip(self.ran, self.sure, strict=True) if p is not None and p <= position]
        return found[-1] if found else None


class Chains:
    def __init__(self, life: Lifetimes) -> None:
        self.life = life
        self.runs = {run.op.name: run for run in self._runs()}  # in the order of forward
        for run in self.runs.values():
            run.readers = tuple(r for r in run.readers if r in self.runs)
        most = GROUPED if life.program.q.together > 1 else EVENTS if life.program.q.stacks else UNFOLDED
        for steps in STEPS:
            self.events = Events()
            for run in reversed(self.runs.values()):
                self._when(run, steps)
                if len(self.events.known) > most and steps != STEPS[-1]:
                    break
            else:
                break
        self.at: dict[int, list[Run]] = defaultdict(list)  # position of backward -> what may run for it
        for run in self.runs.values():
            for p in run.at:
                self.at[p].append(run)

    def _runs(self) -> Iterator[Run]:
        f = self.life.f
        which = {key: i for i, key in enumerate(f.names.reruns)}
        for op in f.program.graph.ops:
            number = which.get((f.program.q.rep[op.name], f.program.q.segment[op.name]))
            if op.direction == "forward" and number is not None and f.program.rules[op.name].kind != "view":
                made = [(t, self._made(t)) for t in op.outputs if t is not None and not f.recomputable.leaves_its_copy(op, t)]
                direct = min((m.first for _, m in made if m.first is not None), default=None)
                readers = tuple(dict.fromkeys(r for _, m in made for r in m.readers))
                yield Run(op, number, direct, readers, tuple(m for t, m in made if m.nbytes))

    def _made(self, t: Tensor) -> Made:
        users = self.life.users(t.name, "backward")
        return Made(self._nbytes(t), min(users, default=None), max(users, default=-1), tuple(self.life.readers_through_views(t.name)))

    def _nbytes(self, t: Tensor) -> float:
        """Of the version that is made again; none where nothing is written, or not in one place."""
        f, life = self.life.f, self.life
        wire = f.wires[f.program.q.group[t.name]]
        places = {n for end in wire.supplies[0] for n in end.nodes}
        if t.name not in life.written_by_recompute or len(wire.supplies[0]) != 1 or len(places) != 1:
            return 0.0
        return wire.nbytes * list(wire.nodes)[places.pop()].share(life.mesh)

    def _when(self, run: Run, steps: int) -> None:
        """Where it runs, of at most so many positions."""
        run.at, run.ran, run.sure, run.merged = [], [], [], None
        readers = [self.runs[r] for r in run.readers]
        end = run.direct if run.direct is not None else self.life.end
        run.latest = run.direct if run.direct is not None else max((r.latest for r in readers), default=-1)
        positions = sorted({p for r in readers for p in r.at if p < end})
        # From each position, what has run by the last of those that are not told apart from it.
        groups = [(p, p) for p in positions]
        if len(groups) > steps:
            run.merged = positions[1], positions[1 - steps]
            groups = [groups[0], run.merged, *groups[2 - steps :]]
        for first, last in groups:
            exact = all(r.by(last) == r.surely_by(last) for r in readers)
            run.add(first, self.events.of([run.recompute], [r.by(last) for r in readers]), last if exact else None)
        if run.direct is not None:
            run.add(run.direct, run.recompute, run.direct)

    def waits(self, name: str, position: int) -> Member | None:
        """That `name` is to run again and has not by `position`."""
        run = self.runs.get(name)
        if run is None or position >= run.latest:
            return None
        return self.events.of([run.recompute], no=run.surely_by(position))

    def wanted(self, run: Run, made: Made, start: int, waits: Callable[[str], Member | None]) -> Member | None:
        """That `run` has run by `start`, and a reader of what it made waits."""
        ran, some = run.by(start), [m for r in made.readers if (m := waits(r)) is not None]
        return self.events.of([ran], some) if ran is not None and some else None

    def stand(self) -> Iterator[tuple[Key, float, int, int]]:
        """Bytes by variable, first and last position: what lives before backward itself reads it, or after it."""
        for run in self.runs.values():
            if run.merged is not None and (room := self.life.workspace_of(run.op)):
                for key in self.keys(run.by(run.merged[1])):
                    yield key, room, *run.merged
            for made in run.made:
                readers = [self.runs[r] for r in made.readers if r in self.runs]
                ends = {made.first, made.last + 1} if made.first is not None else set()
                cuts = sorted({*run.at, *(p for r in readers for p in (*r.at, r.latest)), *ends} - {None, -1})
                for start, stop in zip(cuts, [*cuts[1:], cuts[-1] + 1] if cuts else (), strict=True):
                    if made.first is not None and start < made.first:
                        member = run.by(start)
                    elif start <= made.last:
                        continue  # counted with what backward reads
                    else:
                        member = self.wanted(run, made, start, partial(self.waits, position=start))
                    for key in self.keys(member):
                        yield key, made.nbytes, start, stop - 1

    def keys(self, member: Member | None) -> list[Key]:
        if member is None:
            return []
        kind, i = member
        if kind == "z":
            return [("z", i, 0)]
        choice = self.life.problem.reruns[i].choice
        return [("r", i, s) for s in range(len(self.life.problem.choices[choice].labels))]

    def calls(self) -> Iterator[tuple[int, Op, dict[Key, float]]]:
        """Position of backward, a call that is made again for it, and what lives during that call of all that is made again."""
        order = {name: i for i, name in enumerate(self.runs)}
        for p, runs in sorted(self.at.items()):
            names = {r.op.name for r in runs}
            alive = [
                (run, made)
                for run in self.runs.values()
                if run.at and run.at[0] <= p
                for made in run.made
                if made.last >= p or any(r in self.runs and self.runs[r].latest >= p for r in made.readers)
            ]
            lets_go = {max(mine, key=order.__getitem__) for _, made in alive if made.last < p and (mine := names & set(made.readers))}
            for run in runs:
                room = self.life.workspace_of(run.op)
                if room or run.op.name in lets_go:
                    yield p, run.op, self._during(p, run, order, alive, room)

    def _during(self, p: int, at: Run, order: dict[str, int], alive: list[tuple[Run, Made]], room: float) -> dict[Key, float]:
        live: dict[Key, float] = defaultdict(float)
        now = order[at.op.name]
        for run, made in alive:
            start = p if order[run.op.name] <= now else p - 1
            if made.first is not None and made.first < p <= made.last:
                continue  # counted with what backward reads
            if made.last >= p:
                member = run.by(start)
            else:
                member = self.wanted(run, made, start, lambda r: self.waits(r, p - 1 if order.get(r, -1) >= now else p))
            for key in self.keys(member):
                live[key] += made.nbytes
        ran = at.by(p)
        here = self.events.of([ran], no=at.surely_by(p - 1)) if room and ran is not None else None
        for key in self.keys(here):  # room is taken where it runs, not where it has run
            live[key] += room
        return dict(live)
