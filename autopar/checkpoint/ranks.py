"""What the ranks of a job do together around a checkpoint: what fails on one raises on all, so that none waits for one that has given up.

group: a process group of all ranks, None for the job's default one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from autopar.checkpoint.place import Place
from autopar.distributed import presence
from autopar.distributed.failures import is_of_others
from autopar.errors import CheckpointError

T = TypeVar("T")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def my_part(names: list[str]) -> list[str]:
    return names[rank() :: dist.get_world_size() if dist.is_initialized() else 1]


def gather(x: T, group: dist.ProcessGroup | None = None) -> list[T]:
    if not dist.is_initialized():
        return [x]
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, x, group=group)
    return out


def meet() -> None:
    """Ranks tell each other who they are, so that one that is killed can be named."""
    presence.know(gather(presence.this_process()))


def together(f: Callable[[], T], place: Place | Path | None = None, group: dist.ProcessGroup | None = None) -> T:
    """f(), on every rank; when it raises on one, all raise."""
    try:
        value, error = f(), None
    except (Exception, dcp.CheckpointException) as e:
        if is_of_others(e):
            raise
        error = e if isinstance(e, CheckpointError) else CheckpointError(f"{type(e).__name__}: {str(e)[:400]}", where=str(place or ""))
        error.__cause__ = None if error is e else e
    said = [e for e in gather(error and (error.what, error.where, error.fix), group) if e]
    if error:
        raise error
    if said:
        what, where, fix = said[0]
        raise CheckpointError(what, where=where, fix=fix)
    return value
