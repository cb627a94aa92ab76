"""What stops one rank is said on the others too: why, where it can be known, or who is gone, and what was going on.

They only see a collective that fails or times out, long after and without a reason. So a rank that fails in a step leaves its error in the process group's
store, and a rank whose collective failed looks there. A rank that was killed, or hangs, leaves nothing: then ranks look who is missing (`presence`).
"""

from __future__ import annotations

import contextlib
import linecache
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from autopar import _torch
from autopar.distributed import presence
from autopar.distributed.groups import Groups
from autopar.distributed.last_checkpoint import last_checkpoint
from autopar.errors import AutoparError, LostRankError

LONGEST = 1500  # characters of an error that others see


class RankError(AutoparError):
    """Another rank failed in this step."""


@dataclass(frozen=True)
class Collective:
    """kind: as torch calls it; group: the name that graphs know its ranks by, "" for others; result: what the graph calls what it gives."""

    kind: str
    group: str = ""
    result: str = ""

    def __str__(self) -> str:
        axes = self.group.split(".", 2)[-1]  # after the prefix, of two parts
        return f"{self.kind} over {axes}" if axes else self.kind


def begin(groups: Groups) -> int:
    """The number of a step, the same on all ranks of a mesh: each module has groups of its own."""
    groups.steps += 1
    return groups.steps


_when_lost: list[Callable[[], None]] = []  # of an elastic run


def when_lost(do: Callable[[], None]) -> None:
    """From here on a rank whose collective fails does this at once, in place of looking who is missing: somebody else knows, and the others wait for this rank."""
    _when_lost[:] = [do]


@contextlib.contextmanager
def shared(groups: Groups, step: int, phase: str, finer: Callable[[Collective], str] | None = None) -> Iterator[None]:
    """Around what one step runs. step: of `begin`; finer: a better name of the phase, for the collective that failed."""
    if not groups.talks:
        yield
        return
    groups.bind()
    key = f"{groups.id}.failed.{step}"
    try:
        yield
    except Exception as e:
        if _when_lost and is_of_others(e):
            raise lost(e, phase, groups.ranks, finer) from e
        # The collectives' own errors are RuntimeErrors; what else fails is this rank's own.
        said = _said(key) if isinstance(e, RuntimeError) else None
        if said is not None:
            raise RankError(said, fix="see that rank's traceback") from e
        if is_of_others(e):
            raise lost(e, phase, groups.ranks, finer) from e
        text = f"rank {dist.get_rank()} failed in this step: {type(e).__name__}: {e}"[:LONGEST]
        presence.asked(lambda store: store.compare_set(key, "", text))
        raise


@contextlib.contextmanager
def during(phase: str, ranks: Sequence[int] | None = None) -> Iterator[None]:
    """Around what ranks (None: all) do together: a collective that others are to blame for raises LostRankError."""
    try:
        yield
    except Exception as e:
        if not is_of_others(e):
            raise
        raise lost(e, phase, range(dist.get_world_size()) if ranks is None else ranks) from e


def _said(key: str) -> str | None:
    """What another rank left."""
    return presence.asked(lambda store: str(store.get(key).decode()) if store.check([key]) else None)


# ---- a collective that failed ------------------------------------------------------------------------------------


def is_of_others(e: BaseException) -> bool:
    """Whether `e` is what a collective, or the store, says when another process is gone or does not answer."""
    return (
        isinstance(e, RuntimeError) and dist.is_initialized() and (isinstance(e, dist.DistError) or re.search(_THEIRS, str(e)) is not None)
    )


_THEIRS = r"gloo/|NCCL|nccl|Connection (closed|reset)|Broken pipe|[Tt]imed out|[Tt]imeout"
_LATE = r"[Tt]imed out|[Tt]imeout"


def lost(e: BaseException, phase: str, ranks: Sequence[int], finer: Callable[[Collective], str] | None = None) -> LostRankError:
    """The error of a rank whose collective failed with `e`, because others are gone or do not answer."""
    for do in _when_lost:
        do()
    collective = collective_of(e)
    if collective is not None and finer is not None:
        phase = finer(collective) or phase
    if _when_lost:
        return LostRankError(
            f"a rank is gone during {phase}", where=f"rank {dist.get_rank()}", fix="", phase=phase, collective=str(collective or "")
        )
    doing = phase if collective is None else f"{phase}, in {collective}"
    m = presence.missing(ranks, doing)
    late = re.search(_LATE, str(e)) is not None
    restart = f"start all ranks again, from {last_checkpoint()}"
    if m.ended:
        what = f"{_ranks(m.ended)} ended during {phase}"
        fix = f"see what ended {'it' if len(m.ended) == 1 else 'them'} (its log; the system's, where memory ran out), and {restart}"
        if not m.store:
            what += ", perhaps because of others: the job's store, which would say, does not answer"
    elif m.silent and m.store:
        what = f"{_ranks(m.silent)} did not answer during {phase}" + ("" if late else ", and a connection broke")
        fix = f"see what that rank is doing, or whether its machine is there; if it was only slow, pass a longer timeout= to init_process_group; {restart}"
    elif not m.store:
        gone = "a rank did not answer" if late else "a rank is gone"
        what = f"{gone} during {phase}; which one cannot be known, since the job's store does not answer: perhaps the one that keeps it"
        fix = f"see the logs of all ranks, first of the one that keeps the store (mostly rank 0), and {restart}"
    else:
        what = f"a collective failed on all ranks during {phase}, and no rank is missing"
        fix = f"see the error that this one was raised from, and the network; {restart}"
    where = f"rank {dist.get_rank()}" + (f", {collective}" if collective is not None else "")
    return LostRankError(what, where=where, fix=fix, phase=phase, collective=str(collective or ""), ended=m.ended, silent=m.silent)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


_CALL = re.compile(r"_c10d_functional\.(\w+)")
_INSIDE = re.compile(r"\bautopar\.(ring_attention|experts)(_backward)?_v\d+")  # operators that exchange rows inside
_OURS = re.compile(r"""['"](autopar\.[\w.+]+)['"]""")


def collective_of(e: BaseException) -> Collective | None:
    """The collective that raised `e`, by the lines of code that it came through: those of a graph, or torch's own functions."""
    found: Collective | None = None
    for frame, number in traceback.walk_tb(e.__traceback__):
        lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
        line = lines[number - 1] if 0 < number <= len(lines) else ""
        if (call := _CALL.search(line)) is not None:
            return _issued(lines[: number - 1], line) if call[1] == "wait_tensor" else _collective(line, call[1])
        if (op := _INSIDE.search(line)) is not None:
            return _collective(line, op[1] + (op[2] or ""))
        if frame.f_code is _torch.orderly.__code__ or frame.f_code is _torch.new_group.__code__:
            return Collective("the making of a group")
        if found is None and frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d":
            name = frame.f_code.co_name
            found = Collective(name) if name in dist.__dict__ else None
    return found


def _issued(before: list[str], line: str) -> Collective:
    """A graph waits in `line` for what an earlier line began."""
    waited = re.search(r"wait_tensor(?:\.default)?\((\w+)", line)
    if waited is not None:
        begins = re.compile(rf"\b{waited[1]}\b.*_c10d_functional\.|_c10d_functional\.\w+\(\W*{waited[1]}\b")
        for earlier in reversed(before):
            if begins.search(earlier) and (call := _CALL.search(earlier)) is not None and call[1] != "wait_tensor":
                return _collective(earlier, call[1], waited[1])
    return Collective("a collective")


def _collective(line: str, kind: str, result: str = "") -> Collective:
    group: Any = _OURS.search(line)
    return Collective(kind.rstrip("_"), group[1] if group else "", result)
