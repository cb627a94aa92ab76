"""What the works of a pipeline take: seconds by stage and by hop.

Stages are in the order of the data (`schedule.py`), so the first holds the embedding and the last the head and the loss. Hop r lies between rank r
and rank (r + 1) % p; what goes forward and what comes back take the same time on it. A pipeline of one rank has no hops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from autopar.errors import LayoutError
from autopar.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Lists
from autopar.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Times:
    """forward_s, backward_s: of one micro-batch, by stage; hop_s: of one micro-batch between ranks, by hop.

    weight_s: of backward_s the part that makes gradients of parameters, where it runs by itself (W; the rest is I); by default half.
    exposed: whether sending and receiving hold up the ranks at both ends (`replay.py` says how); otherwise they run beside compute.
    Raises LayoutError where lengths disagree or a time is negative or not finite.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    hop_s: tuple[float, ...]
    exposed: bool = False
    weight_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        s, p = len(self.forward_s), len(self.hop_s)
        if len(self.backward_s) != s or p < 1 or s % p or not s:
            raise LayoutError(
                f"{s} stages with a forward, {len(self.backward_s)} with a backward, {p} hops.",
                fix="Give one forward and one backward a stage, one hop a rank, and the same number of stages on every rank.",
            )
        if self.weight_s and (len(self.weight_s) != s or any(w > b for w, b in zip(self.weight_s, self.backward_s, strict=True))):
            raise LayoutError(
                f"Gradients of parameters that take {list(self.weight_s)} s of backwards of {list(self.backward_s)} s.",
                fix="Give one number a stage, no more than its backward takes.",
            )
        for name in ("forward_s", "backward_s", "hop_s", "weight_s"):
            for i, seconds in enumerate(getattr(self, name)):
                if not 0 <= seconds < math.inf:
                    raise LayoutError(
                        f"A pipeline stage of {seconds} seconds.", where=f"{name}[{i}]", fix="Times are finite and not negative."
                    )

    @classmethod
    def even(cls, schedule: Schedule | Lists, forward_s: float, backward_s: float, hop_s: float = 0.0, exposed: bool = False) -> Times:
        """The same seconds for every stage, and for every hop."""
        s, p = schedule.stages, len(schedule.ranks) if isinstance(schedule, Lists) else schedule.ranks
        return cls((forward_s,) * s, (backward_s,) * s, (hop_s,) * p, exposed)

    @property
    def ranks(self) -> int:
        return len(self.hop_s)

    @cached_property
    def rows_s(self) -> tuple[float, ...]:
        """By row: compute."""
        return self.forward_s + self.backward_s[::-1]

    @cached_property
    def lags_s(self) -> tuple[float, ...]:
        """By row: its input's hop. The first row has no input, the last stage's backward follows its own forward."""
        s, p = len(self.forward_s), self.ranks
        hops = [self.hop_s[i % p] if p > 1 else 0.0 for i in range(s - 1)]
        return (0.0, *hops, 0.0, *hops[::-1])

    def lags_between(self, where: Sequence[int]) -> tuple[float, ...]:
        """`lags_s` where stage i lies on rank where[i]."""
        p = self.ranks
        if all(r == i % p for i, r in enumerate(where)):
            return self.lags_s
        hops = [0.0 if a == b else self.hop_s[a if b == (a + 1) % p else b] for a, b in pairwise(where)]
        return (0.0, *hops, 0.0, *hops[::-1])

    def action_s(self, a: Action) -> float:
        """What an action takes."""
        if a.kind == FORWARD:
            return self.forward_s[a.stage]
        weight_s = self.weight_s[a.stage] if self.weight_s else self.backward_s[a.stage] / 2
        return {BACKWARD: self.backward_s[a.stage], WEIGHT: weight_s, INPUT: self.backward_s[a.stage] - weight_s}[a.kind]

    def rank_s(self, rank: int) -> float:
        """Compute of one micro-batch on a rank, all its chunks, forward and backward."""
        return sum(self.forward_s[rank :: self.ranks]) + sum(self.backward_s[rank :: self.ranks])


def check(schedule: Schedule | Lists, times: Times) -> None:
    """Raises LayoutError unless `times` are those of a pipeline of the schedule's shape."""
    ranks = len(schedule.ranks) if isinstance(schedule, Lists) else schedule.ranks
    if (times.ranks, len(times.forward_s)) != (ranks, schedule.stages):
        raise LayoutError(
            f"Times of {len(times.forward_s)} stages on {times.ranks} ranks, a schedule of {schedule.stages} on {ranks}.",
            fix="Give times by stage, chunks x ranks of them, and one hop a rank.",
        )
