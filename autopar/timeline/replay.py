"""Replays calls on streams: when each runs, how long compute waits for communication, how much memory lives. Torch-free.

Streams are "compute", the links ("intra" and "inter" a node) and the copies to and from the host ("d2h", "h2d"). Calls are issued in
program order, as a training process does:

    on compute         it starts when compute is free and everything it reads is there; the gap is exposed communication
    on another stream  it starts when compute has reached the point of issue, its stream is free and what it reads is there

A wait is a call of no length on compute that reads what was sent. Several ranks need no several replays: they run one text.

Memory is counted in program order, as a caching allocator's is: a call's result is there from its issue, and free for the next call behind its
last use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COMPUTE = "compute"
STREAMS = (COMPUTE, "intra", "inter", "d2h", "h2d", "nvme_write", "nvme_read")


@dataclass(frozen=True)
class Record:
    """One call. inputs: names of earlier records; alloc_bytes: of its result; free_bytes: of what nothing reads any more behind it."""

    name: str
    stream: str
    seconds: float
    inputs: tuple[str, ...] = ()
    alloc_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True)
class Span:
    """When a record ran. waited_s: how long compute stood idle before it."""

    name: str
    stream: str
    start_s: float
    end_s: float
    waited_s: float = 0.0


@dataclass(frozen=True)
class Replay:
    """seconds: until the last stream is done; busy_s: by stream; exposed_s: compute idle for what other streams do, to the end;
    peak_bytes: most memory at once, at the record `peak_at`; end_bytes: what is left."""

    seconds: float
    busy_s: Mapping[str, float]
    exposed_s: float
    peak_bytes: int
    peak_at: str
    end_bytes: int
    timeline: tuple[Span, ...]


def replay(records: Sequence[Record], start_bytes: int = 0) -> Replay:
    """start_bytes: what is alive before the first record."""
    free: dict[str, float] = dict.fromkeys(STREAMS, 0.0)
    busy: dict[str, float] = dict.fromkeys(STREAMS, 0.0)
    done: dict[str, float] = {}
    spans = []
    exposed = 0.0
    live = peak = start_bytes
    peak_at = ""
    for r in records:
        ready = max((done[i] for i in r.inputs), default=0.0)
        start = max(free[r.stream], free[COMPUTE], ready)
        waited = start - free[COMPUTE] if r.stream == COMPUTE else 0.0
        exposed += waited
        end = start + r.seconds
        free[r.stream] = done[r.name] = end
        busy[r.stream] += r.seconds
        spans.append(Span(r.name, r.stream, start, end, waited))
        live += r.alloc_bytes
        if live > peak:
            peak, peak_at = live, r.name
        live -= r.free_bytes
    total = max(free.values())
    return Replay(total, busy, exposed + total - free[COMPUTE], peak, peak_at, live, tuple(spans))
