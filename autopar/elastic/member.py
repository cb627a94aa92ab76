"""A worker's side of the supervisor: it says that it lives, and hears who is left.

Two connections to the supervisor's store: one of the main thread, one of a thread that beats and listens, since a connection answers one question at a time. What the
thread hears of a new generation it acts on at once: it shuts the old group's connections, so that whoever waits in a collective raises.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from autopar import _torch
from autopar.distributed import failures
from autopar.distributed.last_checkpoint import last_checkpoint
from autopar.elastic import words
from autopar.elastic.options import Elastic
from autopar.elastic.protocol import stride_over
from autopar.errors import AutoparError, LostRankError

PAUSE_S = 0.005
T = TypeVar("T")


class StoppedError(LostRankError):
    """The run cannot go on with those that are left."""


class SupersededError(RuntimeError):
    """A newer generation has begun while this one was being made."""


class Member:
    """This process among the members of a run, or one that is to join. generation: that it is in, or the last one that it heard of without being in it; members: of that, by
    rank. version: steps done, which it says with its signs of life; grows: whether processes may join."""

    def __init__(self, options: Elastic) -> None:
        where = os.environ.get(words.STORE)
        if where is None:
            raise AutoparError(
                "elastic= needs a supervisor that tells survivors who is left, and this process has none: torchrun ends all processes when one is lost",
                where="autopar.compile",
                fix="start the program with python -m autopar.run --nproc-per-node 4 train.py",
            )
        self.options, self.worker = options, int(os.environ[words.WORKER])
        host, _, port = where.rpartition(":")
        self.store, self.listens = (self._connect(host, int(port)) for _ in range(2))
        self.grows, self.version, self.wish = words.FULL in os.environ, 0, (-1, list[int]())
        self.generation = 0 if words.JOINS not in os.environ else int(words.read(self.store, words.LATEST))
        self.members = list(words.read(self.store, words.generation(self.generation)))
        self.nodes: list[int] = words.read(self.store, words.NODES)  # by worker
        self.is_supervised = True  # until the supervisor is found gone
        self.lock = threading.Lock()  # around what must not happen between looking at the generation and acting on it
        words.write(self.store, words.SETTINGS, [options.silence_s, options.regroup_s])
        _torch.watch_sockets()
        failures.when_lost(self.abort)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._live, name="autopar.elastic", daemon=True)
        self.thread.start()
        atexit.register(self._rest)

    def _rest(self) -> None:
        """Ends the thread while Python is still there: one that comes back from the store afterwards would end the process with an abort."""
        self.ended.set()
        self.thread.join(words.ANSWER_S)

    @staticmethod
    def _connect(host: str, port: int) -> Any:
        return dist.TCPStore(host, port, None, False, timedelta(seconds=words.ANSWER_S))

    def _live(self) -> None:
        pause = min(0.05, self.options.silence_s / 10)
        beats = 0
        while not self.ended.wait(pause):
            try:
                beats += 1
                words.write(self.listens, words.beat(self.worker), [beats, self.version])
                if self.grows:
                    self.wish = words.read(self.listens, words.READY) or self.wish
                latest = words.read(self.listens, words.LATEST)
                stopped = self.listens.check([words.STOPPED])
            except (RuntimeError, OSError):
                self._without_supervisor()
                return
            with self.lock:
                if stopped or latest > self.generation:
                    _torch.shut_sockets()

    def asks(self, ask: Callable[[], T], without: T) -> T:
        """What the supervisor's store says; `without` where it is gone. Training goes on then, and ends with the next loss."""
        try:
            return ask()
        except (RuntimeError, OSError):
            self._without_supervisor()
            return without

    def says(self, key: str, value: object) -> None:
        """To the supervisor, and through it to others; to nobody where it is gone."""
        self.asks(lambda: words.write(self.store, key, value), None)

    def _without_supervisor(self) -> None:
        with self.lock:
            if self.is_supervised and not self.ended.is_set():
                self.is_supervised = self.grows = False
                print(
                    f"autopar: worker {self.worker}: the supervisor does not answer. Training goes on, but a loss ends it now, and nobody can join; what hangs is ended by "
                    "the groups' timeout. Write a checkpoint soon",
                    file=sys.stderr,
                    flush=True,
                )

    @property
    def rank(self) -> int:
        return self.members.index(self.worker)

    @property
    def stride(self) -> int:
        """How far, in ranks, the partner of each member is."""
        return stride_over([self.nodes[w] for w in self.members])

    @property
    def is_superseded(self) -> bool:
        return self.asks(
            lambda: bool(words.read(self.store, words.LATEST) > self.generation) or bool(self.store.check([words.STOPPED])), False
        )

    def abort(self) -> None:
        """A collective failed here: the others shall not wait for this rank."""
        _torch.shut_sockets()
        with contextlib.suppress(RuntimeError, OSError):
            self.store.add(words.failed(self.generation), 1)

    def moves_on(self, patience_s: float) -> bool:
        """Whether a newer generation begins within so many seconds, which explains an error."""
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            if self.is_superseded:
                return True
            time.sleep(PAUSE_S)
        return False

    def asked_in(self, number: int) -> bool:
        """Whether somebody is ready to be let in, in this pass through the data."""
        generation, passes = self.wish
        return generation == self.generation and number in passes

    def stand(self, number: int) -> None:
        """Says that this member waits between two steps."""
        self.says(words.between(self.generation, self.worker), number)

    def is_let_in(self) -> bool:
        """Of one that is to join: whether there is a generation that has it. Raises StoppedError."""
        self.refuse_stopped()
        latest = words.read(self.store, words.LATEST)
        members = list(words.read(self.store, words.generation(latest)))
        if self.worker not in members:
            self.generation, self.members = latest, members
        return self.worker in members

    def refuse_stopped(self) -> None:
        if self.store.check([words.STOPPED]):
            raise StoppedError(
                words.read(self.store, words.STOPPED), where=f"worker {self.worker}", fix=f"start again, from {last_checkpoint()}"
            )

    def next(self, patience_s: float = 0.0) -> None:
        """Goes over to the newest generation, once there is one after this one, and all its members are here; newer ones that begin meanwhile are taken instead.

        patience_s: how long others may need until they wait for it, too, where nobody was lost. Raises StoppedError where the run ends, or goes on without this process."""
        end = time.monotonic() + patience_s + self.options.silence_s + self.options.regroup_s + words.ANSWER_S
        latest = self.generation
        while time.monotonic() < end:
            try:
                self.refuse_stopped()
                newest = words.read(self.store, words.LATEST)
                if newest > self.generation and newest != latest:
                    latest, members = newest, list(words.read(self.store, words.generation(newest)))
                    if self.worker not in members:
                        raise StoppedError(
                            f"the run goes on without this process, worker {self.worker}: it was given up",
                            fix="see the supervisor's output",
                        )
                    self.store.set(words.here(latest, self.worker), "1")
                if latest > self.generation and self.store.check([words.here(latest, w) for w in members]):
                    with self.lock:
                        _torch.leave_groups()
                        self.generation, self.members = latest, members
                    self.nodes = words.read(self.store, words.NODES)
                    return
            except (RuntimeError, OSError) as e:
                raise StoppedError(
                    "a process was lost, and the supervisor, which would say who is left, does not answer",
                    where=f"worker {self.worker}",
                    fix=f"start again, from {last_checkpoint()}",
                ) from e
            time.sleep(PAUSE_S)
        raise StoppedError(
            "a process was lost, and no new group came about",
            where=f"worker {self.worker}",
            fix=f"see the supervisor's output; start again, from {last_checkpoint()}",
        )

    def finish(self, passes: int) -> bool:
        """Says that this worker has done so many passes through the data, and waits for the others; False where a new generation begins instead. Bounded by `regroup_s`."""
        self.says(words.finished(self.worker), [passes, False])
        end = time.monotonic() + self.options.regroup_s
        while time.monotonic() < end and self.is_supervised:
            if all(self._passes(w)[0] >= passes for w in self.members):
                return True
            if self.is_superseded:
                self.goes_on(passes - 1)
                return False
            time.sleep(PAUSE_S)
        return True

    def goes_on(self, passes: int) -> None:
        """Says that this worker is not done, after so many passes: it is missed when it is gone."""
        self.says(words.finished(self.worker), [passes, True])

    def has_passed(self, passes: int) -> bool:
        """Whether any member is past so many passes through the data: then all have said that they had finished it."""
        return self.is_supervised and any(self._passes(w)[0] >= passes and self._passes(w)[1] for w in self.members)

    def _passes(self, worker: int) -> tuple[int, bool]:
        said = self.asks(lambda: words.read(self.store, words.finished(worker)), None)
        return (0, True) if said is None else (said[0], said[1])
