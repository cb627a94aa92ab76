"""The numbers of a plan that the page's headline and its comparison say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.plan.plan import Plan
from autopar.report.units import count, format_bytes, percent
from autopar.text.times import format_time
from autopar.timeline.expand import Timeline


@dataclass(frozen=True)
class Subject:
    """A plan that a page is about: what it is called, and its step in time."""

    name: str
    plan: Plan
    timeline: Timeline


@dataclass(frozen=True)
class Fact:
    """key: stays the same from version to version; value: in the base unit; better: -1 where less is better, 1 where more is, 0 where neither."""

    key: str
    title: str
    value: float
    said: str
    note: str
    better: int = -1


def facts(s: Subject) -> list[Fact]:
    """What is known of the plan, the most important first."""
    p, plan, t = s.plan.profile, s.plan, s.timeline
    assert p is not None
    step_s = plan.predicted.get("step_time_s", t.seconds)
    devices = plan.mesh.size
    out = [Fact("step_time_s", "Step time", step_s, format_time(step_s), _stages(plan))]
    if p.tokens_a_call or p.samples_a_call:
        n, what = (p.tokens_a_call, "Tokens/s") if p.tokens_a_call else (p.samples_a_call, "Samples/s")
        out.append(
            Fact(
                "throughput",
                what,
                n / step_s,
                count(n / step_s),
                f"{count(n / step_s / devices)} a device, {devices} {'devices' if devices > 1 else 'device'}",
                1,
            )
        )
    if p.peak_flops and p.model_flops:
        mfu = p.model_flops / (step_s * devices * p.peak_flops)
        peak = f"of {p.peak_flops / 1e12:,.0f} TFLOP/s; what runs again is not counted"
        out.append(Fact("mfu", "MFU", mfu, percent(mfu), peak, 1))
    out.append(
        Fact(
            "exposed_s",
            "Exposed communication",
            t.exposed_s,
            format_time(t.exposed_s),
            f"{percent(t.exposed_s / t.seconds)} of the replayed step, {format_time(t.seconds)}",
        )
    )
    budget, peak_bytes = plan.predicted.get("budget_bytes", 0.0), plan.predicted.get("peak_memory_bytes", 0.0)
    if peak_bytes:
        share = f"{percent(peak_bytes / budget)} of the budget of {format_bytes(budget)}" if budget else "no budget"
        out.append(Fact("peak_memory_bytes", "Peak memory", peak_bytes, format_bytes(peak_bytes), share))
    if "gap" in plan.solver:
        gap, bound = float(plan.solver["gap"]), float(plan.solver.get("bound_s", 0.0))
        out.append(
            Fact("gap", "Gap to the lower bound", gap, percent(gap), f"no plan is faster than {format_time(bound)}" if bound else "")
        )
    return out


def _stages(plan: Plan) -> str:
    known = [(s, plan.predicted[f"{s}_s"]) for s in ("forward", "backward", "optimizer") if f"{s}_s" in plan.predicted]
    return ", ".join(f"{s} {format_time(x)}" for s, x in known)


def subject(name: str, plan: Plan) -> Subject:
    """Raises AutoparError for a plan without a profile."""
    return Subject(name, plan, plan.timeline())


def largest(subjects: list[Subject], of: Callable[[Subject], float]) -> float:
    """What charts side by side are drawn to."""
    return max(map(of, subjects), default=0.0) or 1.0
