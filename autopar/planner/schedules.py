"""The schedule of a pipeline where none is asked for: the fastest by the replay, of those that keep to the memory.

    named     1f1b, interleaved by 2, 3, 4, 6 and 8, zb-h1, zbv, dualpipev
    filled    made for the stages' own times, with one stage a rank and with two in a V, holding as much as there is room for (`autopar.pipeline.filling`)

A plan is made for one of them, 1f1b, and all are replayed with its times: what a stage does in a micro-batch is the same, but the cuts and what crosses them are each schedule's own. Its activations
are scaled by what the schedule holds; one that is faster and does not fit is planned for itself, with the memory that it leaves.

Schedules with backward in two are left out where backward makes products or attention again: what is made for the first half would stay until the second, which memory does not count.
Of schedules that take the same but for half a per cent it is the one that comes first above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.cost.compute import HEAVY
from autopar.errors import AutoparError, LayoutError
from autopar.pipeline import Lists, Times, filled, scheduled
from autopar.pipeline.named import INTERLEAVED, TWO
from autopar.plan.plan import Plan
from autopar.planner.staged import held_share
from autopar.text.times import format_time

PAYS = 0.005  # of a step, that a schedule which is not the simplest has to be faster
CHUNKS = (2, 3, 4, 6, 8)
LOOKS = 400_000  # actions x ranks, up to which one is filled: some two seconds
LOOKED_AT = 3  # schedules whose stages get policies of their own
TOLD = "schedules"  # of a plan's solver: what was tried


def fastest(
    first: Plan,
    planned: Lists,
    layers: int,
    kinds: Mapping[str, str],
    told: Callable[[Lists], Plan],
    by_stage: Callable[[Lists], Plan | None],
    replanned: Callable[[Lists], Plan],
) -> Plan:
    """first: the plan, as that of a pipeline of the schedule `planned`, which it was made for; layers: of the model; kinds: of the rules of its operators. told: the same plan with another
    schedule; by_stage: one whose stages have policies of their own, if there is one; replanned: one made for it; all raise AutoparError where there is none."""
    if "step_time_s" not in first.predicted:
        return first
    tried: dict[str, Plan] = {said(planned): first}
    lists_of: dict[str, Lists] = {said(planned): planned}
    splits = not any(kinds.get(op) in HEAVY for op in first.recompute) and not first.offload
    for lists in _considered(first, planned, layers, splits, tried):
        try:
            tried[said(lists)] = told(lists)
            lists_of[said(lists)] = lists
        except LayoutError:  # fewer layers than stages
            continue
    own: set[str] = set()
    # The fastest first, whether they fit or not: there is memory that is not used, or some that is missing.
    for name in sorted(tried, key=lambda n: (_seconds(tried[n]), n)):
        if len(own) >= LOOKED_AT and any(map(fits, tried.values())):
            break
        best_s = min((_seconds(p) for p in tried.values() if fits(p)), default=math.inf)
        if name != said(planned) and _seconds(tried[name]) >= (1 - PAYS) * best_s and not fits(tried[name]):
            continue  # nor is it with less memory
        own.add(name)
        try:
            other = by_stage(lists_of[name])
        except AutoparError:
            continue
        if other is not None and better(other, tried[name]):
            tried[name] = other
    fitting = {name: p for name, p in tried.items() if fits(p)}
    name = simplest({n: _seconds(p) for n, p in fitting.items()}) if fitting else said(planned)
    best = tried[name]
    best_s = _seconds(best) if fitting else math.inf
    if larger := {n: _seconds(p) for n, p in tried.items() if n not in fitting and _seconds(p) < (1 - PAYS) * best_s}:
        other_name = simplest(larger)
        try:
            made = replanned(lists_of[other_name])
            tried[other_name] = made
            if _seconds(made) < (1 - PAYS) * best_s:
                best = made
        except AutoparError:  # it does not fit at all
            del tried[other_name]
    words = "; ".join(f"{n}: {format_time(_seconds(p))}{'' if fits(p) else ' (does not fit)'}" for n, p in tried.items())
    return replace(best, solver={**best.solver, TOLD: words}).answering_as(best)


def better(a: Plan, b: Plan) -> bool:
    """Whether it fits where `b` does not, or is faster."""
    return fits(a) and (not fits(b) or _seconds(a) < _seconds(b))


def simplest(seconds: Mapping[str, float]) -> str:
    """The name that comes first of those that take no more than the best but for `PAYS`."""
    best = min(seconds.values())
    return next(n for n, s in seconds.items() if s * (1 - PAYS) <= best)


def said(lists: Lists) -> str:
    n = lists.stages // len(lists.ranks)
    return f"{lists.name} by {n}" if n > 1 and lists.name not in TWO else lists.name


def _considered(first: Plan, planned: Lists, layers: int, splits: bool, tried: Mapping[str, Plan]) -> Iterator[Lists]:
    """tried: what became of those that were given before."""
    p, m = len(planned.ranks), planned.micro_batches
    names: list[tuple[str, int | None]] = [(INTERLEAVED, v) for v in CHUNKS if p * v <= layers]
    if splits:
        names += [("zb-h1", None), *((name, None) for name in TWO if 2 * p <= layers)]
    for name, chunks in names:
        try:
            lists = scheduled(name, p, m, chunks)
        except LayoutError:  # of other numbers of micro-batches
            continue
        yield lists
        if name in ("zb-h1", "zbv") and name in tried and lists.stages * 3 * m * p <= LOOKS:
            yield from _filled(first, planned, lists, tried[name])


def _filled(first: Plan, planned: Lists, like: Lists, made: Plan) -> Sequence[Lists]:
    """Of stages where they are in `like`, with the times that `made`, the plan by it, gives them; nothing where they do not fit."""
    p = made.pipeline
    assert p is not None
    try:
        times = Times(p.forward_s, p.backward_s, p.hop_s, weight_s=p.weight_s)
        most = room(first, planned, like.stages, like.micro_batches * like.stages // p.ranks)
        lists = filled(times, like.micro_batches, like.where, [most] * p.ranks)
    except LayoutError:
        return ()
    return (lists,)


def room(first: Plan, planned: Lists, stages: int, most: int) -> int:
    """How many micro-batches a rank may hold, counted by stage: as many as fill the memory, if all of `first`'s were activations; at least what `planned` holds."""
    budget, peak = (first.predicted.get(k, 0.0) for k in ("budget_bytes", "peak_memory_bytes"))
    more = budget / peak if peak else 1.0
    return max(1, min(most, int(stages * held_share(planned) * max(1.0, more) + 1e-9)))


def fits(p: Plan) -> bool:
    """Whether all that it needs is there."""
    budget, peak = (p.predicted.get(k, 0.0) for k in ("budget_bytes", "peak_memory_bytes"))
    return not budget or peak <= budget * (1 + 1e-9)


def _seconds(p: Plan) -> float:
    return float(p.predicted["step_time_s"])
