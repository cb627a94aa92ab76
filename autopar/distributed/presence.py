"""Which processes of a job are still there, asked when a collective has failed.

On one machine the system knows: ranks tell each other their process numbers when they first meet, and a process whose number is gone, or somebody
else's, has ended. Between machines only the job's store is left: a rank whose collective fails writes down that it is there. Both are needed on
one machine, too: a rank that was told of another's death ends as well, and a rank that ended after it wrote is not the one that was lost.

The store may be gone itself, or its host be stopped, and then it keeps to no timeout of its own: it is asked by a thread that nobody waits for in the end.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from autopar import _torch

T = TypeVar("T")
STORE_S = 3.0  # how long an answer of the store is waited for
GRACE_S = 5.0  # how long ranks have to say that they are there
ALONE_S = 1.0  # how long a rank waits with its error where the store does not answer
SETTLE_S = 0.3  # after the first that ended: others may have ended with it
PAUSE_S = 0.05


@dataclass(frozen=True)
class Process:
    """machine: the same for processes that see each other's numbers. started: tells a process from a later one of its number."""

    rank: int
    machine: str
    pid: int
    started: str


@dataclass(frozen=True)
class Missing:
    """ended: ranks whose process is gone, without a word. silent: that are there as far as can be known, and said nothing. store: whether it answered."""

    ended: tuple[int, ...]
    silent: tuple[int, ...]
    store: bool


def this_process() -> Process:
    pid, rank = os.getpid(), dist.get_rank() if dist.is_initialized() else 0
    return Process(rank, _machine(), pid, _life(pid)[1])


def _machine() -> str:
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return platform.node()


def _life(pid: int) -> tuple[str, str]:
    """(state, when it started) of a process, by /proc; ("", "") where there is none."""
    try:
        said = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return said[0], said[19]
    except (OSError, IndexError):
        return "", ""


def has_ended(p: Process) -> bool:
    """Whether it is known to have ended; one that its parent has not taken notice of yet has, too."""
    if p.machine != _machine():
        return False
    if p.started:
        state, started = _life(p.pid)
        return started != p.started or state in "ZX"
    try:
        os.kill(p.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


# ---- who is who --------------------------------------------------------------------------------------------------


_known: dict[int, Process] = {}
_of: list[Any] = [None]  # the default group under which they have their ranks


def know(processes: Iterable[Process]) -> None:
    """Ranks have told each other who they are. What this one wrote when it lost somebody in an earlier life of the store is taken back."""
    if not dist.is_initialized():
        return
    if _of[0] is not dist.group.WORLD:
        _known.clear()
        _of[0] = dist.group.WORLD
        asked(lambda store: store.delete_key(_key(dist.get_rank())))
    _known.update({p.rank: p for p in processes})


def forget() -> None:
    """Knows nobody any more, and holds no group."""
    _known.clear()
    _of[0] = None


def ended_ranks(ranks: Iterable[int]) -> list[int]:
    if _of[0] is not dist.group.WORLD:
        return []
    return [r for r in ranks if r in _known and has_ended(_known[r])]


# ---- the store ---------------------------------------------------------------------------------------------------


def within(seconds: float, work: Callable[[], T]) -> T | None:
    """What `work` returns; None where it raises, or takes longer."""
    out: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            out.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return out[0] if out else None


def asked(what: Callable[[Any], T]) -> T | None:
    """What the job's store answers; None where it cannot be had."""
    return within(STORE_S, lambda: what(_torch.default_store()))


def _key(rank: int) -> str:
    return f"autopar.lost.{rank}"


def missing(ranks: Sequence[int], where: str) -> Missing:
    """Who of `ranks` is not there, after a collective of theirs failed on this one. where: what this one was doing."""
    me = dist.get_rank()
    others = [r for r in ranks if r != me]

    def write(store: Any) -> bool:
        store.set(_key(me), where)
        return True

    def heard(store: Any) -> list[int]:
        return [r for r in others if store.check([_key(r)])]

    # Where the store does not answer, only those count that ended before others can have been told of the loss: these wait longer.
    early: tuple[int, ...] = ()
    begun = time.monotonic()
    while not early and time.monotonic() < begun + SETTLE_S:
        time.sleep(PAUSE_S)
        early = tuple(ended_ranks(others))
    answers = asked(write) is not None
    end, found = time.monotonic() + GRACE_S, False
    while answers and time.monotonic() < end:
        ended = ended_ranks(others)  # before the store is read: who ends of a loss has written so first
        wrote = asked(heard)
        if wrote is None:  # one that is gone does not come back
            answers = False
            break
        gone = tuple(r for r in ended if r not in wrote)
        silent = tuple(r for r in others if r not in ended and r not in wrote)
        if not gone and not silent:
            break
        if gone and not found:
            end, found = min(end, time.monotonic() + SETTLE_S), True
        time.sleep(PAUSE_S)
    if answers:
        return Missing(gone, silent, True)
    time.sleep(ALONE_S)
    return Missing(early, tuple(r for r in others if r not in early), False)
