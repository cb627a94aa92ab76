"""Activations in host memory: a bounded pool of buffers that are used again, because making and page-locking one is slow.

Sizes are rounded up to sixteenths of a power of two (waste below 1/16, or one page), and the smallest free buffer that fits is taken. A
buffer is free once every copy from or to it is done, which on CUDA is later than the moment when its tensor is given up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.offload.buffers import Buffer, pages
from autopar.offload.errors import OffloadError
from autopar.offload.medium import Counters, Medium
from autopar.offload.streams import Event, Streams, as_bytes, is_done


def size_class(nbytes: int) -> int:
    step = pages(max(1, (1 << nbytes.bit_length() - 1) // 16))
    return -(-nbytes // step) * step


@dataclass(eq=False)
class _Kept:
    nbytes: int
    buffer: Buffer | None  # None for no bytes
    source: Tensor | None = None  # what the copy reads, until it may go
    moved: Event | None = None
    fetches: list[Event] = field(default_factory=list)  # a copy back that may be running reads the buffer


@dataclass(eq=False)
class _Flight:
    out: Tensor | None
    done: Event | None


class _Pool:
    """Buffers of at most `limit_bytes` in all, free ones included. Its owner holds a lock."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        self.closed = False
        self._free: list[Buffer] = []
        self._busy: list[tuple[list[Event], Buffer]] = []  # given up, but a copy may still run

    def take(self, nbytes: int, pinned: bool) -> Buffer | None:
        """None if the limit does not allow it."""
        want = size_class(nbytes)
        self._collect(wait=False)
        buffer = self._best(nbytes, pinned)
        if buffer is None and self.reserved_bytes + want > self.limit_bytes:
            self._collect(wait=True)
            buffer = self._best(nbytes, pinned)
        while buffer is None and self._free and self.reserved_bytes + want > self.limit_bytes:
            self._drop(self._free.pop(0))
        for size in (want, pages(nbytes)):  # what just fits need not fail over its rounding
            if buffer is None and self.reserved_bytes + size <= self.limit_bytes:
                buffer = Buffer(size, pinned)
                self.reserved_bytes += size
        return buffer

    def give(self, buffer: Buffer, after: list[Event]) -> None:
        self._busy.append((after, buffer))
        self._collect(wait=self.closed)

    def close(self) -> None:
        self.closed = True
        self._collect(wait=True)

    def _best(self, nbytes: int, pinned: bool) -> Buffer | None:
        # One much larger would be missing when its own size comes again.
        fits = [b for b in self._free if b.pinned == pinned and nbytes <= b.nbytes <= pages(nbytes + nbytes // 4)]
        best = min(fits, key=lambda b: b.nbytes, default=None)
        if best is not None:
            self._free.remove(best)
        return best

    def _collect(self, wait: bool) -> None:
        busy, self._busy = self._busy, []
        for after, buffer in busy:
            if wait:
                for event in after:
                    event.synchronize()
            if all(is_done(event) for event in after):
                self._free.append(buffer)
            else:
                self._busy.append((after, buffer))
        while self.closed and self._free:
            self._drop(self._free.pop())

    def _drop(self, buffer: Buffer) -> None:
        self.reserved_bytes -= buffer.nbytes


class Host(Medium):
    def __init__(self, store: str, limit_bytes: int, streams: Streams) -> None:
        super().__init__()
        self._store, self._streams = store, streams
        self._pool = _Pool(limit_bytes)
        self._lingering: list[tuple[Event, Tensor]] = []  # device memory of copies that nobody waited for

    def send(self, x: Tensor) -> _Kept:
        kept = _Kept(x.numel() * x.element_size(), None)
        if not kept.nbytes:
            return kept
        with self.lock:
            self.sweep()
            kept.buffer = self._pool.take(kept.nbytes, x.is_cuda)
            if kept.buffer is None:
                raise OffloadError(
                    f"the limit of {self._pool.limit_bytes} bytes for activations in host memory does not allow {kept.nbytes} more: "
                    f"{self.in_use_bytes} are in use",
                    where=f"offload store {self._store!r}, host memory",
                    fix="raise host_bytes, or plan with less host memory; a loss kept after its step keeps its activations",
                )
            self.count(kept.nbytes)
            self.sent_bytes += kept.nbytes
        memory = kept.buffer.tensor[: kept.nbytes]
        try:
            kept.source = as_bytes(x)
            kept.moved = self._streams.copy(memory, kept.source, "out", [self._streams.ready(x.device)])
        except BaseException:
            self.forget(kept)  # there is no owner yet whose death would
            raise
        return kept

    def sent(self, kept: _Kept, device: torch.device) -> None:
        self._streams.hold_back(device, kept.moved)
        kept.source = None

    def fetch(self, kept: _Kept, out: Tensor) -> _Flight:
        if kept.buffer is None:
            return _Flight(None, None)
        memory = kept.buffer.tensor[: kept.nbytes]
        done = self._streams.copy(as_bytes(out), memory, "in", [self._streams.ready(out.device), kept.moved])
        if done is not None:
            kept.fetches.append(done)
        with self.lock:
            self.fetched_bytes += kept.nbytes
        return _Flight(out, done)

    def fetched(self, flight: _Flight) -> None:
        if flight.out is not None:
            self._streams.hold_back(flight.out.device, flight.done)
        flight.out = None

    def counters(self) -> Counters:
        with self.lock:
            self.sweep()
            return Counters(self.in_use_bytes, self.peak_bytes, self._pool.reserved_bytes, self.sent_bytes, self.fetched_bytes)

    def close(self) -> None:
        with self.lock:
            self.sweep()
            self._pool.close()

    def _release(self, thing: _Kept | _Flight) -> None:
        self._lingering = [(event, x) for event, x in self._lingering if not is_done(event)]
        if isinstance(thing, _Flight):
            if thing.out is not None and thing.done is not None:
                self._lingering.append((thing.done, thing.out))
            return
        if thing.source is not None and thing.moved is not None:
            self._lingering.append((thing.moved, thing.source))
        if thing.buffer is not None:
            self.in_use_bytes -= thing.nbytes
            self._pool.give(thing.buffer, [e for e in (thing.moved, *thing.fetches) if e is not None])
            thing.buffer = None
