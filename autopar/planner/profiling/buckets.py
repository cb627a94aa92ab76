"""What buckets make of a plan's collectives, before there are graphs: those of parameters that a profile issues at one place, and those of gradients that it awaits at one.

The price of a plan has this already (`autopar.planner.formulation.together`); here it is told, how many and what is saved. It goes by `autopar.cost.buckets`, as the pass does (`autopar.passes.bucket`),
which sees more: dtypes, what is stored in one piece, where exactly a stretch ends.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from autopar.cost import Cost
from autopar.cost.buckets import JOINED, joined, limit, whole_bytes
from autopar.plan.decisions import BUCKETED
from autopar.timeline.expand import place
from autopar.timeline.profile import Profile


def estimated(profile: Profile, cost: Cost) -> dict[str, float]:
    """`BUCKETED` for a step; seconds are of the links."""
    together: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for call in profile.calls:
        what = profile.whats[call.what]
        if call.wait is None or what.name not in JOINED or what.serves not in ("parameter", "gradient"):
            continue
        if (what.name == "all_gather") != (what.serves == "parameter"):
            continue
        whole = whole_bytes(what.name, call.nbytes, cost.mesh.sizes_product(what.axes))
        for copy in range(call.first, call.first + call.times):
            at = place(profile, call.at if what.serves == "parameter" else call.wait, copy)
            together[what.name, what.axes, what.serves, profile.regions[at[0]].stage, at].append(whole)
    members = buckets = 0
    saved_s = 0.0
    for (kind, axes, serves, *_), sizes in together.items():
        within = limit(cost, kind, axes)
        for group in joined(sizes, within):
            if len(group) > 1:
                members, buckets = members + len(group), buckets + 1
                saved_s += (len(group) - 1) * within.alpha_s / (profile.micro_batches if serves == "gradient" else 1)
    return dict(zip(BUCKETED, (float(members), float(buckets), saved_s), strict=True)) if members else {}
