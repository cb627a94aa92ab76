"""A save that is written beside training: a thread with a process group of its own, and an error that is kept until somebody hears of it.

There is one at a time. The next save, or load, waits for it: both use the same folders, and a rank that fell behind would hold ever more copies.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from autopar import _torch
from autopar.text.log import log

_last: list[Saving] = []
_group: list[Any] = [None, None]  # the default group it was made under, and the group


class Saving:
    """A save that may still be written. Made by `autopar.checkpoint.save`; where that has waited, it is done."""

    def __init__(self, work: Callable[[], None] | None = None) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._heard = False
        self._thread = threading.Thread(target=self._run, name="autopar checkpoint")
        if work is not None:
            self._thread.start()

    def _run(self) -> None:
        try:
            assert self._work is not None
            self._work()
        except BaseException as e:  # DCP's own is no Exception
            self._error = e
        finally:
            self._work = None  # and with it the copies

    def done(self) -> bool:
        """Whether nothing is left to write, here; other ranks may be behind by a moment."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the checkpoint is whole. Raises what the write raised (CheckpointError, LostRankError), on every rank."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            self._heard = True
            raise self._error


def start(work: Callable[[], None]) -> Saving:
    saving = Saving(work)
    _last[:] = [saving]
    return saving


def settle() -> None:
    """The save before is done. Raises its error, unless `wait` did."""
    for saving in _last:
        _last.clear()
        if saving._thread.ident is not None:
            saving._thread.join()
        if not saving._heard:
            saving.wait()


def staged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of this rank's shards in host memory."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        out: Any = stager.stage(dict(tensors))
        return dict(out)
    finally:
        stager.close()


def group(name: str) -> Any:
    """A gloo group of all ranks, for what is written meanwhile; None without processes. Collective on first use under a default group; name: the same on all
    ranks, and new."""
    if not dist.is_initialized():
        return None
    if _group[0] is not dist.group.WORLD:
        _group[:] = [dist.group.WORLD, _torch.new_group(list(range(dist.get_world_size())), f"{name}.checkpoint", None, "gloo")]
    return _group[1]


@atexit.register
def _say() -> None:
    for saving in _last:
        if saving.done() and saving._error is not None and not saving._heard:
            log.error("a checkpoint was not saved, and nobody asked: %s", saving._error)
