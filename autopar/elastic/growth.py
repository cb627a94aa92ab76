"""Processes that join a run: where a worker was lost another is started, and a node's agent that comes later, or comes back, gets its workers.

A run has as many places as it may have ranks. A process that is to join has none of a member's duties until it is ready: it imports, captures and compiles beside the others' training
(`autopar.elastic.newcomer`). Then the supervisor says so to the members, who wait for each other after the step that all of them are in (`Session.step`), and there a
generation begins that has it. One that ends before that is nobody's loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from autopar.elastic import words
from autopar.elastic.agent import Node, Process, how_ended

TOGETHER_S = 10.0  # so long one that is ready waits for others that are on their way: each generation costs the members a pause
TWICE_S = 10.0  # so long an agent waits for one of the same node to be lost


class Supervised(Protocol):
    """What is asked of a supervisor. places: by place, its node; place_of: by worker."""

    store: Any
    members: list[int]
    generation: int
    processes: dict[int, Process]
    others: dict[int, Node]
    places: list[int]
    place_of: list[int]
    node_silence_s: float

    @property
    def tell(self) -> Callable[[str], None]: ...
    def begin(self, workers: Iterable[int]) -> None: ...
    def announce(self, members: list[int]) -> None: ...


@dataclass
class Coming:
    """A process on its way. beat: its last sign of life, and when it was heard; ready: since when it waits."""

    beat: tuple[Any, float] | None = None
    ready: float | None = None


class Growth:
    """times: how often each place may be filled again; of one that nobody had at first, once more."""

    def __init__(self, run: Supervised, times: int) -> None:
        self.run, self.times = run, times
        self.left = [times + (p not in run.place_of) for p in range(len(run.places))] if times else [0] * len(run.places)
        self.coming: dict[int, Coming] = {}
        self.said: Any = None
        self.asked_in = -1  # the generation that was last told of somebody who is ready
        self.refused: set[str] = set()
        self.waiting: dict[str, float] = {}  # agents of nodes that have one: since when

    # ---- who is started ------------------------------------------------------------------------------------------

    def fill(self, places: Iterable[int]) -> None:
        """Starts a worker in each of these places, which nobody has, where that may be."""
        run, workers = self.run, []
        for p in places:
            if self.left[p] > 0:
                self.left[p] -= 1
                workers.append(len(run.place_of))
                run.place_of.append(p)
                self.coming[workers[-1]] = Coming()
        if workers:
            words.write(run.store, words.NODES, [run.places[p] for p in run.place_of])
            run.begin(workers)
            run.tell(f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))} started, to join")

    def lost(self, workers: Iterable[int]) -> None:
        """Their places are to be filled; those of a lost node, when its agent comes back."""
        places = [self.run.place_of[w] for w in workers]
        self.fill(p for p in places if not (node := self.run.others.get(self.run.places[p])) or not node.is_lost)

    def _agents(self) -> None:
        """Nodes whose agent has come since the beginning, or since it was lost."""
        run = self.run
        for k in sorted(set(run.places) - {0}):
            came = words.read(run.store, words.came(k))
            node = run.others.get(k)
            if came is None or came[1] in self.refused or (node is not None and came[1] == node.name):
                continue
            size, name = came
            if node is not None and not node.is_lost:
                since = self.waiting.setdefault(name, time.monotonic())
                if time.monotonic() - since > run.node_silence_s + TWICE_S:
                    self._refuse(name, f"there is another agent of node {k}")
                continue
            if any(run.places[run.place_of[w]] == k for w in (*run.members, *self.coming)):
                continue  # who are about to be given up
            free = [p for p, n in enumerate(run.places) if n == k and self.left[p] > 0][:size]
            if not free:
                self._refuse(
                    name,
                    "the run lets nobody in that comes later, without --rejoin"
                    if not self.times
                    else f"it came back more than {self.times} times",
                )
                continue
            run.others[k] = Node(run.store, k, run.node_silence_s, size, name)
            run.tell(f"node {k} has come")
            self.fill(free)

    def _refuse(self, agent: str, why: str) -> None:
        self.refused.add(agent)
        words.write(self.run.store, words.not_let_in(agent), why)

    # ---- who joins -----------------------------------------------------------------------------------------------

    def look(self, silence_s: float) -> None:
        """One look at those on their way."""
        self._agents()
        run, now = self.run, time.monotonic()
        if not self.coming and self.asked_in != run.generation:
            return
        ended = {w: how for w, c in self.coming.items() if (how := self._ended(w, c, silence_s, now))}
        for w, how in ended.items():
            del self.coming[w]
            p, unfit = run.place_of[w], words.read(run.store, words.unfit(w))
            if unfit is not None:
                self.left[p] = 0  # another start would be another refusal
            run.tell(f"worker {w} has not joined: {how}{f'; {unfit}' if unfit else ''}")
        self.lost(ended)
        ready = {w: words.read(run.store, words.ready(w)) for w in self.coming}
        for w, c in self.coming.items():
            c.ready = None if ready[w] is None else now if c.ready is None else c.ready
        since = [c.ready for c in self.coming.values() if c.ready is not None]
        is_time = bool(since) and (len(since) == len(self.coming) or now - min(since) > TOGETHER_S)
        self._say(sorted({p for p in ready.values() if p is not None}) if is_time else [])
        if self.asked_in == run.generation:  # members may wait, if only for somebody who is gone by now
            self._let_in(ready)

    def _ended(self, worker: int, c: Coming, silence_s: float, now: float) -> str:
        run = self.run
        code = run.processes[worker].poll()
        if code is not None:
            return f"it ended {how_ended(code)}"
        beat = words.read(run.store, words.beat(worker))
        if beat is not None and (c.beat is None or c.beat[0] != beat):
            c.beat = beat, now
        if c.beat is not None and now - c.beat[1] > silence_s:
            run.processes[worker].kill()
            return f"it gave no sign of life for {silence_s:g} s, and was killed"
        return ""

    def _say(self, passes: list[int]) -> None:
        said = [self.run.generation, passes]
        if said != self.said:
            self.said = said
            words.write(self.run.store, words.READY, said)
        if passes:
            self.asked_in = self.run.generation

    def _let_in(self, ready: dict[int, int | None]) -> None:
        """Once all members wait between two steps."""
        run = self.run
        waits = [words.read(run.store, words.between(run.generation, w)) for w in run.members]
        if any(p is None for p in waits):
            return
        joined = [w for w, p in ready.items() if p == waits[0] and run.processes[w].poll() is None]
        for w in joined:
            del self.coming[w]
        run.announce(sorted([*run.members, *joined], key=lambda w: run.place_of[w]))
        run.tell(
            f"generation {run.generation} begins with {len(run.members)} processes: workers {', '.join(map(str, run.members))}, of which "
            f"{', '.join(map(str, joined)) or 'none'} joined"
        )
