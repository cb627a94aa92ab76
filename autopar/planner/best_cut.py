"""The layers of each stack cut into segments with policies of their own, at given strategies: where it is best to cut."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from autopar.graph.mesh import Mesh
from autopar.planner.attempt import Attempt
from autopar.planner.found import Found, is_within
from autopar.planner.segments import Segments, at_share, suggested
from autopar.solver.frontier import Relaxation
from autopar.solver.solve import NoneFaster, Solution, solve

WORTH = 1e-3  # a gap, relative, that cutting the layers into segments is tried for
PATIENCE = 4  # cuts in a row that bring nothing: no more are tried where the gap is what was asked for
FIRST = (0.0, 0.5, 0.25, 0.75)  # shares of the layers at which a cut is first looked for


def best_cut(attempt: Attempt, mesh: Mesh, strategies: Sequence[int], bound_s: float, best: Found | None, coarse: bool) -> Found | None:
    """The best of `best` and cuts of the stacks into segments, at these strategies.

    None; then where a relaxation says (`autopar.planner.segments`), from either end, with the last layer by itself as well, and in three; then two segments
    at every quarter of the layers, and nearer to the best, unless the answer is already what the relaxation allows. Where the gap is what was asked for,
    only as long as that brings something. coarse: only what it says."""
    began = time.perf_counter()
    attempt.begin("segments")
    looked: dict[tuple[tuple[int, ...], ...], float] = {}
    n_of = {s.name: n for s, n in zip(attempt.folded.stacks, attempt.folded.copies, strict=True)}
    whole = attempt.view()
    uncut = (whole, *attempt.formulated(whole, mesh, only=strategies))

    def at(segments: Segments) -> float:
        """Seconds of the best answer with the layers cut so."""
        nonlocal best
        key = tuple(segments.values())
        if key in looked or (best is not None and attempt.is_late):
            return looked.get(key, math.inf)
        v, f, problem = uncut
        try:
            if any(len(cut) > 1 for cut in segments.values()):
                v = attempt.view({name: cut for name, cut in segments.items() if len(cut) > 1})
                f, problem = attempt.formulated(v, mesh, only=strategies)
            found = solve(problem, attempt.left)
        except NoneFaster:
            looked[key] = math.inf
            return math.inf
        except TimeoutError:
            if best is None and not any(math.isfinite(x) for x in looked.values()):
                raise
            looked[key] = math.inf
            return math.inf
        looked[key] = found.objective_s if isinstance(found, Solution) else math.inf
        if isinstance(found, Solution):
            found = replace(found, bound_s=min(bound_s, found.objective_s))
            attempt.has_answer = True
            if best is None or not isinstance(best.answer, Solution) or found.objective_s < best.answer.objective_s * (1 - 1e-6):
                best = Found(mesh, problem, f.names, v.shrunk, v.rules, found, f.formulated(), tuple(strategies))
                attempt.so_far(mesh, bound_s, best)
        return looked[key]

    def good() -> bool:
        seconds = list(looked.values())
        idle = len(seconds) > PATIENCE and min(seconds[-PATIENCE:]) >= min(seconds[:-PATIENCE]) * (1 - WORTH)
        if idle and is_within(best, attempt.limits.gap):
            return True
        late = time.perf_counter() - attempt.start > attempt.limits.seconds / 2
        return is_within(best, max(WORTH, attempt.limits.gap) if late else WORTH)

    f, problem = uncut[1:]
    try:
        relaxed = Relaxation(problem).at(attempt.training.budget_bytes, attempt.left)
    except TimeoutError:
        relaxed = None
    cuts = suggested(f.formulated(), problem, relaxed, n_of)
    limit_s = relaxed.tangent.at_s if relaxed else 0.0  # which more cuts can hardly go below
    for segments in cuts:
        if not good():
            at(segments)
    if coarse or min(looked.values(), default=math.inf) <= limit_s * (1 + WORTH):
        attempt.on_progress("segments", time.perf_counter() - began)
        return best
    tried: dict[tuple[float, bool], float] = {}
    for alone in (False, True):
        for share in FIRST:
            if not good():
                tried[share, alone] = at({name: at_share(n, share, alone) for name, n in n_of.items()})
    deepest = max(n_of.values(), default=1)
    step = 0.25
    while step > 0.5 / deepest and not good() and tried:
        center, alone = min(tried, key=lambda k: (tried[k], k))
        step /= 2
        for share in (center - step, center + step):
            if 0 < share < 1:
                tried[share, alone] = at({name: at_share(n, share, alone) for name, n in n_of.items()})
    attempt.on_progress("segments", time.perf_counter() - began)
    return best
