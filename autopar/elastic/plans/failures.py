"""When nodes or devices fail: drawn, or from a file.

A failure hits a place of the run: node 5 of 128, whatever machine stands there. What is lost is repaired for a while, and whether the place is filled again meanwhile is up to who
lives with it. A place that is empty when it is hit loses nothing. Lifetimes that are drawn have no memory, so this is the same as machines that fail while they are used, and all ways to
live with failures see the same ones. Machines that stand by do not fail.

A file is CSV with the header `hours,node` or `hours,device`, or one of these and `repair_hours`: from the start, in order of time; a number from 0.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

from autopar.errors import AutoparError
from autopar.text.strict_json import short

MAX_FAILURES = 1_000_000
MAX_LINE = 200  # characters


@dataclass(frozen=True)
class Failure:
    """time_s: from the start; unit: the place that is hit; repair_s: until what stood there can be used again, inf for never."""

    time_s: float
    unit: int
    repair_s: float


def poisson(units: int, mtbf_s: float, repair_s: float, end_s: float, seed: int) -> tuple[Failure, ...]:
    """mtbf_s: mean time between failures of one unit. All places together: exponential times with mean mtbf_s / units, each hits one of them at random.

    Raises AutoparError for numbers that cannot be, and more than a million failures.
    """
    for name, x in (("time between failures", mtbf_s), ("time that is simulated", end_s)):
        if not (math.isfinite(x) and x > 0):
            raise AutoparError(f"the {name} is {x!r} s", where="failures", fix="give a positive number")
    _repairable(repair_s)
    if units < 1:
        raise AutoparError(f"failures of {units} units", where="failures", fix="give a cluster")
    if end_s * units / mtbf_s > MAX_FAILURES / 2:
        raise AutoparError(
            f"about {end_s * units / mtbf_s:.3g} failures are more than can be replayed",
            where="failures",
            fix="give fewer days, or more time between failures",
        )
    rng = random.Random(seed)
    found: list[Failure] = []
    at = rng.expovariate(units / mtbf_s)
    while at < end_s and len(found) < MAX_FAILURES:
        found.append(Failure(at, rng.randrange(units), repair_s))
        at += rng.expovariate(units / mtbf_s)
    return tuple(found)


def read(path: str | Path, units: int, unit: str, repair_s: float) -> tuple[Failure, ...]:
    """repair_s: where the file does not say. Raises AutoparError with the line that is wrong."""
    _repairable(repair_s)
    where = short(str(path), 200)
    found: list[Failure] = []
    try:
        with Path(path).open(newline="", encoding="utf-8") as f:
            head = [c.strip() for c in f.readline(MAX_LINE).split(",")]
            if head not in (["hours", unit], ["hours", unit, "repair_hours"]):
                fix = f"begin with the line hours,{unit} or hours,{unit},repair_hours"
                raise AutoparError("the trace has another header", where=where, fix=fix)
            for i, line in enumerate(iter(lambda: f.readline(MAX_LINE), ""), 2):
                if line.strip():
                    found.append(_failure(line, f"{where}, line {i}", len(head), units, unit, repair_s))
                if len(found) > 1 and found[-1].time_s < found[-2].time_s:
                    fix = "put the lines in order of time"
                    raise AutoparError(f"the trace goes back from {found[-2].time_s / 3600:g} h", where=f"{where}, line {i}", fix=fix)
                if i > MAX_FAILURES:
                    raise AutoparError("the trace has more than a million lines", where=where, fix="give a shorter one")
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise AutoparError(f"the trace cannot be read: {e}", where=where, fix="name a CSV file") from None
    return tuple(found)


def most_away(failures: tuple[Failure, ...], end_s: float) -> int:
    """Units that are in repair at once at most, where nothing stands by."""
    away: set[int] = set()
    back: list[tuple[float, int]] = []
    most = 0
    for f in _until(failures, end_s):
        while back and back[0][0] <= f.time_s:
            away.discard(heappop(back)[1])
        if f.unit not in away:
            away.add(f.unit)
            heappush(back, (f.time_s + f.repair_s, f.unit))
        most = max(most, len(away))
    return most


def _until(failures: tuple[Failure, ...], end_s: float) -> Iterator[Failure]:
    return (f for f in failures if f.time_s < end_s)


def _repairable(repair_s: float) -> None:
    if not repair_s > 0:
        raise AutoparError(f"a repair of {repair_s!r} s", where="failures", fix="give a positive number, or inf for never")


def _failure(line: str, where: str, columns: int, units: int, unit: str, repair_s: float) -> Failure:
    row = next(csv.reader([line.strip()]))
    try:
        hours, place = float(row[0]), int(row[1])
        again_s = float(row[2]) * 3600 if len(row) > 2 else repair_s
        if len(row) != columns or not 0 <= hours < math.inf or not again_s > 0:
            raise ValueError
    except (ValueError, IndexError):
        fix = f"write hours from the start, the number of a {unit}{', and hours of repair' if columns > 2 else ''}"
        raise AutoparError(f"no failure: {short(line.strip())!r}", where=where, fix=fix) from None
    if not 0 <= place < units:
        raise AutoparError(
            f"there is no {unit} {place}", where=where, fix=f"number them from 0 to {units - 1}, or give the cluster that the trace is of"
        )
    return Failure(hours * 3600, place, again_s)
