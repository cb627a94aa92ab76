"""The step of a pipeline's plan as trace-event JSON: one track a rank, one event an action, by the replay of its schedule."""

from __future__ import annotations

import os
from typing import Any

from autopar.errors import AutoparError, LayoutError
from autopar.pipeline import Times, spans
from autopar.plan.decisions import Decisions
from autopar.timeline.perfetto import complete, document, write


def trace(plan: Decisions, title: str) -> dict[str, Any]:
    """Raises AutoparError for a plan that does not say what its stages take, or whose schedule is none that is known by its name."""
    p = plan.pipeline
    assert p is not None
    if not p.forward_s:
        raise AutoparError(
            "this plan does not say what its stages take", fix="make it again, with autopar.plan(...) or `autopar plan ... -o FILE`"
        )
    try:
        lists = p.lists(plan.micro_batches)
    except LayoutError as e:
        raise AutoparError(
            f"this plan's schedule, {p.schedule!r}, is not known by its name", where="pipeline", fix="plan with one of autopar's schedules"
        ) from e
    events = []
    for s in spans(lists, Times(p.forward_s, p.backward_s, p.hop_s, weight_s=p.weight_s)):
        a, layers = s.action, p.layers[s.action.stage]
        args = {"stage": a.stage, "micro_batch": a.micro_batch, "layers": layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"}
        events.append(complete(a.said().rpartition(" (")[0], a.kind, s.start_s, s.end_s, s.rank + 1, args))
    seconds = max(e["ts"] + e["dur"] for e in events) / 1e6
    return document(events, {f"rank {r}": r + 1 for r in range(p.ranks)}, title, seconds)


def save(plan: Decisions, path: str | os.PathLike[str], title: str) -> None:
    write(trace(plan, title), path)
