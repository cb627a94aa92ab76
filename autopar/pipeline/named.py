"""Schedules by name."""

from __future__ import annotations

import os

from autopar.errors import LayoutError
from autopar.pipeline.actions import Lists, load, verified
from autopar.pipeline.schedule import KINDS, Schedule
from autopar.pipeline.zero_bubble import dualpipev, zb_h1, zbv

INTERLEAVED = "interleaved"
ZERO_BUBBLE = {"zb-h1": zb_h1, "zbv": zbv, "dualpipev": dualpipev}
TWO = ("zbv", "dualpipev")  # of which a rank has two stages
NAMES = (*KINDS, *ZERO_BUBBLE)


def scheduled(schedule: str | os.PathLike[str] | Lists, ranks: int, micro_batches: int, virtual_stages: int | None = None) -> Lists:
    """What every rank does. schedule: a name, the path of a file in torch's notation (`.csv`), or the lists themselves; virtual_stages: stages a rank has, of "interleaved".

    Raises LayoutError for what is no schedule, or none of so many ranks and micro-batches."""
    if isinstance(schedule, Lists):
        return _fitting(verified(schedule), ranks, micro_batches)
    text = os.fspath(schedule)
    if text.endswith(".csv"):
        return _fitting(load(text), ranks, micro_batches)
    kind = text.lower().replace("_", "-")
    if kind not in NAMES:
        raise LayoutError(
            f"there is no pipeline schedule {text!r}",
            where="schedule=",
            fix=f"name one of {', '.join(NAMES)}, or the path of a .csv in torch's notation",
        )
    if virtual_stages is not None and (isinstance(virtual_stages, bool) or not isinstance(virtual_stages, int) or virtual_stages < 1):
        raise LayoutError(f"virtual_stages={virtual_stages!r} is no number of stages", fix='pass 2 or more with schedule="interleaved"')
    chunks = virtual_stages or (2 if kind == INTERLEAVED else 1)
    if kind != INTERLEAVED and virtual_stages is not None and chunks != (own := 2 if kind in TWO else 1):
        raise LayoutError(
            f"{kind} has {own} stage{'s' if own > 1 else ''} a rank, not {chunks}",
            where="virtual_stages=",
            fix='pass schedule="interleaved"',
        )
    if kind in ZERO_BUBBLE:
        return verified(ZERO_BUBBLE[kind](ranks, micro_batches))
    return verified(Schedule(kind, ranks, micro_batches, chunks).lists())


def _fitting(lists: Lists, ranks: int, micro_batches: int) -> Lists:
    if (len(lists.ranks), lists.micro_batches) != (ranks, micro_batches):
        raise LayoutError(
            f"the schedule is of {len(lists.ranks)} ranks and {lists.micro_batches} micro-batches, the pipeline has {ranks} and {micro_batches}",
            where="schedule=",
            fix=f"pass micro_batches={lists.micro_batches} and a mesh whose axis pp has {len(lists.ranks)} ranks, or another schedule",
        )
    return lists
