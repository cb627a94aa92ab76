"""Activations sent away and brought back: bitwise, within limits, every fault told, nothing left behind."""

from __future__ import annotations

import errno
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autopar.errors import AutoparError
from autopar.offload import OffloadError, OffloadSettings, Store, close_store, find_store, open_store, ops
from autopar.offload.buffers import PAGE_BYTES
from autopar.offload.disk import CHUNK_BYTES, Disk
from autopar.offload.files import PREFIX, NamelessFile
from autopar.offload.host import Host, size_class
from autopar.offload.regions import Regions
from autopar.offload.streams import Streams
from autopar.offload.workers import Workers

MIB = 1 << 20
MEDIA = ["host", "nvme"]
Open = Callable[..., Store]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens the store "s" with generous limits, unless told otherwise."""

    def open_it(open_file: Any = NamelessFile, **settings: Any) -> Store:
        usual = {"host_bytes": 256 * MIB, "nvme_directory": str(tmp_path), "nvme_bytes": 256 * MIB, "threads": 2, "timeout_s": 30.0}
        return open_store("s", OffloadSettings(**{**usual, **settings}), open_file)

    yield open_it
    close_store("s")
    assert list(tmp_path.iterdir()) == []


def send(x: Tensor, medium: str) -> Tensor:
    return ops.offloaded(ops.offload(x, medium, "s"), x)


def fetch(handle: Tensor, like: Tensor) -> Tensor:
    return ops.reloaded(ops.reload(handle, like.shape, like.dtype, like.device), like.shape, like.dtype, like.device)


def in_use(store: Store, medium: str) -> int:
    """Once jobs that were running are done: they hold their region until then."""
    for _ in range(500):
        if not store.counters(medium).in_use_bytes:
            break
        time.sleep(0.01)
    return store.counters(medium).in_use_bytes


def noise(nbytes: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8))


def bits(x: Tensor) -> bytes:
    return x.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# ---- bitwise -------------------------------------------------------------------------------------------------------

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn,
]  # fmt: skip
CASES: dict[str, Callable[[], Tensor]] = {
    **{str(d).removeprefix("torch."): (lambda d=d: (noise(96) % 2 if d == torch.bool else noise(96)).view(d)) for d in DTYPES},
    "no dim": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(3, 0, 2),
    "transposed": lambda: noise(480).view(torch.float32).view(4, 5, 6).permute(2, 0, 1),
    "stepped": lambda: noise(480).view(torch.float32)[3::5],
    "expanded": lambda: noise(16).view(torch.float32)[:, None].expand(4, 3),
    "conjugate": lambda: noise(64).view(torch.complex64).conj(),
    "negative": lambda: noise(64).view(torch.complex64).conj().imag,
    "one page": lambda: noise(PAGE_BYTES),
    "one chunk": lambda: noise(CHUNK_BYTES),
    "three chunks": lambda: noise(2 * CHUNK_BYTES + 12345),
    "chunks, transposed": lambda: noise(2 * CHUNK_BYTES).view(torch.int16).view(2048, -1).t(),
}


@pytest.mark.parametrize("medium", MEDIA)
def test_what_comes_back_is_what_was_sent(opened: Open, medium: str) -> None:
    opened()
    for case, make in CASES.items():
        x = make()
        want, like = bits(x), x.clone(memory_format=torch.contiguous_format)
        handle = send(x, medium)
        x.untyped_storage().fill_(77)  # its memory is used for other things
        for _ in range(2):  # as backward run twice does
            got = fetch(handle, like)
            assert (got.shape, got.dtype, got.is_contiguous()) == (like.shape, like.dtype, True), case
            assert bits(got) == want, case
            got.untyped_storage().fill_(55)  # what was brought back is nobody else's


@pytest.mark.parametrize("medium", MEDIA)
def test_one_ticket_gives_a_tensor_of_its_own_every_time(opened: Open, medium: str) -> None:
    opened()
    x = noise(1000)
    ticket = ops.reload(send(x, medium), [1000], torch.uint8, x.device)  # the handle is gone: the ticket owns the data
    first, second = (ops.reloaded(ticket, [1000], torch.uint8, x.device) for _ in range(2))
    assert torch.equal(first, x) and torch.equal(second, x) and first.data_ptr() != second.data_ptr()


def test_a_worker_lets_go_of_a_job_that_is_done() -> None:
    class Job:
        def __call__(self) -> None:
            pass

    workers, job = Workers(1, "w"), Job()
    alive = weakref.ref(job)
    workers.submit(job)
    del job
    for _ in range(500):
        if alive() is None:
            break
        time.sleep(0.01)
    assert alive() is None
    assert workers.close(10)


def test_many_threads(opened: Open) -> None:
    store = opened(threads=3, staging_bytes=2 * CHUNK_BYTES)
    bad: list[object] = []

    def work(i: int) -> None:
        try:
            for k in range(8):
                xs = [noise(1000 * i + 77 * k + j) for j in range(6)]
                handles = [send(x, MEDIA[(i + j) % 2]) for j, x in enumerate(xs)]
                bad.extend((i, k, j) for j, x in reversed(list(enumerate(xs))) if not torch.equal(fetch(handles[j], x), x))
        except BaseException as e:
            bad.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not bad
    assert in_use(store, "host") == in_use(store, "nvme") == 0


# ---- space ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("medium", MEDIA)
def test_counters_are_the_bytes(opened: Open, medium: str) -> None:
    store = opened()
    a, b = noise(CHUNK_BYTES + 5), noise(1001)
    handles = [send(a, medium), send(b, medium)]
    assert store.counters(medium).in_use_bytes == a.nbytes + b.nbytes
    fetch(handles[0], a), fetch(handles[0], a), fetch(handles[1], b)
    del handles[0]
    c = store.counters(medium)
    assert (c.in_use_bytes, c.peak_bytes) == (b.nbytes, a.nbytes + b.nbytes)
    assert (c.sent_bytes, c.fetched_bytes) == (a.nbytes + b.nbytes, 2 * a.nbytes + b.nbytes)
    assert c.peak_bytes <= c.reserved_bytes <= c.peak_bytes * 17 / 16 + 2 * PAGE_BYTES
    if medium == "nvme":
        assert c.sent_s > 0 and c.fetched_s > 0
    other = store.counters(MEDIA[1 - MEDIA.index(medium)])
    assert other.sent_bytes == other.peak_bytes == 0


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("owner", ["ticket", "handle", "reload ticket", "view"])
def test_the_last_owner_returns_the_space(opened: Open, medium: str, owner: str) -> None:
    store = opened()
    x = noise(5000)
    t = ops.offload(x, medium, "s")
    if owner != "ticket":
        t = ops.offloaded(t, x)
    if owner == "reload ticket":
        t = ops.reload(t, [5000], torch.uint8, x.device)
    if owner == "view":
        t = t.view(1, 1)[0].detach()
    assert store.counters(medium).in_use_bytes == x.nbytes
    del t
    assert in_use(store, medium) == 0


class Double(torch.autograd.Function):
    """2 x sin(x), sin(x) waiting for backward elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, medium: str) -> Tensor:
        a = x.sin()
        handle = torch.ops.autopar.offloaded(torch.ops.autopar.offload(a, medium, "s"), a)
        ctx.save_for_backward(x, handle)
        return 2 * x * a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, handle = ctx.saved_tensors
        ticket = torch.ops.autopar.reload(handle, x.shape, x.dtype, x.device)
        a = torch.ops.autopar.reloaded(ticket, x.shape, x.dtype, x.device)
        return grad * 2 * (a + x * x.cos()), None


@pytest.mark.parametrize("medium", MEDIA)
def test_a_dropped_loss_and_a_second_backward(opened: Open, medium: str) -> None:
    store = opened()
    x = torch.linspace(-3, 3, 3000, requires_grad=True)
    loss = Double.apply(x, medium).sum()
    assert store.counters(medium).in_use_bytes == 12000
    del loss  # only autograd, in C++, had the handle
    assert in_use(store, medium) == 0
    loss = Double.apply(x, medium).sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once)
    torch.testing.assert_close(once, 2 * (x.sin() + x * x.cos()).detach())
    assert in_use(store, medium) == 0  # the graph is freed


@pytest.mark.parametrize("medium", MEDIA)
def test_a_handle_may_die_while_its_thread_holds_the_lock(opened: Open, medium: str) -> None:
    """As in a garbage collection that begins inside the store."""
    store = opened()
    handle = send(noise(100), medium)
    fetch(handle, noise(100))
    with store._media[medium].lock:
        del handle
    assert store.counters(medium).in_use_bytes == 0


@pytest.mark.parametrize("medium", MEDIA)
def test_limit(opened: Open, medium: str) -> None:
    store = opened(host_bytes=3 * MIB, nvme_bytes=3 * MIB)
    one, three, more = noise(MIB), noise(3 * MIB), noise(3 * MIB + 1)
    with pytest.raises(OffloadError, match="limit of 3145728 bytes"):
        send(more, medium)
    for _ in range(3):
        handles = [send(one, medium) for _ in range(3)]
        with pytest.raises(OffloadError, match=r"does not allow 1048576 more: 3145728 are in use") as e:
            send(one, medium)
        assert isinstance(e.value, AutoparError) and "'s'" in e.value.where and f"raise {medium}_bytes" in e.value.fix
        del e
        assert all(torch.equal(fetch(h, one), one) for h in handles)
        del handles
        assert in_use(store, medium) == 0
        handle = send(three, medium)  # what was kept free for smaller ones does not stand in the way
        assert torch.equal(fetch(handle, three), three)
        del handle
    assert store.counters(medium).reserved_bytes <= 3 * MIB


def test_host_buffers_are_used_again(opened: Open) -> None:
    store = opened()
    for nbytes in (100_000, 99_000, 101_000) * 3:
        x = noise(nbytes)
        assert torch.equal(fetch(send(x, "host"), x), x)
    assert store.counters("host").reserved_bytes == size_class(100_000) == size_class(101_000)


def test_what_just_fits_does_not_fail_over_its_rounding(opened: Open) -> None:
    x = noise(33 * PAGE_BYTES)
    assert size_class(x.nbytes) == 34 * PAGE_BYTES
    opened(host_bytes=x.nbytes)
    for _ in range(2):
        assert torch.equal(fetch(send(x, "host"), x), x)


@given(st.integers(1, 1 << 40))
def test_size_class(nbytes: int) -> None:
    c = size_class(nbytes)
    assert c % PAGE_BYTES == 0 and nbytes <= c < nbytes + max(nbytes / 16, PAGE_BYTES) + PAGE_BYTES and size_class(c) == c


def test_regions_never_overlap_and_lose_nothing() -> None:
    draw = random.Random(0)
    regions, taken = Regions(60), {}
    refused = 0
    for _ in range(3000):
        if taken and draw.random() < 0.5:
            offset = draw.choice(sorted(taken))
            regions.free(offset, taken.pop(offset))
            continue
        n = draw.randint(1, 30)
        offset = regions.allocate(n)
        gaps = zip([0, *(o + s for o, s in sorted(taken.items()))], [*sorted(taken), 60], strict=True)
        assert (offset is None) == all(b - a < n for a, b in gaps)  # refused only if there is no such gap
        if offset is None:
            refused += 1
            continue
        assert offset >= 0 and offset + n <= regions.end <= 60
        assert all(offset + n <= o or o + s <= offset for o, s in taken.items())
        taken[offset] = n
    assert refused > 300


# ---- copies that take their time -----------------------------------------------------------------------------------


class Later:
    """An event as CUDA's: nothing is copied before somebody waits for it."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action, self.done = action, False

    def synchronize(self) -> None:
        if not self.done:
            self.done = True
            self.action()

    def query(self) -> bool:
        return self.done


class LateStreams(Streams):
    """Copies as late as CUDA's may be: when the computation or a thread waits for them, each after what it has to come after."""

    def ready(self, device: torch.device) -> Any:
        return Later(lambda: None)

    def copy(self, to: Tensor, source: Tensor, way: Any, after: Any) -> Any:
        def action() -> None:
            for event in after:
                event.synchronize()
            to.copy_(source)

        return Later(action)

    def hold_back(self, device: torch.device, event: Any) -> None:
        if event is not None:
            event.synchronize()


@pytest.fixture(params=MEDIA)
def late(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host | Disk]:
    """A medium whose copies are late."""
    if request.param == "host":
        medium: Host | Disk = Host("s", 64 * MIB, LateStreams())
    else:
        limits = {"limit_bytes": 64 * MIB, "staging_bytes": 32 * MIB, "threads": 2, "timeout_s": 30.0, "checksum": True}
        medium = Disk("s", str(tmp_path), NamelessFile(str(tmp_path)), LateStreams(), **limits)
    yield medium
    medium.close()


def test_late_copies_are_waited_for(late: Host | Disk) -> None:
    x = noise(CHUNK_BYTES + 99)
    want = x.clone()
    kept = late.send(x)
    for after_offloaded in (False, True):
        if after_offloaded:
            late.sent(kept, x.device)
            x.fill_(77)
        out = torch.zeros_like(want)
        flight = late.fetch(kept, out)
        late.fetched(flight)
        assert torch.equal(out, want)
    late.forget(kept)


def test_memory_of_copies_that_nobody_waits_for_lives_as_long_as_they_run() -> None:
    """An error between issue and wait must not give a running copy's memory to somebody else."""
    host = Host("s", MIB, LateStreams())
    x, out = noise(100), noise(100)
    held = lambda: {t.data_ptr() for _, t in host._lingering}  # noqa: E731
    kept = host.send(x)
    flight = host.fetch(kept, out)
    host.forget(flight)
    host.forget(kept)
    assert held() == {x.data_ptr(), out.data_ptr()}
    flight.done.synchronize()
    host.forget(host.send(noise(100)))
    assert not held() & {x.data_ptr(), out.data_ptr()}


def test_a_buffer_is_not_used_again_while_a_copy_runs() -> None:
    host = Host("s", 3 * PAGE_BYTES, LateStreams())
    x = noise(PAGE_BYTES)
    first = host.send(x)
    host.sent(first, x.device)
    flight = host.fetch(first, torch.zeros_like(x))
    address = first.buffer.tensor.data_ptr()
    host.forget(first)  # the copy back still reads it
    second = host.send(x)
    assert second.buffer.tensor.data_ptr() != address and host.counters().reserved_bytes == 2 * PAGE_BYTES
    host.fetched(flight)
    assert host.send(x).buffer.tensor.data_ptr() == address
    third = host.send(x)
    host.forget(third)  # nobody waited for the copy away
    assert host.counters().in_use_bytes == 2 * PAGE_BYTES and not third.moved.query()
    assert host.send(x).buffer is not None and third.moved.query()  # at the limit it is waited for
    assert host.counters().reserved_bytes == 3 * PAGE_BYTES


# ---- faults --------------------------------------------------------------------------------------------------------


class Faulty(NamelessFile):
    """A file with something wrong: `fault` is what happens before a call of `on`; it may change the data that it gets."""

    on = ""

    def fault(self, data: Any = None) -> None:
        raise NotImplementedError

    def grow(self, size: int) -> None:
        if self.on == "grow":
            self.fault()
        super().grow(size)

    def write(self, offset: int, data: np.ndarray) -> None:
        if self.on == "write":
            self.fault(data)
        super().write(offset, data)

    def read(self, offset: int, data: np.ndarray) -> int:
        if self.on == "read":
            self.fault(data)
        got = super().read(offset, data)
        if self.on == "after read":
            self.fault(data)
        return got


def faulty(on: str, fault: Callable[..., None]) -> tuple[Callable[[str], Faulty], list[Faulty]]:
    """(what opens such a file, the files that it opened)"""
    files: list[Faulty] = []

    def open_file(directory: str) -> Faulty:
        files.append(type("Wrong", (Faulty,), {"on": on, "fault": lambda self, data=None: fault(data)})(directory))
        return files[-1]

    return open_file, files


def failing(code: int) -> Callable[..., None]:
    def fault(data: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fault


def told(e: OffloadError, directory: Path) -> bool:
    return bool(e.what and str(directory) in e.where and e.fix)


def test_no_space_for_a_tensor(opened: Open, tmp_path: Path) -> None:
    open_file, files = faulty("grow", failing(errno.ENOSPC))
    x = noise(100)
    store = opened(open_file, nvme_bytes=PAGE_BYTES)  # what failed takes no part of it
    with pytest.raises(OffloadError, match="the disk is full") as e:
        ops.offload(x, "nvme", "s")
    assert told(e.value, tmp_path) and store.counters("nvme").in_use_bytes == 0
    files[0].on = ""
    assert torch.equal(fetch(send(x, "nvme"), x), x)


@pytest.mark.parametrize(
    ("code", "what"), [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk is full"), (errno.EIO, "Input/output")]
)
def test_an_error_in_a_writing_thread_surfaces_at_the_next_wait(opened: Open, tmp_path: Path, code: int, what: str) -> None:
    open_file, files = faulty("write", failing(code))
    store = opened(open_file)
    x, y = noise(2 * CHUNK_BYTES), noise(100)
    ticket = ops.offload(x, "nvme", "s")
    load = ops.reload(ticket, x.shape, x.dtype, x.device)
    for _ in range(2):
        with pytest.raises(OffloadError, match=what) as e:
            ops.reloaded(load, x.shape, x.dtype, x.device)
        assert told(e.value, tmp_path)
    del load, e
    files[0].on = ""
    with pytest.raises(OffloadError, match=what):  # another tensor's wait tells it too
        send(y, "nvme")
    gc.collect()
    del ticket  # nobody counts on that data any more
    assert torch.equal(fetch(send(y, "nvme"), y), y)
    assert in_use(store, "nvme") == 0


def test_an_error_in_a_reading_thread(opened: Open, tmp_path: Path) -> None:
    open_file, files = faulty("read", failing(errno.EIO))
    opened(open_file)
    x = noise(2 * CHUNK_BYTES)
    handle = send(x, "nvme")
    with pytest.raises(OffloadError, match="Input/output") as e:
        fetch(handle, x)
    assert told(e.value, tmp_path)
    files[0].on = ""
    assert torch.equal(fetch(handle, x), x)


@pytest.mark.parametrize("left", [0, 100, PAGE_BYTES])
def test_truncated_file(opened: Open, tmp_path: Path, left: int) -> None:
    open_file, files = faulty("", failing(0))
    opened(open_file)
    x = noise(3 * PAGE_BYTES)
    handle = send(x, "nvme")
    assert torch.equal(fetch(handle, x), x)
    os.ftruncate(files[0].fd, left)
    with pytest.raises(OffloadError, match=f"truncated: {left} bytes of {x.nbytes}") as e:
        fetch(handle, x)
    assert told(e.value, tmp_path)


@pytest.mark.parametrize("byte", [0, 98])
def test_a_flipped_bit(opened: Open, tmp_path: Path, byte: int) -> None:
    def flip(data: np.ndarray) -> None:
        data[byte] ^= 4

    open_file, _ = faulty("after read", flip)
    opened(open_file)
    x = noise(99)
    handle = send(x, "nvme")
    with pytest.raises(OffloadError, match="wrong checksum") as e:
        fetch(handle, x)
    assert told(e.value, tmp_path)
    close_store("s")
    opened(open_file, checksum=False)
    assert (fetch(send(x, "nvme"), x) != x).sum() == 1  # it was the checksum that saw it


def test_another_tensors_bytes(opened: Open) -> None:
    open_file, files = faulty("", failing(0))
    opened(open_file)
    x, y = noise(PAGE_BYTES), noise(PAGE_BYTES) + 1
    a, b = send(x, "nvme"), send(y, "nvme")
    assert torch.equal(fetch(a, x), x) and torch.equal(fetch(b, y), y)
    os.pwritev(files[0].fd, [bits(y)], 0) if files[0].why_buffered else os.copy_file_range(
        files[0].fd, files[0].fd, PAGE_BYTES, PAGE_BYTES, 0
    )
    with pytest.raises(OffloadError, match="wrong checksum"):
        fetch(a, x)


@pytest.mark.parametrize(("on", "what"), [("write", "were not written|did not come back"), ("read", "did not come back")])
def test_a_slow_disk(opened: Open, tmp_path: Path, on: str, what: str) -> None:
    release = threading.Event()
    open_file, files = faulty(on, lambda data: release.wait(30) and None)
    opened(open_file, timeout_s=1.5)
    x = noise(100)
    handle = send(x, "nvme")
    began = time.monotonic()
    with pytest.raises(OffloadError, match=f"too slow: .*({what}) in 1.5 s") as e:
        fetch(handle, x)
    assert told(e.value, tmp_path) and time.monotonic() - began < 10
    files[0].on = ""
    release.set()
    assert torch.equal(fetch(handle, x), x)


def test_staging_is_bounded_and_waits_for_the_disk(opened: Open, tmp_path: Path) -> None:
    release = threading.Event()
    open_file, _ = faulty("write", lambda data: release.wait(30) and None)
    store = opened(open_file, timeout_s=1.5, staging_bytes=2 * CHUNK_BYTES)
    x = noise(3 * CHUNK_BYTES)
    with pytest.raises(OffloadError, match=r"too slow: no staging buffer came free in 1.5 s") as e:
        ops.offload(x, "nvme", "s")
    assert told(e.value, tmp_path)
    release.set()
    assert in_use(store, "nvme") == 0
    assert torch.equal(fetch(send(x, "nvme"), x), x)


def test_a_region_is_not_used_again_while_a_write_to_it_runs(opened: Open) -> None:
    release = threading.Event()
    open_file, files = faulty("write", lambda data: release.wait(30) and None)
    store = opened(open_file)
    x, y = noise(1000), noise(1001)
    dropped = ops.offload(x, "nvme", "s")
    while not store._media["nvme"]._workers._jobs.empty():
        time.sleep(0.01)
    del dropped
    files[0].on = ""
    handle = send(y, "nvme")
    assert store.counters("nvme").in_use_bytes == 2001
    assert torch.equal(fetch(handle, y), y)
    release.set()
    for _ in range(500):
        if store.counters("nvme").in_use_bytes == 1001:
            break
        time.sleep(0.01)
    assert store.counters("nvme").in_use_bytes == 1001
    assert torch.equal(fetch(handle, y), y)


def test_directories_that_will_not_do(opened: Open, tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="no such directory") as e:
        opened(nvme_directory=str(tmp_path / "none"))
    assert told(e.value, tmp_path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OffloadError, match="no such directory"):
        opened(nvme_directory=str(file))
    file.unlink()
    with pytest.raises(OffloadError, match="no file can be made there") as e:
        opened(nvme_directory="/proc")  # root may write anywhere else
    assert told(e.value, Path("/proc"))


def test_wrong_use(opened: Open) -> None:
    with pytest.raises(OffloadError, match="no offload store named 's'"):
        ops.offload(noise(8), "host", "s")
    store = opened(nvme_directory=None)
    assert find_store("s") is store
    with pytest.raises(OffloadError, match="open already"):
        opened()
    with pytest.raises(OffloadError, match="there is no 'nvme'"):
        ops.offload(noise(8), "nvme", "s")
    handle = send(noise(8), "host")
    with pytest.raises(OffloadError, match="stands for no load that is alive"):
        ops.reloaded(handle, [8], torch.uint8, handle.device)
    copy = handle.clone()
    assert torch.equal(fetch(copy, noise(8)), noise(8))
    close_store("s")
    with pytest.raises(OffloadError, match="store is closed"):
        fetch(handle, noise(8))
    del handle
    with pytest.raises(OffloadError, match="stands for no parcel that is alive"):
        fetch(copy, noise(8))


def test_a_filesystem_without_direct_access(opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autopar.offload"):
        assert opened().why_buffered == "" or caplog.records
        close_store("s")
        caplog.clear()
        monkeypatch.setattr(os, "O_DIRECT", 1 << 40)  # as little known as on a filesystem that knows no such flag
        monkeypatch.setattr("fcntl.fcntl", refuse_direct)
        store = opened()
        assert "O_DIRECT" in store.why_buffered and [r.args[1] for r in caplog.records] == [store.why_buffered]
    x = noise(CHUNK_BYTES + 1)
    assert torch.equal(fetch(send(x, "nvme"), x), x)
    assert len(caplog.records) == 1


def refuse_direct(fd: int, command: int, flags: int = 0) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return 0


# ---- nothing is left behind ----------------------------------------------------------------------------------------


class Named(NamelessFile):
    """On a filesystem that knows no files without a name."""

    def _open_nameless(self) -> int:
        raise OSError(errno.EOPNOTSUPP, "no")


def test_a_file_whose_name_is_removed(opened: Open, tmp_path: Path) -> None:
    opened(Named)
    x = noise(CHUNK_BYTES + 1)
    handle = send(x, "nvme")
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(fetch(handle, x), x)


def test_leftovers_of_the_dead_are_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    gone = tmp_path / f"{PREFIX}{dead.pid}-abc"
    stay = [tmp_path / f"{PREFIX}{os.getpid()}-abc", tmp_path / f"{PREFIX}notes", tmp_path / f"other-{dead.pid}-abc"]
    for f in (gone, *stay):
        f.touch()
    NamelessFile(str(tmp_path)).close()
    assert sorted(tmp_path.iterdir()) == sorted(stay)


def child(script: str, directory: Path, *, timeout_s: float = 60, code: int = 0) -> str:
    """Runs a script with `directory` and `Named` in a process of its own; what it printed."""
    start = """
        import errno, os, sys, time, torch
        from autopar.offload import OffloadError, OffloadSettings
        from autopar.offload.files import NamelessFile
        from autopar.offload.store import Store
        directory = sys.argv[1]
        class Named(NamelessFile):
            def _open_nameless(self):
                raise OSError(errno.EOPNOTSUPP, "no")
        def settings(**kw):
            return OffloadSettings(**{"host_bytes": 1 << 40, "nvme_directory": directory, "nvme_bytes": 1 << 40, "threads": 1, **kw})
        def send(store, x, medium="nvme"):
            parcel = store.offload(x, medium)
            store.offloaded(parcel, x)
            return parcel
        def fetch(store, parcel, x):
            return store.reloaded(store.reload(parcel, x.shape, x.dtype, x.device), x.shape, x.dtype, x.device)
    """
    text = textwrap.dedent(start) + textwrap.dedent(script)
    # Small blocks in freed large ones would make the heap grow, which is not what RLIMIT_DATA is to show.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", text, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=env)
    assert done.returncode == code, f"exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr and "terminate" not in done.stderr, done.stderr
    return done.stdout


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    script = """
        stores = [Store("a", settings()), Store("b", settings(), Named)]
        x = torch.ones(1 << 20)
        parcels = [send(s, x) for s in stores]
        assert all(torch.equal(fetch(s, p, x), x) for s, p in zip(stores, parcels))
        held = [os.readlink(f"/proc/self/fd/{s._media['nvme']._file.fd}") for s in stores]
        assert all(h.startswith(directory) and h.endswith("(deleted)") for h in held), held
        send(stores[0], torch.ones(1 << 22))
        print("ready", flush=True)
        os.kill(os.getpid(), 9)
    """
    assert child(script, tmp_path, code=-signal.SIGKILL) == "ready\n"
    assert list(tmp_path.iterdir()) == []


def test_more_than_the_process_may_have_in_memory(tmp_path: Path) -> None:
    """Under RLIMIT_DATA: 192 MiB pass through 64, on disk; in host memory they do not."""
    script = """
        import resource
        store = Store("a", settings(staging_bytes=16 << 20))
        data = lambda i: torch.arange(i, i + (1 << 20), dtype=torch.int64)
        assert torch.equal(fetch(store, send(store, data(0)), data(0)), data(0))
        now = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (now + (64 << 20),) * 2)
        parcels = [send(store, data(i)) for i in range(24)]
        assert store.counters("nvme").in_use_bytes == 192 << 20
        for i in reversed(range(24)):
            assert torch.equal(fetch(store, parcels.pop(), data(i)), data(i)), i
        x = data(0)
        try:
            parcels = [send(store, x, "host") for i in range(24)]
        except OffloadError as e:
            print(e)
    """
    assert "gives no" in child(script, tmp_path)


def test_the_interpreter_ends_with_a_disk_that_hangs(tmp_path: Path) -> None:
    """And a fork neither hangs nor uses what is not its own."""
    script = """
        from autopar.offload.registry import open_store
        from autopar.offload.tickets import ticket_of
        class Slow(NamelessFile):
            def write(self, offset, data):
                time.sleep(1000)
        store = open_store("s", settings(timeout_s=0.5), Slow)
        quick = Store("q", settings())
        x = torch.ones(100)
        parcel = send(quick, x)
        assert torch.equal(fetch(quick, parcel, x), x)
        pid = os.fork()
        if not pid:
            refused = 0
            for use in (lambda: send(quick, x), lambda: fetch(quick, parcel, x)):
                try:
                    use()
                except OffloadError as e:
                    refused += "fork" in str(e)
            del parcel
            sys.exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
        assert torch.equal(fetch(quick, parcel, x), x)  # the child took nothing away
        kept = [ticket_of(store.offload(x, medium)) for medium in ("nvme", "host")]
        print("end", time.time(), flush=True)
    """
    out = child(script, tmp_path)
    assert out.startswith("end") and time.time() - float(out.split()[1]) < 20
    assert list(tmp_path.iterdir()) == []


def test_a_fork_that_drops_a_buffer_unmaps_nothing_of_its_own(tmp_path: Path) -> None:
    """Maps that the child makes after the fork could lie where the parent's buffer was."""
    script = """
        import mmap
        from autopar.offload.buffers import Buffer
        buffers = [Buffer(1 << 20, False) for _ in range(4)]
        pid = os.fork()
        if not pid:
            mine = [mmap.mmap(-1, 1 << 20) for _ in range(8)]
            buffers.clear()
            for m in mine:
                m[:] = bytes(1 << 20)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    """
    child(script, tmp_path)


# ---- the ops -------------------------------------------------------------------------------------------------------


def test_ops_are_functional_and_their_fakes_true(opened: Open) -> None:
    opened()
    x = torch.randn(4, 6).t()
    args = (list(x.shape), x.dtype, x.device)
    for medium in MEDIA:
        ticket = ops.offload(x, medium, "s")
        handle = ops.offloaded(ticket, x)
        back = ops.reload(handle, *args)
        # The rest of the checks compares the tickets of two calls, and no two have the same number.
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(ops.offload, (x, medium, "s"), test_utils=checks)
        torch.library.opcheck(ops.offloaded, (ticket, x), test_utils=checks)
        torch.library.opcheck(ops.reload, (handle, *args), test_utils=checks)
        torch.library.opcheck(ops.reloaded, (back, *args))
    for op in (ops.offload, ops.offloaded, ops.reload, ops.reloaded):
        schema = op._opoverload._schema
        assert not schema.is_mutable and not any(a.alias_info for a in (*schema.arguments, *schema.returns))
    assert str(ops.reload._opoverload._schema).startswith("autopar::reload(Tensor handle, SymInt[] size, ScalarType dtype, Device device)")


def test_under_inductor(opened: Open) -> None:
    """Forward and backward as two graphs, the handle between them; bitwise what the same graphs give in eager."""
    store = opened()
    op = torch.ops.autopar

    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = x.sin()
        b = a.view(50, 100).t()
        ta, tb = op.offload(a, "nvme", "s"), op.offload(b, "host", "s")
        y = x * a
        return y, op.offloaded(ta, a), op.offloaded(tb, b)

    def backward(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ta, tb = op.reload(a, [5000], x.dtype, x.device), op.reload(b, [100, 50], x.dtype, x.device)
        return x * op.reloaded(ta, [5000], x.dtype, x.device) + op.reloaded(tb, [100, 50], x.dtype, x.device).t().reshape(-1)

    # Of numbers for which a product is exact, so that to fuse or not makes no difference.
    x = torch.tensor([0.5, 1.0, 2.0, -4.0]).repeat(1250)
    forward_c, backward_c = (torch.compile(f, backend="inductor", fullgraph=True) for f in (forward, backward))
    for _ in range(2):
        y, *handles = forward_c(x)
        assert all(store.counters(m).in_use_bytes == 20000 for m in MEDIA)
        a = fetch(handles[0], x)
        torch.testing.assert_close(a, x.sin())
        assert torch.equal(y, x * a) and torch.equal(fetch(handles[1], x.view(100, 50)), a.view(50, 100).t())
        for _ in range(2):
            assert torch.equal(backward_c(x, *handles), x * a + a)
        del handles
        assert in_use(store, "host") == in_use(store, "nvme") == 0
    assert all((c.sent_bytes, c.fetched_bytes) == (40000, 120000) for c in map(store.counters, MEDIA))
