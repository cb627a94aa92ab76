"""How long is waited for a better plan where nobody said how long planning may take."""

from __future__ import annotations

import math
import time

LEAST_S = 15.0
EACH, ALL = 1.5, 3.0  # times what the first plan took


class Patience:
    """Beside the first plan, each other number of micro-batches, mesh and form may take `EACH` times what that took, and no number is begun after `ALL` times it; but `LEAST_S` in any case.
    What comes of them is seldom better, and nobody knows how long they take."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.until = self.each_s = math.inf

    def start(self) -> None:
        """There is a plan; from the first one on it counts."""
        if self.until == math.inf:
            now = time.perf_counter()
            self.each_s = max(LEAST_S, EACH * (now - self.began))
            self.until = now + max(LEAST_S, ALL * (now - self.began))

    def is_over(self, needs_s: float) -> bool:
        return time.perf_counter() + needs_s > self.until
