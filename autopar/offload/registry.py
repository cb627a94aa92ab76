"""The stores of this process by name.

An op has only text and tensors for arguments, so a compiled graph knows its store by name, as a collective knows its process group. The
name is the same on every rank: graphs have one text on all of them.
"""

from __future__ import annotations

import atexit

from autopar.offload.errors import OffloadError
from autopar.offload.files import NamelessFile, Opener
from autopar.offload.store import OffloadSettings, Store

_STORES: dict[str, Store] = {}


def open_store(name: str, settings: OffloadSettings, open_file: Opener = NamelessFile) -> Store:
    if name in _STORES:
        raise OffloadError(f"an offload store named {name!r} is open already", fix="close it first, or use another name")
    _STORES[name] = Store(name, settings, open_file)
    return _STORES[name]


def next_number(prefix: str) -> int:
    """One more than the highest number under which a store is open in this process (`numbered`); ranks that share a name take the highest of theirs."""
    start = numbered(prefix, 0)[:-1]
    return 1 + max((int(n[len(start) :]) for n in _STORES if n.startswith(start) and n[len(start) :].isdigit()), default=-1)


def numbered(prefix: str, number: int) -> str:
    return f"{prefix}-{number}".replace(".", "-")


def find_store(name: str) -> Store:
    if name not in _STORES:
        raise OffloadError(f"no offload store named {name!r} is open", fix="open it before the step runs")
    return _STORES[name]


def close_store(name: str) -> None:
    """Closes the store; a name that is not open is no error."""
    if name in _STORES:
        _STORES.pop(name).close()


@atexit.register
def _close_all() -> None:
    for name in list(_STORES):
        close_store(name)
