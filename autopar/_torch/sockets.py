"""The connections of process groups, found in this process's table of open files and closed from outside.

gloo has no abort: `abort()`, `shutdown()` and `destroy_process_group()` wake nobody that waits in a collective, and destroying closes nothing while anybody holds the
group (torch 2.13, measured). A connection that is shut makes both its ends raise within milliseconds. Linux alone: by /proc/self/fd.

A connection is a group's where it came while the group was made (`noted`), or where its other end is another rank's (`note_between`).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator

Endpoint = tuple[str, int]

_watching = [False]
_noted: set[int] = set()  # of the groups that there are, by the number that the system has for each


def watch_sockets() -> None:
    """From here on the connections of groups that are made are noted."""
    _watching[0] = True


def forget_sockets() -> None:
    """Those noted so far are of groups that are gone."""
    _noted.clear()


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Around the making of a group. What other threads connect meanwhile is taken for its own."""
    if not _watching[0]:
        yield
        return
    before = set(_open())
    try:
        yield
    finally:
        _noted.update(set(_open()) - before)


def own_endpoints() -> list[Endpoint]:
    """This process's ends of its TCP connections."""
    return [here for here, _ in _connections().values()]


def note_between(others: Iterable[Endpoint]) -> None:
    """Connections whose other ends are `others`, which other ranks said are theirs, are groups'."""
    theirs = set(others)
    _noted.update(inode for inode, (_, there) in _connections().items() if there in theirs)


def shut_sockets() -> int:
    """Shuts all connections of groups, so that whoever waits on one, here or at its other end, raises. Returns how many."""
    count = 0
    for inode, descriptor in _open().items():
        if inode in _noted:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as s:
                s.getpeername()  # raises for one that listens: gloo's thread would abort the process where accept() fails
                s.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _open() -> dict[int, int]:
    """Sockets of this process: the system's number -> descriptor."""
    out: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                out[int(target[8:-1])] = int(name)
    return out


def _connections() -> dict[int, tuple[Endpoint, Endpoint]]:
    """The system's number -> both ends, of TCP connections."""
    out: dict[int, tuple[Endpoint, Endpoint]] = {}
    for inode, descriptor in _open().items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as s:
            if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                out[inode] = _endpoint(s.getsockname()), _endpoint(s.getpeername())
    return out


def _endpoint(name: tuple[str, int]) -> Endpoint:
    """An IPv4 address that an IPv6 socket has is one."""
    return name[0].removeprefix("::ffff:"), name[1]
