"""Whether the head under a loss makes its logits: a program has one form in which it does, and where a pattern is found another in which it does not (`autopar.capture.fusions`).

    "plain"     all logits are in memory, in float32 too
    "chunked"   they are made tile by tile, and once more in backward: four products in the head for three, and a tile's memory
    "auto"      both are planned, and the faster plan is taken, or the one that fits; of least memory, where that is asked for

Two programs are two integer programs. The second is not solved where all logits are less than a hundredth of a device's memory, or where no plan of it is faster than the plan
of the first, by one of two bounds. The least that its operators take on all devices. And, since but for the head both are the same program, that of the first whose head needs no memory
and takes what the second's takes at least (`autopar.planner.formulation.instead`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.errors import AutoparError
from autopar.plan.plan import Plan
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.none_faster import NoneFasterError, said
from autopar.rules.loss_head import FORWARD
from autopar.text.sizes import format_bytes
from autopar.text.times import format_time

PLAIN, CHUNKED, AUTO = FORMS = ("plain", "chunked", "auto")
SHARE = 0.01
OTHER_FORM = "other_form_bound_s"  # what no plan of the other form takes less than; of a plan's solver, where it was asked for


def checked(form: object) -> str:
    """`loss_head=` of who plans or compiles."""
    if not isinstance(form, str) or form not in FORMS:
        raise AutoparError(
            f"loss_head={form!r} is no form of a head under a loss",
            fix='pass "auto" to have it planned, "chunked" to make logits tile by tile wherever a linear layer under a cross-entropy is found, or "plain"',
        )
    return form


def is_chunked(plan: Plan) -> bool:
    """Whether a plan is of a program whose head makes no logits."""
    return FORWARD in plan.targets.values()


def may_matter(logits_bytes: float, devices: int, budget_bytes: float, least: bool = False) -> bool:
    """Whether logits of so many bytes are worth a second plan. least: of the smallest peak, whatever the budget."""
    return logits_bytes > 0 and (least or logits_bytes / devices > SHARE * budget_bytes)


@dataclass(frozen=True)
class Form:
    """A program that may be planned. planned: its plan; whether that is to say what `OTHER_FORM` is. least_s: what its operators take at least."""

    name: str
    planned: Callable[[bool], Plan]
    least_s: Callable[[], float] = lambda: 0.0


def better(
    forms: tuple[Form, ...],
    least: bool = False,
    gap: float = 0.0,
    is_late: Callable[[], bool] = lambda: False,
    below_s: float = math.inf,
) -> Plan:
    """The faster plan of those of a program's forms, or the one of the smaller peak, which says what the others take; its bound is of all forms. gap: relative; what can be
    faster by no more is not planned. is_late: whether to do with the plan that there is. below_s: what a plan has to take less than to be of use. Raises the last form's InfeasibleError
    where none fits, NoneFasterError where those that may fit are too slow."""
    if len(forms) == 1:
        return forms[0].planned(False)  # which may be a plan that says nothing of times: a hand layout's, that was given
    told: dict[str, str] = {}
    bound_s: list[float] = []
    best: tuple[Form, Plan] | None = None
    failed: InfeasibleError | None = None
    is_slow = False
    at_least_s = 0.0  # what no plan of the next form takes less than
    for form in forms:
        enough_s = below_s if best is None else min(below_s, best[1].predicted["step_time_s"] * (1 - gap))
        if bound_s and not least:
            if at_least_s < enough_s:
                at_least_s = max(at_least_s, form.least_s())
            if at_least_s >= enough_s:
                told[form.name] = said(at_least_s, enough_s)
                bound_s.append(at_least_s)
                continue
        if best is not None and is_late():
            told[form.name] = "not tried, for want of time"
            bound_s.append(form.least_s())
            continue
        try:
            plan = form.planned(form is not forms[-1] and not least)
        except NoneFasterError as e:
            bound_s.append(max(e.bound_s, form.least_s()))
            at_least_s, is_slow = e.other_form_s, True
            told[form.name] = said(bound_s[-1], enough_s)
            continue
        except InfeasibleError as e:
            failed, told[form.name] = e, f"does not fit, {format_bytes(e.shortfall_bytes)} too much"
            continue
        except AutoparError:  # for want of time: what another form came to stands
            if best is None and failed is None:
                raise
            told[form.name] = "no plan was found"
            bound_s.append(form.least_s())
            continue
        bound_s.append(float(plan.solver.get("bound_s", math.inf)))
        at_least_s = float(plan.solver.get(OTHER_FORM, 0.0))
        told[form.name] = f"{format_time(plan.predicted['step_time_s'])}, {format_bytes(plan.predicted['peak_memory_bytes'])}"
        if best is None or _figure(plan, least) < _figure(best[1], least):
            best = form, plan
    if best is None:
        if is_slow:
            raise NoneFasterError(min(bound_s))
        assert failed is not None
        raise failed
    solver = {**best[1].solver, "loss_head": "; ".join(f"{name}: {what}" for name, what in told.items())}
    if not least and min(bound_s) < float(solver.get("bound_s", 0.0)):
        solver |= {"bound_s": min(bound_s), "gap": 1 - min(bound_s) / best[1].predicted["step_time_s"]}
    return replace(best[1], solver=solver).answering_as(best[1])


def _figure(plan: Plan, least: bool) -> float:
    return plan.predicted["peak_memory_bytes" if least else "step_time_s"]
