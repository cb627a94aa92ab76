"""A timeline as trace-event JSON (Chrome's format, which Perfetto reads): one track a resource, one complete event ("X") a call, counters ("C") of memory.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: `ts` and `dur` are microseconds; events of one track must nest or lie one behind the
other. Times are rounded to nanoseconds before they are subtracted, so that neighbours meet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.timeline.expand import Event, Timeline
from autopar.timeline.profile import KINDS
from autopar.timeline.replay import COMPUTE

PROCESS = 1
LINKS = {
    "intra": "links in a node", "inter": "network", "d2h": "device to host", "h2d": "host to device", "nvme_write": "writes to disk", "nvme_read": "reads from disk",
}  # fmt: skip
Said = Callable[[Iterable[str]], str]


def track(event: Event, said: Said) -> str:
    """The resource an event is on: "compute", the mesh axes of a collective and the link they go over, or a link to the host or a disk."""
    w = event.what
    if w.stream == COMPUTE or event.slowdown:
        return COMPUTE
    return f"{said(w.axes)} ({LINKS.get(w.stream, w.stream)})" if w.axes else LINKS.get(w.stream, w.stream)


def trace(timeline: Timeline, title: str, said: Said = " x ".join) -> dict[str, Any]:
    """The document. said: axes of the refined mesh as the user's."""
    tracks: dict[str, int] = {COMPUTE: 1}
    events: list[dict[str, Any]] = []
    for e in timeline.events:
        tid = tracks.setdefault(track(e, said), len(tracks) + 1)
        events.append(_complete(e, tid, said))
        if e.exposed_s > 0 and e.what.stream != COMPUTE:
            start = _ns(e.end_s - e.exposed_s) if e.end_s >= e.exposed_s else 0
            if _ns(e.end_s) > start:
                events.append(_x(f"waits for {e.what.name}", "exposed", start, _ns(e.end_s), tracks[COMPUTE], {"of": e.what.module}))
    for m in timeline.moments:
        held = {k: m.nbytes.get(k, 0) for k in KINDS}
        events.append({"name": "memory", "ph": "C", "ts": _ns(m.start_s) / 1e3, "pid": PROCESS, "tid": 0, "args": held})
        events.append(
            {"name": "memory in use", "ph": "C", "ts": _ns(m.start_s) / 1e3, "pid": PROCESS, "tid": 0, "args": {"bytes": m.total}}
        )
    return document(events, tracks, title, timeline.seconds)


def document(events: list[dict[str, Any]], tracks: Mapping[str, int], title: str, seconds: float) -> dict[str, Any]:
    """tracks: name -> number that events bear."""
    events = sorted(events, key=lambda x: (x["ts"], -x.get("dur", 0.0)))
    names: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": PROCESS, "tid": 0, "args": {"name": f"autopar: {title}"}}]
    for name, tid in tracks.items():
        names.append({"name": "thread_name", "ph": "M", "pid": PROCESS, "tid": tid, "args": {"name": name}})
        names.append({"name": "thread_sort_index", "ph": "M", "pid": PROCESS, "tid": tid, "args": {"sort_index": tid}})
    return {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": {"title": title, "step_s": seconds}}


def save(timeline: Timeline, path: str | os.PathLike[str], title: str, said: Said = " x ".join) -> None:
    """Raises AutoparError where the path cannot be written."""
    write(trace(timeline, title, said), path)


def write(made: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Raises AutoparError where the path cannot be written."""
    try:
        Path(path).write_text(json.dumps(made, separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as e:
        raise AutoparError(
            f"the trace cannot be written: {e.strerror or e}",
            where=str(path)[:200],
            fix="name a file in a folder that exists and can be written",
        ) from e


def _complete(e: Event, tid: int, said: Said) -> dict[str, Any]:
    args: dict[str, Any] = {
        "op": e.what.name,
        "module": e.what.module,
        "layer": e.layer,
        "region": f"{e.stage} {e.stack}".strip(),
        "bytes": e.nbytes,
    }
    args |= {"recompute": e.what.recompute}
    if e.what.serves:
        args["serves"] = e.what.serves
    if e.what.axes:
        args["axes"] = said(e.what.axes)
    name = f"slowed down by {e.what.name}" if e.slowdown else f"{e.what.name} (again)" if e.what.recompute else e.what.name
    kind = "slowdown" if e.slowdown else "recompute" if e.what.recompute else e.what.serves or e.stage
    return _x(name, kind, _ns(e.start_s), _ns(e.end_s), tid, args)


def complete(name: str, kind: str, start_s: float, end_s: float, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    """An event of a track."""
    return _x(name, kind, _ns(start_s), _ns(end_s), tid, args)


def _x(name: str, kind: str, start: int, end: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "cat": kind, "ph": "X", "ts": start / 1e3, "dur": (end - start) / 1e3, "pid": PROCESS, "tid": tid, "args": args}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
