"""What a run is to survive."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import AutoparError


@dataclass(frozen=True)
class Elastic:
    """Training that goes on when processes are lost; pass it to `autopar.compile(elastic=...)` of a program that `python -m autopar.run` started.

    every: after so many steps each a shard is copied to its partner; the steps since then are done again after a loss, with the batches that were kept for that.
    survive: how many processes may be lost in the course of a run. Their sizes are laid out, and their steps compiled, before the first one is lost.
    silence_s: after so many seconds without a sign of life a process is ended, and counts as lost. A compiler may hold Python's lock for some.
    regroup_s: so long the others wait for one that is alive, and does not come to the new group.

    Raises AutoparError for numbers that mean nothing.
    """

    survive: int = 1
    silence_s: float = 30.0
    regroup_s: float = 60.0
    every: int = 1

    def __post_init__(self) -> None:
        for name in ("survive", "every"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int) or given < 1:
                raise AutoparError(f"{name}={given!r}", where="autopar.Elastic", fix="give a whole number from 1, or leave elastic= out")
        for name in ("silence_s", "regroup_s"):
            if not getattr(self, name) > 0:
                raise AutoparError(f"{name}={getattr(self, name)!r}", where="autopar.Elastic", fix="give a number of seconds above 0")
