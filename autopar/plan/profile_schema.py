"""A plan's profile as rows of its file, and back.

Rows, each an array: regions (stage, stack, layers of a copy); whats (name, module, stream, stack, serves, axes, recompute); copies (stack, how many); calls (of whats, seconds,
bytes, first, times, spot, where it is awaited); samples (first, times, spot, bytes by kind); growths (region, first, times, before, behind). A spot is (region, shift,
position, phase, sub); bytes by kind are (of kinds, bytes).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from autopar.plan.checks import Checker, contradiction
from autopar.plan.schema_types import STRICT, Flag, Number, Positive, Rows, Short, Size, Table, Text, Whole
from autopar.timeline.profile import BEHIND, KINDS, Call, Growth, Profile, Region, Sample, Spot, What
from autopar.timeline.replay import STREAMS

SpotRow = tuple[Size, Whole, Size, Annotated[int, Field(strict=True, ge=0, le=BEHIND)], Whole]
Bytes = Short[tuple[Size, Whole]]
SHIFTS = 1_000_000  # copies further than there are layers in any model
Amount = Annotated[Number, Field(ge=0, le=1e15)]


class ProfileModel(BaseModel):
    model_config = STRICT

    kinds: Short[Text]
    regions: Table[tuple[Text, Text, Positive]]
    whats: Table[tuple[Text, Text, Text, Text, Text, Short[Text], Flag]]
    copies: Short[tuple[Text, Positive]]
    calls: Rows[tuple[Size, Amount, Size, Size, Positive, SpotRow, SpotRow | None]]
    samples: Rows[tuple[Size, Positive, SpotRow, Bytes]]
    growths: Table[tuple[Size, Size, Positive, Bytes, Bytes]]
    model_flops: Annotated[Number, Field(ge=0)] = 0.0
    peak_flops: Annotated[Number, Field(ge=0)] = 0.0
    samples_a_call: Size = 0
    tokens_a_call: Size = 0
    micro_batches: Positive = 1
    contention: Annotated[Number, Field(ge=0, le=1)] = 0.0
    element_bytes: Annotated[Number, Field(ge=0, le=64)] = 4.0


def profile_rows(p: Profile) -> dict[str, Any]:
    """Python's own numbers only, as everywhere in a plan's file."""
    return {
        "kinds": KINDS,
        "regions": [(r.stage, r.stack, r.layers) for r in p.regions],
        "whats": [(w.name, w.module, w.stream, w.stack, w.serves, w.axes, w.recompute) for w in p.whats],
        "copies": sorted(p.copies.items()),
        "calls": [
            (c.what, float(c.seconds), c.nbytes, c.first, c.times, _spot(c.at), None if c.wait is None else _spot(c.wait)) for c in p.calls
        ],
        "samples": [(s.first, s.times, _spot(s.at), sorted(s.nbytes.items())) for s in p.samples],
        "growths": [(g.region, g.first, g.times, sorted(g.before.items()), sorted(g.behind.items())) for g in p.growths],
        "model_flops": float(p.model_flops),
        "peak_flops": float(p.peak_flops),
        "samples_a_call": p.samples_a_call,
        "tokens_a_call": p.tokens_a_call,
        "micro_batches": p.micro_batches,
        "contention": float(p.contention),
        "element_bytes": float(p.element_bytes),
    }


def _spot(s: Spot) -> tuple[int, int, int, int, int]:
    return s.region, s.shift, s.position, s.phase, s.sub


def profile_of(m: ProfileModel, check: Checker) -> Profile:
    """What rows name exists: regions, streams, axes, kinds, copies."""
    if tuple(m.kinds) != KINDS:
        raise contradiction("its kinds of memory are not those that this autopar knows", "profile.kinds")
    copies = dict(m.copies)
    regions = tuple(Region(*r) for r in m.regions)
    for i, r in enumerate(regions):
        if r.stack and r.stack not in copies:
            raise contradiction(f"region {i} is of a stack that is not there", "profile.regions")
    for i, w in enumerate(m.whats):
        if w[2] not in STREAMS or (w[3] and w[3] not in copies):
            raise contradiction(f"call {i} is on a stream or of a stack that is not there", "profile.whats")
        check.axes(w[5], f"profile.whats[{i}]")

    def spot(row: tuple[int, int, int, int, int], where: str) -> Spot:
        if row[0] >= len(regions) or abs(row[1]) > SHIFTS:
            raise contradiction("a spot lies in a region that is not there", where)
        return Spot(*row)

    def sizes(rows: list[tuple[int, int]], where: str) -> dict[int, int]:
        if any(k >= len(KINDS) for k, _ in rows):
            raise contradiction("bytes are of a kind that is not there", where)
        return dict(rows)

    calls = []
    for i, (what, seconds, nbytes, first, times, at, wait) in enumerate(m.calls):
        if what >= len(m.whats):
            raise contradiction(f"call {i} is of none of its kinds", "profile.calls")
        where = f"profile.calls[{i}]"
        calls.append(Call(what, seconds, nbytes, first, times, spot(at, where), None if wait is None else spot(wait, where)))
    samples = [
        Sample(a, n, spot(at, f"profile.samples[{i}]"), sizes(b, f"profile.samples[{i}]")) for i, (a, n, at, b) in enumerate(m.samples)
    ]
    growths = [Growth(r, a, n, sizes(x, "profile.growths"), sizes(y, "profile.growths")) for r, a, n, x, y in m.growths]
    return Profile(
        regions, tuple(What(n, mod, s, k, v, tuple(axes), recompute) for n, mod, s, k, v, axes, recompute in m.whats), tuple(calls), tuple(samples), tuple(growths), copies,
        m.model_flops, m.peak_flops, m.samples_a_call, m.tokens_a_call, m.micro_batches, m.contention, m.element_bytes,
    )  # fmt: skip
