"""The planner's answer to a baseline: the best plan within the baseline's simulated peak, priced by the same simulator.

The simulator counts some memory that the integer program does not (`docs/architecture.md`, "Not there yet"). Where a plan's simulated peak comes out higher
than the baseline's, the planner is asked again for less, a few times; what it was asked for at last is in the result.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

from autopar.errors import AutoparError
from autopar.offload_wish import Offload
from autopar.plan import Plan
from autopar.planning import plan_graph
from autopar.solver.fold import fold
from autopar.solver.solve import Limits
from benchmarks.baselines.program import Program

TRIES = 6
CLOSE = 1e-3  # relative: so much more memory is the same memory
EQUAL = 1e-6  # relative: so much more time is the same time


class Ours:
    """Plans within a peak, each asked for once. media: where they may keep activations besides the device."""

    def __init__(self, program: Program, fusion: str, media: tuple[str, ...], seconds: float, gap: float) -> None:
        self.program, self.fusion, self.limits = program, fusion, Limits(gap=gap, seconds=seconds)
        self.folded = fold(program.graph)
        self.setting = Offload.of("host", program.cluster).within(program.setting, program.cluster) if media else program.setting
        self.known: dict[float, tuple[Plan | None, dict[str, Any]]] = {}

    def within(self, peak_bytes: float) -> tuple[Plan | None, dict[str, Any]]:
        """A plan whose simulated peak is no higher, and what is to be said of it; None if none was found."""
        if peak_bytes not in self.known:
            self.known[peak_bytes] = self._within(peak_bytes)
        return self.known[peak_bytes]

    def _within(self, peak_bytes: float) -> tuple[Plan | None, dict[str, Any]]:
        p, budget, start = self.program, peak_bytes, time.perf_counter()
        said: dict[str, Any] = {}
        for tries in range(1, TRIES + 1):
            try:
                setting = replace(self.setting, budget_bytes=budget)
                plan = plan_graph(self.folded, p.mesh_axes, p.cluster, setting, self.limits).plan
            except AutoparError as e:
                return None, said | {"why": e.what, "asked_bytes": budget, "tries": tries, "seconds": time.perf_counter() - start}
            point = p.point(plan, self.fusion)
            said = {
                **asdict(point), "predicted_step_s": plan.predicted["step_time_s"], "predicted_peak_bytes": plan.predicted["peak_memory_bytes"],
                "gap": plan.solver["gap"], "asked_bytes": budget, "tries": tries, "seconds": time.perf_counter() - start,
            }  # fmt: skip
            if point.peak_bytes <= peak_bytes * (1 + CLOSE):
                return plan, said
            budget = min(budget * peak_bytes / point.peak_bytes, budget - (point.peak_bytes - peak_bytes) / 2)
        return None, said | {"why": f"the simulated peak stays higher after {TRIES} tries"}


def verdict(theirs_s: float, mine: dict[str, Any] | None) -> dict[str, Any]:
    """ratio: our time by theirs; dominated: whether it is at most one, within the plan's own gap."""
    if mine is None:
        return {"ratio": None, "dominated": False}
    ratio = mine["step_s"] / theirs_s
    return {"ratio": ratio, "dominated": ratio <= 1 + mine["gap"] + EQUAL}
