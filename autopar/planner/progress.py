"""Progress of a plan, as its caller hears it."""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress:
    """Tells stages, and at the end what none of them had a name for: listed stages last as long as the whole."""

    def __init__(self, progress: Callable[[str, float], None] | None) -> None:
        self.progress = progress or (lambda stage, seconds: None)
        self.start, self.told = time.perf_counter(), 0.0

    def __call__(self, stage: str, seconds: float) -> None:
        self.told += seconds
        self.progress(stage, seconds)

    def rest(self) -> None:
        self.progress("shrinking, rules, applying", max(0.0, time.perf_counter() - self.start - self.told))
