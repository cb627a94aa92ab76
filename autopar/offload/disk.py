"""Activations in a file.

    send    device -> staging buffer -> file        the caller starts the first copy, a thread the second
    fetch   file -> a thread's buffer -> device     a thread does both

in chunks, so that the steps of one tensor overlap and staging has a bound. The caller takes the staging buffers: with all of them waiting
to be written, it waits for the disk, for `timeout_s` at most. Threads never wait for staging, or a reading thread could wait for a buffer
that is behind it in the queue. A read waits for the writes of its own chunk, which were queued before it and so are done or running.

Freed space is used again and the file never shrinks: steps are alike, and space that a filesystem already gave is faster to write.
"""

from __future__ import annotations

import errno
import time
import zlib
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from autopar.offload.buffers import Buffer, Buffers, pages
from autopar.offload.errors import OffloadError
from autopar.offload.files import Backend
from autopar.offload.medium import Counters, Medium
from autopar.offload.regions import Regions
from autopar.offload.streams import Event, Streams, as_bytes, is_done
from autopar.offload.workers import Workers

CHUNK_BYTES = 8 << 20
_CLOSE_S = 5.0  # how long closing waits for a read or write that runs


@dataclass(eq=False)
class _Kept:
    offset: int
    nbytes: int
    written: list[bool]  # by chunk
    checksums: list[int]
    jobs: int = 0  # reads and writes queued or running: the space is not free before they are done
    dropped: bool = False
    error: OffloadError | None = None
    source: Tensor | None = None  # what the copies to staging read, until it may go
    moved: Event | None = None


@dataclass(eq=False)
class _Flight:
    kept: _Kept
    out: Tensor | None  # flat, bytes
    device: torch.device
    ready: Event | None
    unread: int = 0
    error: OffloadError | None = None
    abandoned: bool = False


class Disk(Medium):
    def __init__(
        self, store: str, directory: str, file: Backend, streams: Streams, *, limit_bytes: int, staging_bytes: int, threads: int,
        timeout_s: float, checksum: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self._where = f"offload store {store!r}, a file in {directory}"
        self._file, self._streams, self._timeout_s, self._checksum = file, streams, timeout_s, checksum
        self._regions = Regions(limit_bytes)
        self._staging = Buffers(max(1, staging_bytes // CHUNK_BYTES), CHUNK_BYTES)
        self._reading = Buffers(threads, CHUNK_BYTES)  # one a thread: never waited for
        self._workers = Workers(threads, f"autopar-offload-{store}")
        self._failed: set[_Kept] = set()
        self._lingering: list[tuple[Event, Tensor]] = []
        self._closed = False
        self._sent_s = self._fetched_s = 0.0

    # ---- the caller's side -----------------------------------------------------------------------------------------

    def send(self, x: Tensor) -> _Kept:
        nbytes = x.numel() * x.element_size()
        starts = range(0, nbytes, CHUNK_BYTES)
        kept = _Kept(self._take(nbytes), nbytes, [False] * len(starts), [0] * len(starts))
        try:
            data = as_bytes(x)
            ready = self._streams.ready(x.device)
            for i, start in enumerate(starts):
                buffer = self._staging.take(x.is_cuda, self._timeout_s)
                if buffer is None:
                    raise self._slow(f"no staging buffer came free in {self._timeout_s:g} s")
                part = data[start : start + CHUNK_BYTES]
                kept.moved = self._streams.copy(buffer.tensor[: part.numel()], part, "out", [ready])
                with self.lock:
                    kept.jobs += 1
                self._workers.submit(partial(self._write, kept, i, buffer, kept.moved))
        except BaseException:
            self.forget(kept)  # there is no owner yet whose death would
            raise
        kept.source = data
        return kept

    def sent(self, kept: _Kept, device: torch.device) -> None:
        self._streams.hold_back(device, kept.moved)
        kept.source = None
        with self.lock:
            self.sweep()
            self._raise_failed()

    def fetch(self, kept: _Kept, out: Tensor) -> _Flight:
        chunks = len(kept.written)
        flight = _Flight(kept, as_bytes(out), out.device, self._streams.ready(out.device), chunks)
        with self.lock:
            kept.jobs += chunks
        for i in range(chunks):
            self._workers.submit(partial(self._read, flight, i))
        return flight

    def fetched(self, flight: _Flight) -> None:
        with self.lock:
            if not self.lock.wait_for(lambda: flight.error or not flight.unread, self._timeout_s):
                raise self._slow(f"{flight.kept.nbytes} bytes did not come back in {self._timeout_s:g} s")
            self.sweep()
            if flight.error:
                raise flight.error.again()
            self._raise_failed()

    def counters(self) -> Counters:
        with self.lock:
            self.sweep()
            return Counters(
                self.in_use_bytes, self.peak_bytes, self._regions.end, self.sent_bytes, self.fetched_bytes, self._sent_s, self._fetched_s
            )

    def close(self) -> None:
        self._closed = True
        # A thread that hangs in a write may come back and go on: by then the file's number could be another file's.
        if self._workers.close(min(_CLOSE_S, self._timeout_s)):
            self._file.close()

    def _take(self, nbytes: int) -> int:
        size = pages(nbytes)
        if not size:
            return 0
        with self.lock:
            self.sweep()
            offset = self._regions.allocate(size)
            if offset is None:
                raise OffloadError(
                    f"the limit of {self._regions.limit_bytes} bytes for activations on disk does not allow {nbytes} more: "
                    f"{self.in_use_bytes} are in use",
                    where=self._where,
                    fix="raise nvme_bytes, or plan with less of the disk; a loss kept after its step keeps its activations",
                )
            try:
                self._file.grow(offset + size)
            except Exception as e:
                self._regions.free(offset, size)
                raise self._fault(e, f"making room for {nbytes} bytes") from e
            self.count(nbytes)
        return offset

    def _raise_failed(self) -> None:
        """Data that somebody still counts on is lost: better told now than when it is wanted. The lock is held."""
        for kept in self._failed:
            assert kept.error is not None
            raise kept.error.again()

    def _release(self, thing: _Kept | _Flight) -> None:
        self._lingering = [(event, x) for event, x in self._lingering if not is_done(event)]
        if isinstance(thing, _Flight):
            thing.abandoned = True
            return
        thing.dropped = True
        self._failed.discard(thing)
        if thing.source is not None and thing.moved is not None:
            self._lingering.append((thing.moved, thing.source))
        self._vacate(thing)

    def _vacate(self, kept: _Kept) -> None:
        if kept.dropped and not kept.jobs and kept.nbytes:
            self._regions.free(kept.offset, pages(kept.nbytes))
            self.in_use_bytes -= kept.nbytes

    # ---- the threads' side -----------------------------------------------------------------------------------------

    def _part(self, kept: _Kept, i: int) -> tuple[int, int]:
        """(where chunk i begins in the tensor, its bytes)"""
        start = i * CHUNK_BYTES
        return start, min(CHUNK_BYTES, kept.nbytes - start)

    def _write(self, kept: _Kept, i: int, buffer: Buffer, moved: Event | None) -> None:
        start, n = self._part(kept, i)
        error, nbytes, seconds = None, 0, 0.0
        try:
            if moved is not None:
                moved.synchronize()
            self._assert_open()
            if not kept.dropped:
                if self._checksum:
                    kept.checksums[i] = zlib.crc32(buffer.array[:n].data)
                began = time.perf_counter()
                self._file.write(kept.offset + start, buffer.array[: pages(n)])
                nbytes, seconds = n, time.perf_counter() - began
        except Exception as e:
            error = self._fault(e, f"writing bytes {kept.offset + start} to {kept.offset + start + n}")
        self._staging.give(buffer)
        with self.lock:
            kept.jobs -= 1
            self._sent_s += seconds
            if error is None:
                kept.written[i] = True
                self.sent_bytes += nbytes
            elif not kept.dropped:
                kept.error = kept.error or error
                self._failed.add(kept)
            self._vacate(kept)
            self.lock.notify_all()

    def _read(self, flight: _Flight, i: int) -> None:
        kept, (start, n) = flight.kept, self._part(flight.kept, i)
        error, nbytes, seconds = None, 0, 0.0
        try:
            with self.lock:
                if not self.lock.wait_for(lambda: kept.written[i] or kept.error, self._timeout_s):
                    raise self._slow(f"{n} bytes were not written in {self._timeout_s:g} s")
            if kept.error is not None:
                raise kept.error.again()
            self._assert_open()
            if not (flight.abandoned or flight.error):
                nbytes, seconds = n, self._bring(flight, i, start, n)
        except Exception as e:
            error = self._fault(e, f"reading bytes {kept.offset + start} to {kept.offset + start + n}")
        with self.lock:
            kept.jobs -= 1
            flight.unread -= 1
            flight.error = flight.error or error
            self._fetched_s += seconds
            self.fetched_bytes += nbytes
            if not flight.unread:
                flight.out = None
            self._vacate(kept)
            self.lock.notify_all()

    def _bring(self, flight: _Flight, i: int, start: int, n: int) -> float:
        """Reads one chunk, checks it and copies it to its place; the seconds that the file took."""
        kept, out = flight.kept, flight.out
        assert out is not None
        buffer = self._reading.take(flight.device.type == "cuda", self._timeout_s)
        assert buffer is not None
        try:
            began = time.perf_counter()
            got = self._file.read(kept.offset + start, buffer.array[: pages(n)])
            seconds = time.perf_counter() - began
            if got < n:
                raise OffloadError(
                    f"the file has been truncated: {got} bytes of {n} at {kept.offset + start}",
                    where=self._where,
                    fix="run the step again; if it comes back, something else changes the file or the disk is failing",
                )
            if self._checksum and zlib.crc32(buffer.array[:n].data) != kept.checksums[i]:
                raise OffloadError(
                    f"wrong checksum: {n} bytes at {kept.offset + start} are not those that were written",
                    where=self._where,
                    fix="do not use this step's gradients; look for disk errors (dmesg, smartctl), use another nvme_directory",
                )
            done = self._streams.copy(out[start : start + n], buffer.tensor[:n], "in", [flight.ready])
            if done is not None:
                done.synchronize()  # then the buffer is free, and the data is there for whoever waits for `unread`
        finally:
            self._reading.give(buffer)
        return seconds

    # ---- faults ----------------------------------------------------------------------------------------------------

    def _assert_open(self) -> None:
        if self._closed:
            raise OffloadError(
                "the store was closed while data was on its way", where=self._where, fix="run backward before closing the model"
            )

    def _fault(self, e: Exception, doing: str) -> OffloadError:
        """What is told of an error; without a traceback, which would hold the tensors of a thread's frames."""
        if isinstance(e, OffloadError):
            return e.again()
        if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "free space there, set nvme_directory to a larger disk, or plan with a lower nvme_bytes"
            return OffloadError(f"the disk is full, {doing}", where=self._where, fix=fix)
        fix = "look at the disk (dmesg, smartctl), or set nvme_directory to another"
        return OffloadError(f"{type(e).__name__}: {e}, {doing}", where=self._where, fix=fix)

    def _slow(self, what: str) -> OffloadError:
        fix = "use a faster disk or another nvme_directory, plan with less traffic to it, or raise timeout_s"
        return OffloadError(f"the disk is too slow: {what}", where=self._where, fix=fix)
