"""The forms that a captured program has, of which its plan is for one: with the logits of its head, and without (`autopar.planner.loss_head`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from autopar.capture.fusions.table import logits_bytes
from autopar.errors import AutoparError
from autopar.plan.plan import Plan
from autopar.planner.loss_head import AUTO, CHUNKED, PLAIN, Form, better, is_chunked, may_matter
from autopar.runtime.pipeline import Seen
from autopar.solver.fold import Folded


def settled(form: str, given: Plan | None, by_hand: bool) -> bool | None:
    """Whether heads make no logits, as far as that is known before there is a plan. form: `loss_head=`; given: the plan that is passed; by_hand: a layout is."""
    if given is None:
        return form == CHUNKED if form != AUTO else False if by_hand else None
    chunked = is_chunked(given)
    if form != AUTO and chunked != (form == CHUNKED):
        raise AutoparError(
            f"loss_head={form!r} is passed, and the plan is of a program whose head makes {'no' if chunked else 'its'} logits",
            fix="leave loss_head= out, or make a plan with it",
        )
    return chunked


class Forms:
    """chunked: what is settled; least: the plan of the smallest peak is asked for, not the fastest. The second form is left out where it cannot matter on so many devices of this memory."""

    def __init__(self, program: Seen, chunked: bool | None, devices: int, budget_bytes: float, least: bool) -> None:
        self.of, self.least = {PLAIN: program}, least
        matters = chunked is None and may_matter(logits_bytes(program.captured), devices, budget_bytes, least)
        if matters and (other := program.chunked) is not None:
            self.of[CHUNKED] = other

    def planned(self, make: Callable[[Folded, Folded | None], Plan], least_s: Callable[[Folded], float], gap: float) -> Plan:
        """The better plan. make: of a program, and the one in another form of which it is to say `loss_head.OTHER_FORM`."""
        last = list(self.of.values())[-1].folded

        def planned(p: Folded, says_other: bool) -> Plan:
            return make(p, last if says_other else None)

        return better(tuple(Form(n, partial(planned, p.folded), partial(least_s, p.folded)) for n, p in self.of.items()), self.least, gap)

    def least_s(self, least_s: Callable[[Folded], float]) -> float:
        return min(least_s(p.folded) for p in self.of.values())

    def that(self, plan: Plan) -> Seen:
        """The form that `plan` is of."""
        return self.of[CHUNKED if CHUNKED in self.of and is_chunked(plan) else PLAIN]
