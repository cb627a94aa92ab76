"""When each action of a schedule runs. Hops go beside compute, as `replay` has them with `exposed` off; the last end is its total."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import LayoutError
from autopar.pipeline.actions import FORWARD, WEIGHT, Action, Lists
from autopar.pipeline.times import Times, check


@dataclass(frozen=True)
class Span:
    """An action of a rank, from and until when, in seconds from the start of the step."""

    rank: int
    action: Action
    start_s: float
    end_s: float


def spans(lists: Lists, times: Times) -> list[Span]:
    """By rank, in order. Raises LayoutError where the times are of another shape, hops hold ranks up, or ranks wait for each other forever."""
    check(lists, times)
    if times.exposed:
        raise LayoutError("hops that hold up both ranks have no actions of their own", fix="give times with exposed=False")
    last, lags_s = lists.stages - 1, times.lags_between(lists.where)
    made: dict[tuple[int, bool, int], float] = {}  # result of a stage, whether forward's, of a micro-batch -> when it is there
    found: list[list[Span]] = [[] for _ in lists.ranks]
    clock_s, moved = [0.0] * len(lists.ranks), True
    while moved:
        moved = False
        for rank, actions in enumerate(lists.ranks):
            for a in actions[len(found[rank]) :]:
                ahead = a.kind == FORWARD
                came = 0.0
                if a.kind != WEIGHT and not (ahead and a.stage == 0):
                    # The last stage's backward follows its own forward.
                    behind = (a.stage, True, a.micro_batch) if a.stage == last else (a.stage + 1, False, a.micro_batch)
                    key = (a.stage - 1, True, a.micro_batch) if ahead else behind
                    if key not in made:
                        break
                    came = made[key] + lags_s[a.stage if ahead else 2 * last + 1 - a.stage]
                start_s = max(clock_s[rank], came)
                clock_s[rank] = start_s + times.action_s(a)
                if a.kind != WEIGHT:
                    made[a.stage, ahead, a.micro_batch] = clock_s[rank]
                found[rank].append(Span(rank, a, start_s, clock_s[rank]))
                moved = True
    stuck = [r for r, actions in enumerate(lists.ranks) if len(found[r]) < len(actions)]
    if stuck:
        raise LayoutError(f"the pipeline's ranks {stuck} wait for each other forever", fix="give an order that `verified` takes")
    return [s for of_rank in found for s in of_rank]
