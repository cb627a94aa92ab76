"""How long is waited for other numbers of micro-batches where nobody said how long planning may take."""

from __future__ import annotations

import math
import time

LEAST_S = 15.0


class Patience:
    """Twice as long as the first plan took, and `LEAST_S` in any case: what comes of more is seldom better, and nobody knows how long it takes."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.until = math.inf

    def start(self) -> None:
        """There is a plan; from the first one on it counts."""
        if self.until == math.inf:
            now = time.perf_counter()
            self.until = now + max(LEAST_S, 2 * (now - self.began))

    def is_over(self, needs_s: float) -> bool:
        return time.perf_counter() + needs_s > self.until
