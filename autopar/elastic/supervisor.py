"""The supervisor of a run: it starts workers, sees who is gone, and tells those that are left.

It hosts the store that groups are made through, so that no worker's death takes it along. A loss is: a worker whose process has ended otherwise than well, at once; one that has
given no sign of life for `silence_s`, which is killed; one that is alive and does not come to a new group within `regroup_s` of its announcement, while others
wait, which is killed too; those of a node whose agent (`autopar.elastic.agent`) gives no sign of life, all at once. After each a generation begins: those that are left, in their order, renumbered from 0. A collective that failed without a loss begins one as well, with the same members; so do processes that join, with those (`autopar.elastic.growth`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from autopar.elastic import words
from autopar.elastic.agent import FAREWELL_S, Node, Process, Start, how_ended
from autopar.elastic.growth import Growth

POLL_S = 0.01
SETTLE_S = 0.03  # others may have ended with the first one
ALARM_S = 0.5  # after a failed collective, for a process to be seen to have ended
ALARMS = 3  # failures one after the other in which nobody was lost
LAST_WORDS_S = 10.0  # for workers to end by themselves once the run is stopped
SILENCE_S, REGROUP_S = 30.0, 60.0  # until the workers say theirs
NODE_SILENCE_S = 5.0  # an agent has nothing to do but to give signs of life
IN_DOUBT_S = 0.5  # a node that has been silent so long may be what a failed collective is due to


@dataclass
class Supervisor:
    """start: starts a worker; size: how many there are on this node; least: how many must be left; tell: where its own words go. host: where the store listens.

    nodes: how many there are, each of the others with an agent, which comes within `arrive_s`, and is lost after `node_silence_s` without a sign of life. rejoin: how often the place of a
    lost worker is filled again; where it is, a run begins without nodes that have not come within `arrive_s`, and they join when they come."""

    start: Start
    size: int
    least: int
    tell: Callable[[str], None]
    host: str = "127.0.0.1"
    port: int = 0
    nodes: int = 1
    arrive_s: float = 300.0
    node_silence_s: float = NODE_SILENCE_S
    rejoin: int = 0
    generation: int = 0
    members: list[int] = field(default_factory=list)
    lost: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store: Any = dist.TCPStore(self.host, self.port, None, True, wait_for_workers=False)
        self.port = self.store.port
        self.processes: dict[int, Process] = {}
        self.beats: dict[int, tuple[Any, float]] = {}
        self.alarmed: float | None = None
        self.alarms, self.whole_before = 0, 0
        self.announced = time.monotonic()
        self.places: list[int] = []  # by place, its node: as many as there may be ranks
        self.place_of: list[int] = []  # by worker
        self.others: dict[int, Node] = {}
        self.growth = Growth(self, 0)

    def run(self, limit_s: float | None = None) -> int:
        """Starts the workers, and returns when all have ended: 0 where all that are left have ended well. limit_s: after which everything is ended, with 1."""
        end = None if limit_s is None else time.monotonic() + limit_s
        code = 1
        try:
            if not self._begin():
                return code
            while any(self.processes[w].poll() is None for w in self.members):
                if end is not None and time.monotonic() > end:
                    self.tell(f"not done after {limit_s:.0f} s: ended")
                    return 1
                if not self._look():
                    return 1
                time.sleep(POLL_S)
            code = 0 if self._settled() else 1
            return code
        finally:
            self._end(code)

    def _begin(self) -> bool:
        """All nodes are here, and all workers are started; False where that is not to be."""
        sizes = self._sizes()
        if sizes is None:
            return False
        self.places = [k for k in range(self.nodes) for _ in range(sizes.get(k, self.size))]  # of one that has not come, as many as here
        self.place_of = [p for p, k in enumerate(self.places) if k in sizes]
        self.members = list(range(len(self.place_of)))
        if self.least > len(self.members):
            self.tell(f"the run needs {self.least} processes, and all nodes together have {len(self.members)}")
            return False
        self.growth = Growth(self, self.rejoin)
        words.write(self.store, words.NODES, [self.places[p] for p in self.place_of])
        self._announce()
        self.begin(self.members)
        return True

    def begin(self, workers: Iterable[int]) -> None:
        by_node: dict[int, dict[int, dict[str, str]]] = {}
        for w in workers:
            by_node.setdefault(self.places[self.place_of[w]], {})[w] = self.environment(w)
        for node, theirs in sorted(by_node.items(), reverse=True):  # here last
            self.processes |= self.others[node].begin(theirs) if node else {w: self.start(w, said) for w, said in theirs.items()}

    def _sizes(self) -> dict[int, int] | None:
        """Workers of each node; None where one has not come in time, and cannot come later."""
        begun = time.monotonic()
        sizes: dict[int, int] = {0: self.size}
        while len(sizes) < self.nodes:
            for k in range(1, self.nodes):
                came = words.read(self.store, words.came(k))
                if came is not None and k not in sizes:
                    sizes[k], self.others[k] = came[0], Node(self.store, k, self.node_silence_s, *came)
            missing = [k for k in range(self.nodes) if k not in sizes]
            if missing and time.monotonic() - begun > self.arrive_s:
                self.tell(f"node {', '.join(map(str, missing))} of {self.nodes} has not come within {self.arrive_s:g} s")
                if not self.rejoin:
                    return None
                break
            time.sleep(POLL_S)
        return sizes

    def environment(self, worker: int) -> dict[str, str]:
        """As torchrun's, whose store init_process_group() then takes, with the way to this supervisor. One that is to join is alone in a world of its own at first."""
        place, joins = self.place_of[worker], worker in self.growth.coming
        node = self.places[place]
        own = {words.FULL: str(len(self.places))} if self.rejoin else {}
        own |= {words.JOINS: "1"} if joins else {}
        return {
            "RANK": "0" if joins else str(worker), "WORLD_SIZE": "1" if joins else str(len(self.members)), "GROUP_RANK": str(node),
            "LOCAL_RANK": str(place - self.places.index(node)), "LOCAL_WORLD_SIZE": str(self.places.count(node)),
            "MASTER_ADDR": self.host, "MASTER_PORT": str(self.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(worker) if joins else "0",  # in whose name there are keys in the store
            words.STORE: f"{self.host}:{self.port}", words.WORKER: str(worker), words.PLACE: str(place), **own,
        }  # fmt: skip

    # ---- who is gone ---------------------------------------------------------------------------------------------

    def _look(self) -> bool:
        """One look at everybody; False where the run cannot go on."""
        silence_s, regroup_s = words.read(self.store, words.SETTINGS) or (SILENCE_S, REGROUP_S)
        for node in self.others.values():
            node.look()
        gone = self._ended()
        if not gone:
            gone = self._silent(silence_s)
        if not gone:
            gone = self._late(regroup_s)
        failures = self.store.add(words.failed(self.generation), 0)
        if gone:
            time.sleep(SETTLE_S)
            return self._go_on({**self._ended(), **gone})
        if failures and self.alarmed is None:
            self.alarmed = time.monotonic()
        is_doubtful = any(not n.is_lost and n.silent_s() > IN_DOUBT_S for n in self.others.values())
        if failures and self.alarmed is not None and time.monotonic() - self.alarmed > ALARM_S and not is_doubtful:
            return self._false_alarm()
        self.growth.look(silence_s)
        return True

    def _settled(self) -> bool:
        """All have ended: whether those that were still members did well, after the training too."""
        afterwards = {w: code for w in self.members if (code := self.processes[w].poll()) and self._done(w)}
        for w, code in afterwards.items():
            self.tell(f"worker {w} had trained to the end, and then ended {how_ended(code)}")
        return not self._ended() and not afterwards and bool(self.members)

    def _done(self, worker: int) -> bool:
        said = words.read(self.store, words.finished(worker))
        return said is not None and not said[1]

    def _ended(self) -> dict[int, str]:
        out = {}
        for w in self.members:
            code = self.processes[w].poll()
            if code is not None and code != 0 and not self._done(w):
                out[w] = f"ended {how_ended(code)}"
            elif code == 0 and not self._done(w) and len(self.beats) and any(self.processes[o].poll() is None for o in self.members):
                out[w] = "ended before it had trained to the end"
        return out

    def _silent(self, silence_s: float) -> dict[int, str]:
        out, now = {}, time.monotonic()
        for w in self.members:
            if self.processes[w].poll() is not None or self._done(w):
                continue
            beat = words.read(self.store, words.beat(w))
            if beat is None:
                continue
            last, heard = self.beats.get(w, (None, now))
            self.beats[w] = (beat, now if beat != last else heard)
            if now - self.beats[w][1] > silence_s:
                self.processes[w].kill()
                out[w] = f"gave no sign of life for {silence_s:g} s, and was killed"
        return out

    def _late(self, regroup_s: float) -> dict[int, str]:
        """Members that have not come to a generation which others wait in."""
        if not self.generation or time.monotonic() - self.announced <= regroup_s:
            return {}
        missing = [w for w in self.members if not self.store.check([words.here(self.generation, w)])]
        if not missing or len(missing) == len(self.members):
            return {}
        for w in missing:
            self.processes[w].kill()
        return dict.fromkeys(missing, f"did not come to the new group within {regroup_s:g} s, and was killed")

    # ---- what follows --------------------------------------------------------------------------------------------

    def _go_on(self, gone: Mapping[int, str]) -> bool:
        for w, why in gone.items():
            self.tell(f"worker {w} (rank {self.members.index(w)} of {len(self.members)}) is lost: {why}")
            self.lost.append((w, why))
        if any(not self.store.check([words.beat(w)]) for w in self.members):
            return self._stop(
                "a worker was lost before all had come to autopar.compile(elastic=...), so the others cannot go on without it"
            )
        members = [w for w in self.members if w not in gone]
        self.alarms = 0
        if len(members) < self.least:
            self.members = members
            return self._stop(
                f"{len(self.members)} of {len(self.places)} processes are left, and the run needs {self.least}"
                + "".join(f"; worker {w} {why}" for w, why in self.lost[-4:])
            )
        self.announce(members)
        self.tell(f"generation {self.generation} begins with {len(self.members)} processes: workers {', '.join(map(str, self.members))}")
        self.growth.lost(gone)
        return True

    def _false_alarm(self) -> bool:
        whole = sum(self.store.add(words.whole(g), 0) for g in range(1, self.generation + 1))
        self.alarms = self.alarms + 1 if whole == self.whole_before else 1
        self.whole_before = whole
        if self.alarms > ALARMS:
            return self._stop(f"collectives failed {self.alarms} times one after the other, and nobody is missing")
        self.announce(self.members)
        self.tell(
            f"a collective failed and nobody is missing: generation {self.generation} begins with the same {len(self.members)} processes"
        )
        return True

    def announce(self, members: list[int]) -> None:
        """The next generation begins, of these."""
        self.generation, self.members = self.generation + 1, members
        self._announce()

    def _announce(self) -> None:
        self.alarmed, self.announced = None, time.monotonic()
        words.write(self.store, words.generation(self.generation), self.members)
        words.write(self.store, words.LATEST, self.generation)

    def _stop(self, why: str) -> bool:
        self.tell(f"the run ends: {why}")
        words.write(self.store, words.STOPPED, why)
        end = time.monotonic() + (LAST_WORDS_S if self.store.check([words.SETTINGS]) else 0)  # whoever does not listen has nothing to say
        while time.monotonic() < end and any(p.poll() is None for p in self.processes.values()):
            time.sleep(POLL_S)
        return False

    def _end(self, code: int) -> None:
        if self.growth.coming:
            self.tell(f"the run is over, and worker {', '.join(map(str, self.growth.coming))} had not joined")
        for p in self.processes.values():
            if p.poll() is None:
                p.kill()
        words.write(self.store, words.OVER, code)
        end = time.monotonic() + FAREWELL_S
        while time.monotonic() < end and not all(n.is_lost or self.store.check([words.left(n.name)]) for n in self.others.values()):
            time.sleep(POLL_S)
        for p in self.processes.values():
            if isinstance(p, subprocess.Popen):
                p.wait()


def started(command: Sequence[str]) -> Start:
    """Workers that are processes of `command`."""

    def start(worker: int, environment: Mapping[str, str]) -> Process:
        more = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, *command], env={**os.environ, **more, **environment})

    return start
