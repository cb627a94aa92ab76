"""A profile -> every call of every layer, with its time, and the memory in use at each.

The calls of all copies are put in the order in which a rank issues them and replayed on streams (`replay.py`). The step this takes is not the priced one to the last
digit: the price says that a stage lasts as long as its busiest stream, the replay also sees that the first gather has nothing to hide behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import AutoparError
from autopar.timeline.profile import KINDS, Profile, Spot, What
from autopar.timeline.replay import COMPUTE, Record, Replay, replay

MAX_EVENTS = 2_000_000  # of a file that says it has more, no timeline is made
SAMPLE, ISSUE, WAIT = range(3)  # at one spot, in this order
Place = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Event:
    """One call when it runs. copy: of its stack (-1: it is of none); exposed_s: how long compute waits for it; slowdown: no call, but what compute loses beside one."""

    what: What
    stage: str
    stack: str
    layer: str
    start_s: float
    end_s: float
    nbytes: int
    copy: int = -1
    exposed_s: float = 0.0
    slowdown: bool = False

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Moment:
    """Memory by kind, from a time on. layer: "" outside of stacks."""

    start_s: float
    stage: str
    layer: str
    nbytes: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.nbytes.values())


@dataclass(frozen=True)
class Timeline:
    """events: by start; moments: in order; seconds: until the last stream is done; exposed_s: compute idle; stage_s: (stage, start, end) by compute."""

    events: tuple[Event, ...]
    moments: tuple[Moment, ...]
    seconds: float
    exposed_s: float
    busy_s: Mapping[str, float]
    stages: tuple[tuple[str, float, float], ...]

    @property
    def peak(self) -> Moment | None:
        """Where memory is fullest."""
        return max(self.moments, key=lambda m: m.total, default=None)


@dataclass(frozen=True)
class _Entry:
    """What happens at a place of the whole step: `index` is of the profile's samples or calls."""

    place: Place
    kind: int
    index: int
    copy: int


def expand(profile: Profile) -> Timeline:
    """Raises AutoparError for a profile of more than `MAX_EVENTS` calls."""
    if sum(c.times for c in profile.calls) + sum(s.times for s in profile.samples) > MAX_EVENTS:
        raise AutoparError(
            f"the plan's step has more than {MAX_EVENTS:,} calls", where="profile", fix="make the plan again with this autopar"
        )
    entries = _entries(profile)
    records = _records(profile, entries)
    done = replay([r for r, _ in records])
    return _timeline(profile, entries, records, done)


def _entries(profile: Profile) -> list[_Entry]:
    out = []
    for i, sample in enumerate(profile.samples):
        out += [_Entry(place(profile, sample.at, k), SAMPLE, i, k) for k in range(sample.first, sample.first + sample.times)]
    for i, call in enumerate(profile.calls):
        for k in range(call.first, call.first + call.times):
            out.append(_Entry(place(profile, call.at, k), ISSUE, i, k))
            if call.wait is not None:
                out.append(_Entry(place(profile, call.wait, k), WAIT, i, k))
    return sorted(out, key=lambda e: (e.place, e.kind, e.index))


def place(profile: Profile, spot: Spot, copy: int) -> Place:
    region = profile.regions[spot.region]
    if not region.stack:
        return spot.region, 0, spot.position, spot.phase, spot.sub
    copy = min(max(copy + spot.shift, 0), profile.copies[region.stack] - 1)
    return spot.region, copy if region.stage == "forward" else -copy, spot.position, spot.phase, spot.sub


def _records(profile: Profile, entries: list[_Entry]) -> list[tuple[Record, _Entry | None]]:
    """Each with the entry it is of; None: what compute loses beside a collective, which its own entry is just before."""
    out: list[tuple[Record, _Entry | None]] = []
    for e in entries:
        if e.kind == SAMPLE:
            out.append((Record(f"memory {e.index} {e.copy}", COMPUTE, 0.0), e))
            continue
        call = profile.calls[e.index]
        what, name = profile.whats[call.what], f"{e.index} {e.copy}"
        if e.kind == WAIT:
            out.append((Record(f"wait {name}", COMPUTE, 0.0, (name,)), e))
            continue
        out.append((Record(name, what.stream, call.seconds), e))
        if what.stream != COMPUTE and call.wait is None:
            out.append((Record(f"wait {name}", COMPUTE, 0.0, (name,)), e))
        elif what.stream != COMPUTE and what.axes and profile.contention:
            out.append((Record(f"beside {name}", COMPUTE, call.seconds * profile.contention), None))
    return out


def _timeline(profile: Profile, entries: list[_Entry], records: list[tuple[Record, _Entry | None]], done: Replay) -> Timeline:
    waited = {s.name.removeprefix("wait "): s.waited_s for s in done.timeline if s.name.startswith("wait ")}
    layers = {r.stack: r.layers for r in profile.regions}
    growth = {(g.region, g.first): g for g in profile.growths}
    events: list[Event] = []
    moments: list[Moment] = []
    spans: dict[str, tuple[float, float]] = {}
    last: _Entry | None = None
    for (record, entry), span in zip(records, done.timeline, strict=True):
        e = entry or last
        assert e is not None
        last = e
        spot = profile.samples[e.index].at if e.kind == SAMPLE else profile.calls[e.index].at
        region = profile.regions[e.place[0]]
        if span.stream == COMPUTE:
            low, high = spans.get(region.stage, (span.start_s - span.waited_s, span.end_s))
            spans[region.stage] = min(low, span.start_s - span.waited_s), max(high, span.end_s)
        if e.kind == SAMPLE:
            sample = profile.samples[e.index]
            held = Counter(sample.nbytes)
            slope = growth.get((spot.region, sample.first))
            if slope is not None and e.copy > sample.first:
                between = e.copy - sample.first
                for k, n in slope.before.items():
                    held[k] += between * n
                for k, n in slope.behind.items():
                    held[k] -= between * n
            moments.append(
                Moment(span.start_s, region.stage, layer_of(region.stack, region.layers, e.copy), {KINDS[k]: n for k, n in held.items()})
            )
        elif not record.name.startswith("wait "):
            call = profile.calls[e.index]
            # A gather is issued a layer early: it is of the layer that reads it.
            what, slow = profile.whats[call.what], entry is None
            copy = e.copy if what.stack else -1
            events.append(
                Event(
                    what, region.stage, what.stack, layer_of(what.stack, layers.get(what.stack, 1), copy), span.start_s, span.end_s,
                    call.nbytes, copy, 0.0 if slow else waited.get(record.name, 0.0), slow,
                )
            )  # fmt: skip
    stages = tuple((stage, *spans[stage]) for stage in dict.fromkeys(r.stage for r in profile.regions) if stage in spans)
    events.sort(key=lambda x: (x.start_s, x.end_s))
    return Timeline(tuple(events), tuple(moments), done.seconds, done.exposed_s, done.busy_s, stages)


def layer_of(stack: str, layers: int, copy: int) -> str:
    """ "model.layers.5", "" outside of stacks; of several layers taken as one, "model.layers.4-5"."""
    if not stack or copy < 0:
        return ""
    first = copy * layers
    return f"{stack}.{first}" if layers == 1 else f"{stack}.{first}-{first + layers - 1}"
