"""The planner's answer to a baseline: the best plan within the baseline's simulated peak, priced by the same simulator.

The simulator counts some memory that the integer program does not (`docs/architecture.md`, "Not there yet"). Where a plan's simulated peak comes out higher
than the baseline's, the planner is asked again for less, a few times; what it was asked for at last is in the result. Where the program has no plan within a
peak, its plan of least memory is taken: what it counts may be a little more than what is simulated, or measured, and that is what is compared.

All peaks are asked of one `autopar.planner.budgets.Budgets`, as `plan.frontier()` does: the program is formulated once and its relaxations serve every
budget. What that finds for one budget may be farther from its bound than a plan of that budget alone; where it is slower than the baseline, such a plan is made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from autopar.errors import AutoparError
from autopar.plan.plan import Plan
from autopar.planner.budgets import Budgets
from autopar.planner.collecting import without_garbage_collection
from autopar.planner.found import Found
from autopar.planner.offload import Offload
from autopar.planner.planning import Step, plan_graph, plan_of
from autopar.solver.solve import Limits
from benchmarks.baselines.program import Program

TRIES = 6
CLOSE = 1e-3  # relative: so much more memory is the same memory
EQUAL = 1e-6  # relative: so much more time is the same time


class Ours:
    """Plans within a peak, each asked for once. media: where they may keep activations besides the device; seconds: of the solver, for one plan."""

    def __init__(self, program: Program, fusion: str, media: tuple[str, ...], seconds: float, gap: float) -> None:
        self.program, self.fusion, self.limits = program, fusion, Limits(gap=gap, seconds=seconds)
        training = Offload.of("host", program.cluster).within(program.training, program.cluster) if media else program.training
        self.step = Step.of(program.graph, program.mesh_axes, program.cluster, training, self.limits, None, None)
        self.known: dict[float, tuple[Plan | None, dict[str, Any]]] = {}
        self.alone: dict[float, tuple[Plan | None, dict[str, Any]]] = {}
        self.budgets: Budgets | None = None
        self.smallest: Found | None = None

    def within(self, peak_bytes: float, theirs_s: float = math.inf) -> tuple[Plan | None, dict[str, Any]]:
        """A plan whose simulated peak is no higher, and what is to be said of it; None if none was found. theirs_s: time that it had better not exceed."""
        if peak_bytes not in self.known:
            self.known[peak_bytes] = self._within(peak_bytes, self.of_all_budgets)
        plan, said = self.known[peak_bytes]
        if plan is not None and not verdict(theirs_s, said)["dominated"] and peak_bytes not in self.alone:
            self.alone[peak_bytes] = self._within(peak_bytes, self.of_one_budget)
            self.known[peak_bytes] = min(self.known[peak_bytes], self.alone[peak_bytes], key=lambda found: found[1].get("step_s", math.inf))
        return self.known[peak_bytes]

    def of_one_budget(self, budget_bytes: float) -> Plan:
        p, training = self.program, replace(self.step.training, budget_bytes=budget_bytes)
        return plan_graph(self.step.folded, p.mesh_axes, p.cluster, training, self.limits).plan

    def of_all_budgets(self, budget_bytes: float) -> Plan:
        stages = self.step.stages
        stages.start = time.perf_counter()
        with self.step.in_time(), without_garbage_collection():
            self.budgets = self.budgets or Budgets(stages)
            found = self.budgets.ask(budget_bytes)
            if found:
                best = self.budgets.bounded(min(found, key=lambda a: a.time_s)).item
            else:
                stages.start = time.perf_counter()
                best = self.smallest = self.smallest or self.budgets.least()
        return plan_of(self.step, best, budget_bytes)

    def _within(self, peak_bytes: float, planned: Callable[[float], Plan]) -> tuple[Plan | None, dict[str, Any]]:
        budget, start = peak_bytes, time.perf_counter()
        said: dict[str, Any] = {}
        for tries in range(1, TRIES + 1):
            try:
                plan = planned(budget)
            except AutoparError as e:
                return None, {"why": e.what, "asked_bytes": budget, "tries": tries, "seconds": time.perf_counter() - start}
            point = self.program.point(plan, self.fusion, True)
            said = {
                **asdict(point), "predicted_step_s": plan.predicted["step_time_s"], "predicted_peak_bytes": plan.predicted["peak_memory_bytes"],
                "gap": plan.solver["gap"], "asked_bytes": budget, "tries": tries, "seconds": time.perf_counter() - start,
            }  # fmt: skip
            if point.peak_bytes <= peak_bytes * (1 + CLOSE):
                return plan, said
            if why := too_small(plan, budget):
                if planned == self.of_all_budgets:
                    return self._within(peak_bytes, self.of_one_budget)
                return None, {"why": why, "asked_bytes": budget, "tries": tries, "seconds": said["seconds"]}
            budget = min(budget * peak_bytes / point.peak_bytes, budget - (point.peak_bytes - peak_bytes) / 2)
        return None, {"why": f"the simulated peak stays higher after {TRIES} tries", "tries": TRIES, "seconds": said["seconds"]}


def too_small(plan: Plan, budget_bytes: float) -> str:
    """Why no other plan is asked for: `plan`, which takes more than the budget, is that of least memory already. Empty where it is not."""
    over = plan.predicted["peak_memory_bytes"] / budget_bytes - 1
    return f"No plan fits: {over * budget_bytes / 1e6:.2f} MB too much" if over > EQUAL else ""


def verdict(theirs_s: float, mine: dict[str, Any] | None) -> dict[str, Any]:
    """ratio: our time by theirs; dominated: whether it is at most one, within the plan's own gap. mine: what was said of our plan, if there is one."""
    if mine is None or "step_s" not in mine:
        return {"ratio": None, "dominated": False}
    ratio = mine["step_s"] / theirs_s
    return {"ratio": ratio, "dominated": ratio <= 1 + mine["gap"] + EQUAL}
