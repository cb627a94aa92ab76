"""What stops one rank in the middle of a step is said on the others too.

They only see a collective that fails or times out, long after and without a reason. So a rank leaves its error in the process group's store, and a rank
whose collective failed looks there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from autopar import _torch
from autopar.errors import AutoparError
from autopar.groups import Groups

LONGEST = 1500  # characters of an error that others see


class RankError(AutoparError):
    """Another rank failed in this step."""


def begin(groups: Groups) -> int:
    """The number of a step, the same on all ranks of a mesh: each module has groups of its own."""
    groups.steps += 1
    return groups.steps


@contextlib.contextmanager
def shared(groups: Groups, step: int) -> Iterator[None]:
    """Around what one step runs. step: of `begin`."""
    if len(groups.ranks) == 1:
        yield
        return
    groups.bind()
    key = f"{groups.id}.failed.{step}"
    try:
        yield
    except Exception as e:
        # The collectives' own errors are RuntimeErrors; what else fails is this rank's own.
        said = _said(key) if isinstance(e, RuntimeError) else None
        if said is not None:
            raise RankError(said, fix="see that rank's traceback") from e
        _leave(key, e)
        raise


def _leave(key: str, e: Exception) -> None:
    with contextlib.suppress(Exception):  # a store that is gone: the group ends anyway
        _torch.default_store().compare_set(key, "", f"rank {dist.get_rank()} failed in this step: {type(e).__name__}: {e}"[:LONGEST])


def _said(key: str) -> str | None:
    """What another rank left."""
    with contextlib.suppress(Exception):
        store = _torch.default_store()
        if store.check([key]):
            return str(store.get(key).decode())
    return None
