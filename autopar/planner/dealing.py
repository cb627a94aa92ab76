"""Layers dealt to the stages of a pipeline together with what each rank keeps of them.

By 1F1B a rank holds activations of as many micro-batches as there are stages from its own on: the first ones have to make more again than the last ones, whose memory would otherwise stay empty.
What makes more again is slower, and so gets fewer layers (Sun et al., "AdaPipe", ASPLOS 2024; Kuaishou's pipeline-aware offload, USENIX ATC 2024, has the same reason).

    minimise over cuts and policies:   the replay of the schedule with the stages' times
    such that on every rank            state + what its micro-batches in flight keep + what else is there  <=  memory

A rank takes one policy for the first layers of its stages and another, which keeps more, for the others: of policies on the convex hull of seconds over bytes two neighbours suffice but for one layer. The cuts
that are begun with make the slowest stage as fast as can be (with one stage a rank, by bisection over its time: given a time, the first stage takes as many layers as it can within it, and so on); then single
layers are moved from stage to stage, those between handing one on, as long as the replay gets shorter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from autopar.pipeline import Lists
from autopar.planner.cuts import balanced

HALVINGS = 40  # of the time between what is surely too little and what suffices
LOOKS = 400_000  # actions that are replayed, at most: some two seconds
STEPS = 16  # to which the share of layers that keep less is rounded, on ranks with several stages


@dataclass(frozen=True)
class Policy:
    """By unit (layers that are dealt together): seconds of a micro-batch, bytes that it keeps, what else is there meanwhile."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    transient_bytes: tuple[float, ...]


@dataclass(frozen=True)
class Dealt:
    """A stage. end: unit behind its last one; light: units in front that have the policy `first`, which keeps less; the others have `rest`."""

    end: int
    first: int
    light: int
    rest: int
    forward_s: float
    backward_s: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


class Dealing:
    """policies: what units may have; state_bytes: of each unit; budget_bytes: of each rank; price: of stages, the replay's seconds."""

    def __init__(
        self,
        policies: Sequence[Policy],
        state_bytes: Sequence[float],
        lists: Lists,
        budget_bytes: float,
        price: Callable[[Sequence[Dealt]], float],
    ) -> None:
        self.policies, self.lists, self.budget_bytes, self.price = policies, lists, budget_bytes, price
        self.units, self.stages = len(state_bytes), lists.stages
        self.state = [0.0, *accumulate(state_bytes)]
        self.forward, self.backward, self.kept = (
            [[0.0, *accumulate(of)] for of in halves]
            for halves in ([p.forward_s for p in policies], [p.backward_s for p in policies], [p.kept_bytes for p in policies])
        )
        # The one that keeps least first.
        self.order = sorted(range(len(policies)), key=lambda o: (sum(policies[o].kept_bytes), o))
        self.mine = [lists.of_rank(r) for r in range(len(lists.ranks))]
        self.turns = [lists.fullest(r) for r in range(len(lists.ranks))]

    def best(self) -> list[Dealt] | None:
        """The stages, in order; None where the layers do not fit."""
        if not self.policies or self.units < self.stages:
            return None
        found = self._first()
        return None if found is None else self._moved(found)

    # ---- at given cuts -------------------------------------------------------------------------------------------------

    def at(self, ends: Sequence[int]) -> list[Dealt] | None:
        """Each rank as fast as its memory allows."""
        out: dict[int, Dealt] = {}
        for rank, mine in enumerate(self.mine):
            done = self.of_rank(rank, {s: (ends[s - 1] if s else 0, ends[s]) for s in mine})
            if done is None:
                return None
            out |= done
        return [out[s] for s in range(self.stages)]

    def of_rank(self, rank: int, of: Mapping[int, tuple[int, int]]) -> dict[int, Dealt] | None:
        """of: by stage of the rank, its first unit and the one behind its last."""
        room = self.budget_bytes - sum(self.state[j] - self.state[i] for i, j in of.values())
        best: dict[int, Dealt] | None = None
        for a, b in itertools.combinations_with_replacement(self.order, 2):
            made = self._least_light(rank, of, a, b, room)
            if made is not None and (best is None or _seconds(made) < _seconds(best)):
                best = made
        return best

    def _least_light(self, rank: int, of: Mapping[int, tuple[int, int]], a: int, b: int, room: float) -> dict[int, Dealt] | None:
        """As few units as can be with `a`, the others with `b`."""
        steps = max(j - i for i, j in of.values()) if len(of) == 1 else STEPS
        alone = max(max(p.transient_bytes[i:j], default=0.0) for p in (self.policies[a], self.policies[b]) for i, j in of.values())

        def light(i: int, j: int, n: int) -> int:
            return -(-n * (j - i) // steps)

        def fits(n: int) -> bool:
            kept = {
                s: self.kept[a][i + light(i, j, n)] - self.kept[a][i] + self.kept[b][j] - self.kept[b][i + light(i, j, n)]
                for s, (i, j) in of.items()
            }
            return alone + max((sum(c * kept[s] for s, c in held.items()) for held in self.turns[rank]), default=0.0) <= room

        if not fits(0 if a == b else steps):
            return None
        low, high = 0, 0 if a == b else steps
        while low < high:  # what `a` keeps is less, so more of it fits the better
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        return {s: self._dealt(i, j, a, light(i, j, low), b) for s, (i, j) in of.items()}

    def _dealt(self, i: int, j: int, a: int, light: int, b: int) -> Dealt:
        halves = (of[a][i + light] - of[a][i] + of[b][j] - of[b][i + light] for of in (self.forward, self.backward))
        return Dealt(j, a, light, b, *halves)

    # ---- cuts ------------------------------------------------------------------------------------------------------------

    def _first(self) -> list[Dealt] | None:
        fastest = self.policies[self.order[-1]]
        if self.stages > len(self.mine):
            return self.at(balanced([f + b for f, b in zip(fastest.forward_s, fastest.backward_s, strict=True)], self.stages))
        low, high = 0.0, sum(max(p.forward_s[i] + p.backward_s[i] for p in self.policies) for i in range(self.units))
        found = self._within(high)
        if found is None:
            return None
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            made = self._within(middle)
            if made is None:
                low = middle
            else:
                found, high = made, min(middle, max(d.seconds for d in made))
        return found

    def _within(self, seconds: float) -> list[Dealt] | None:
        """One stage a rank; none takes longer."""

        def stage(s: int, i: int, j: int) -> Dealt | None:
            done = self.of_rank(self.lists.where[s], {s: (i, j)})
            return done[s] if done is not None and done[s].seconds <= seconds else None

        out: list[Dealt] = []
        at = 0
        for s in range(self.stages - 1):
            low, high = at + 1, self.units - (self.stages - 1 - s)  # each stage behind has a unit at least
            done = stage(s, at, low)
            if done is None:
                return None
            while low < high:
                middle = (low + high + 1) // 2
                more = stage(s, at, middle)
                if more is not None:
                    low, done = middle, more
                else:
                    high = middle - 1
            out.append(done)
            at = low
        last = stage(self.stages - 1, at, self.units)
        return None if last is None else [*out, last]

    def _moved(self, dealt: list[Dealt]) -> list[Dealt]:
        """With units moved while that pays. Of stages that take as long, those are taken that are more alike."""
        each = max(1, sum(map(len, self.lists.ranks)))
        left = max(1, LOOKS // each)

        def worth(d: Sequence[Dealt]) -> tuple[float, float]:
            return self.price(d), sum(x.seconds**2 for x in d)

        best, done = worth(dealt), False
        while not done:
            done = True
            pairs = [(s, t) for s in range(self.stages) for t in range(self.stages) if s != t]
            for s, t in sorted(pairs, key=lambda p: dealt[p[1]].seconds - dealt[p[0]].seconds):  # from the slowest to the fastest first
                other = self._with_moved(dealt, s, t)
                if other is None:
                    continue
                left -= 1
                mine = worth(other)
                if mine < (best[0] * (1 - 1e-9), best[1]) or (mine[0] <= best[0] and mine[1] < best[1] * (1 - 1e-9)):
                    dealt, best, done = other, mine, False
                    break
                if left <= 0:
                    return dealt
        return dealt

    def _with_moved(self, dealt: Sequence[Dealt], s: int, t: int) -> list[Dealt] | None:
        """With a unit of stage s on stage t."""
        low, high, by = min(s, t), max(s, t), 1 if t < s else -1
        ends = [d.end + by if low <= i < high else d.end for i, d in enumerate(dealt)]
        return self.at(ends) if all(a < b for a, b in itertools.pairwise([0, *ends])) else None


def _seconds(of: Mapping[int, Dealt]) -> float:
    return sum(d.seconds for d in of.values())


def hull(points: Sequence[tuple[float, float]]) -> list[int]:
    """Of points (bytes, seconds) those on the lower left of their convex hull, by bytes."""
    found: list[int] = []
    for k in sorted(range(len(points)), key=lambda k: (points[k], k)):
        x, y = points[k]
        if found and y >= points[found[-1]][1]:
            continue
        while len(found) > 1:
            (x1, y1), (x2, y2) = points[found[-2]], points[found[-1]]
            if (y2 - y1) * (x - x1) < (y - y1) * (x2 - x1):
                break
            found.pop()
        found.append(k)
    return found
