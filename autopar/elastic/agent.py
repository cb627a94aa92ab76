"""A node of a run other than the first: its agent starts workers there, says how they end, and ends those that are given up.

The supervisor (`autopar.elastic.supervisor`) runs on the first node and decides; agent and supervisor speak through the supervisor's store (`autopar.elastic.words`). A node is
lost with its agent: its workers, should any live on, are not waited for, and end when they ask for the next generation.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from autopar.elastic import words

POLL_S = 0.02
WITH_ITS_NODE = 1 << 16  # in place of an exit code: no process has it
FAREWELL_S = 5.0  # for agents to hear that the run is over


class Process(Protocol):
    """A worker's process; subprocess.Popen is one."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...


Start = Callable[[int, Mapping[str, str]], Process]  # (worker, what its environment says more) -> its process


@dataclass
class Agent:
    """start: starts a worker; size: how many there are to be; node: from 1; host, port: where the supervisor's store listens. tell: where its own words go."""

    start: Start
    size: int
    node: int
    host: str
    port: int
    tell: Callable[[str], None]
    arrive_s: float = 300.0
    processes: dict[int, Process] = field(default_factory=dict)
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    def run(self) -> int:
        """Returns when the run is over, with its exit status; 1 where the supervisor does not answer, once the workers here have ended."""
        try:
            # Whichever node is started first waits for the others.
            store: Any = dist.TCPStore(self.host, self.port, None, False, timedelta(seconds=self.arrive_s))
            store.set_timeout(timedelta(seconds=words.ANSWER_S))
            words.write(store, words.came(self.node), [self.size, self.name])
            return self._serve(store)
        except RuntimeError:  # the store's; a worker that cannot be started raises OSError
            self.tell(f"node {self.node}: the supervisor at {self.host}:{self.port} does not answer")
            while any(p.poll() is None for p in self.processes.values()):
                time.sleep(POLL_S)
            return 1
        finally:
            for p in self.processes.values():
                if p.poll() is None:
                    p.kill()

    def _serve(self, store: Any) -> int:
        beats, said = 0, set[int]()
        while True:
            beats += 1
            words.write(store, words.agent(self.name), beats)
            why = words.read(store, words.not_let_in(self.name))
            if why is not None:
                self.tell(f"node {self.node} is not let in: {why}")
                return 1
            asked = words.read(store, words.begin(self.name)) or {}
            for w in [w for w in asked if int(w) not in self.processes]:
                self.processes[int(w)] = self.start(int(w), asked[w])
            for w, p in self.processes.items():
                code = p.poll()
                if code is not None and w not in said:
                    words.write(store, words.ended(w), code)
                    said.add(w)
            for w in words.read(store, words.GIVEN_UP) or ():
                if w in self.processes and self.processes[w].poll() is None:
                    self.processes[w].kill()
            over = words.read(store, words.OVER)
            if over is not None:
                words.write(store, words.left(self.name), 1)
                return int(over)
            time.sleep(POLL_S)


def how_ended(code: int) -> str:
    if code == WITH_ITS_NODE:
        return "with its node, which gave no sign of life"
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"


class Node:
    """An agent as the supervisor knows it. name: its own; size: workers it has place for; silence_s: after so long without a sign of life the node is lost.

    begun: the environments of workers that it was told to start."""

    def __init__(self, store: Any, number: int, silence_s: float, size: int, name: str) -> None:
        self.store, self.number, self.silence_s, self.size, self.name = store, number, silence_s, size, name
        self.begun: dict[int, dict[str, str]] = {}
        self.beat: Any = None
        self.heard = time.monotonic()
        self.is_lost = False

    def begin(self, environments: Mapping[int, dict[str, str]]) -> dict[int, Process]:
        """Starts workers."""
        self.begun |= environments
        words.write(self.store, words.begin(self.name), self.begun)
        return {w: Remote(self, w) for w in environments}

    def look(self) -> None:
        beat = words.read(self.store, words.agent(self.name))
        if beat != self.beat:
            self.beat, self.heard = beat, time.monotonic()
        elif self.silent_s() > self.silence_s:
            self.is_lost = True

    def silent_s(self) -> float:
        return time.monotonic() - self.heard


class Remote:
    """A worker on another node, as the supervisor knows processes."""

    def __init__(self, node: Node, worker: int) -> None:
        self.node, self.worker = node, worker
        self.code: int | None = None

    @property
    def pid(self) -> int:
        return 0  # of another machine

    def poll(self) -> int | None:
        if self.code is None:
            self.code = words.read(self.node.store, words.ended(self.worker))
        return WITH_ITS_NODE if self.code is None and self.node.is_lost else self.code

    def kill(self) -> None:
        store = self.node.store
        words.write(store, words.GIVEN_UP, sorted({*(words.read(store, words.GIVEN_UP) or ()), self.worker}))
