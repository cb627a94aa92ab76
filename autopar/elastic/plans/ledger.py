"""Where the seconds of a run go. Every second of the run is in exactly one of them, so they sum to its length.

A step of those that are left takes longer than one of all: what it takes more is `slower`, the rest of it `useful`. What is done in vain, since a failure or the way back to a
checkpoint takes it, goes over from there to `lost`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Seconds:
    """useful: of steps, as all units do them; slower: since units are missing; copies: kept beside neighbours; writing: of checkpoints; lost: work that is done again, or not at all;
    recovering: from a failure to the next step, and while others join; waiting: for units."""

    useful: float = 0.0
    slower: float = 0.0
    copies: float = 0.0
    writing: float = 0.0
    lost: float = 0.0
    recovering: float = 0.0
    waiting: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.useful + other.useful, self.slower + other.slower, self.copies + other.copies, self.writing + other.writing, self.lost + other.lost,
            self.recovering + other.recovering, self.waiting + other.waiting,
        )  # fmt: skip

    def times(self, n: float) -> Seconds:
        return Seconds(
            n * self.useful, n * self.slower, n * self.copies, n * self.writing, n * self.lost, n * self.recovering, n * self.waiting
        )

    @property
    def total(self) -> float:
        return self.useful + self.slower + self.copies + self.writing + self.lost + self.recovering + self.waiting

    def named(self) -> Mapping[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Mark:
    """A state that can be gone back to. time_s: when it is whole; steps: that it has."""

    time_s: float
    steps: int
    spent: Seconds


class Ledger:
    """steps: whose result is there. spent: up to now."""

    def __init__(self) -> None:
        self.steps = 0
        self.spent = Seconds()
        self.used = 0.0  # device seconds

    def add(self, seconds: Seconds, steps: int = 0, devices: int = 0) -> None:
        self.spent += seconds
        self.steps += steps
        self.used += seconds.total * devices

    def mark(self, time_s: float) -> Mark:
        return Mark(time_s, self.steps, self.spent)

    def back_to(self, mark: Mark) -> int:
        """What was done since is lost; the steps of it."""
        undone = self.steps - mark.steps
        now, then = self.spent, mark.spent
        vain = (now.useful - then.useful) + (now.slower - then.slower) + (now.copies - then.copies)
        self.spent = Seconds(then.useful, then.slower, then.copies, now.writing, now.lost + vain, now.recovering, now.waiting)
        self.steps = mark.steps
        return undone
