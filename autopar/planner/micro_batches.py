"""How many micro-batches a batch is run as, one after the other.

A plan of m micro-batches is the plan of one of them, whose gradients are reduced once in m (`TrainingConfig.micro_batches`): a call takes m times as long, and memory is of
one micro-batch's activations, with unreduced gradients beside them. What is fastest is not known before it is planned: fewer activations at a time allow less to be made
again and parameters to be spread less, but parameters are gathered m times, and kernels are smaller. So "auto" plans each of 1, 2, 4, ..., from those on that leave room in memory
(`autopar.planner.roomy`) to both sides, but for those that cannot be faster than what was found:

    m x sum over operators of the least that each takes on all devices     (`formulation.lower_bound.least_s`)
    what no plan of more micro-batches takes less than                     (`more_micro_batches`)

No plan over all that were tried takes less than the least of their bounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Generic, TypeVar

from autopar.errors import AutoparError
from autopar.plan.plan import Plan
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.none_faster import NoneFasterError, said
from autopar.text.times import format_time

AUTO = "auto"
T = TypeVar("T")


def checked(number: object) -> int | str:
    """`micro_batches=` of who plans: a number, or AUTO."""
    if number == AUTO:
        return AUTO
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise AutoparError(f"micro_batches={number!r} is no number of micro-batches", fix='pass 1 or more, or "auto" to have it planned')
    return number


def candidates(batch: int) -> list[int]:
    """1, 2, 4, ... up to one sample each; in place of a power of two the next number that divides the batch, if that is less than twice it."""
    powers = [2**k for k in range(batch.bit_length()) if 2**k <= batch]
    return list(dict.fromkeys(next((m for m in range(p, min(2 * p, batch + 1)) if batch % m == 0), p) for p in powers))


def from_the_middle(numbers: Sequence[int], first: int) -> list[int]:
    """`first`, then those next to it, the lower one before."""
    at = numbers.index(first)
    return sorted(numbers, key=lambda m: (abs(numbers.index(m) - at), m))


def of_the_call(plan: Plan, number: int) -> Plan:
    """`plan`, of one micro-batch, as that of a call of so many: its times are the call's."""
    if number == 1:
        return plan

    def times(figures: dict[str, T]) -> dict[str, T]:
        return {k: v * number if _is_time(k) and isinstance(v, (int, float)) else v for k, v in figures.items()}  # type: ignore[misc]

    return replace(plan, micro_batches=number, predicted=times(plan.predicted), solver=times(plan.solver)).answering_as(plan)


def _is_time(key: str) -> bool:
    return key.endswith("_s") and not key.endswith("_per_s")


@dataclass(frozen=True)
class Tried(Generic[T]):
    """What planning so many micro-batches gave. plan: None where there is none; bound_s: no plan takes less; why: there is no plan; made: what it was planned from."""

    number: int
    plan: Plan | None
    bound_s: float
    why: str
    made: T | None

    @staticmethod
    def left_out(number: int, bound_s: float) -> Tried[T]:
        """Not planned, or with no plan, since none takes less than `bound_s`."""
        return Tried(number, None, bound_s, f"no less than {format_time(bound_s)}" if math.isfinite(bound_s) else "does not fit", None)

    @staticmethod
    def none_faster(number: int, bound_s: float, enough_s: float) -> Tried[T]:
        """Planned as what has to take less than `enough_s`, and nothing was found. What it was planned from is not kept."""
        return Tried(number, None, bound_s, said(bound_s, enough_s), None)

    @property
    def seconds(self) -> float:
        return math.inf if self.plan is None else self.plan.predicted["step_time_s"]

    @property
    def said(self) -> str:
        return self.why if self.plan is None else format_time(self.seconds)


def told(tried: Iterable[Tried[T]]) -> str:
    """ "1: 577.0 ms; 2: 566.7 ms; 4, 8: no less than 566.6 ms"."""
    alike = groupby(tried, lambda t: (t.plan is None, t.said))
    return "; ".join(f"{', '.join(str(t.number) for t in same)}: {said}" for (_, said), same in alike)


def fastest(
    numbers: Iterable[int],
    task: Callable[[int], T],
    least_s: Callable[[int, T], float],
    planned: Callable[[int, T], Plan],
    is_late: Callable[[float], bool] = lambda needs_s: False,
    more_s: Callable[[int], float] = lambda m: 0.0,
    gap: float = 0.0,
    any_s: Callable[[], float] = lambda: 0.0,
) -> tuple[Plan, Tried[T]]:
    """The fastest plan of those for `numbers` of micro-batches, which says what the others take, and of which it is.

    task: the program of one micro-batch; least_s: what no plan of it takes less than, of a call; planned: its plan, of the call; is_late: whether fewer seconds are
    left than it is given: half of what another number took; then no more are tried, of which it is said that they were not; more_s: what no plan of a multiple of so many micro-batches takes less than, once that many were tried; gap: what the best may be slower by,
    relative, than what is left out; any_s: what no plan of any number takes less than. Raises InfeasibleError where none has a plan, of those that need the least; whatever
    else planning one raises, if that is one micro-batch, or if there is no other plan; NoneFasterError where all that was wanted is a faster one."""
    tried: list[Tried[T]] = []
    lacking: InfeasibleError | None = None
    refused: tuple[int, AutoparError] | None = None  # the fewest
    took_s = 0.0
    more: dict[int, float] = {}

    def more_than(number: int) -> float:
        if number not in more and not is_late(0.0):
            more[number] = more_s(number)
        return more.get(number, 0.0)

    for m in numbers:
        if refused is not None and m > refused[0]:
            continue
        best = min(tried, key=lambda t: t.seconds, default=None)
        fewer = [t for t in tried if m % t.number == 0]
        bound_s = max((more_than(t.number) for t in fewer), default=0.0)
        if best is not None and bound_s >= best.seconds * (1 - gap):
            tried.append(Tried.left_out(m, bound_s))
            continue
        if best is not None and best.plan is not None and is_late(took_s / 2):
            # The prices of parts of the data are no less than parts of the price.
            at_least_s = max([any_s(), bound_s, *(least_s(t.number, t.made) for t in fewer if t.made is not None)])
            tried.append(Tried(m, None, at_least_s, "not tried, for want of time", None))
            continue
        began = time.perf_counter()
        try:
            made = task(m)
            if best is not None and (bound_s := least_s(m, made)) >= best.seconds:
                tried.append(Tried.left_out(m, bound_s))
                continue
            plan = planned(m, made)
            tried.append(Tried(m, plan, float(plan.solver["bound_s"]), "", made))
            took_s = max(took_s, time.perf_counter() - began)
        except NoneFasterError as e:
            enough_s = math.inf if best is None else best.seconds * (1 - gap)
            tried.append(Tried.none_faster(m, max(e.bound_s, bound_s, any_s()), enough_s))
            took_s = max(took_s, time.perf_counter() - began)
        except InfeasibleError as e:
            if lacking is None or e.shortfall_bytes < lacking.shortfall_bytes:
                said = f"{e.constraint}, as {m} micro-batches"
                lacking = e if m == 1 else InfeasibleError(said, e.shortfall_bytes, e.remedy, may_be_parted=e.may_be_parted)
            tried.append(Tried.left_out(m, math.inf))
        except AutoparError as e:
            if best is not None and is_late(0.0):
                tried.append(Tried(m, None, any_s(), "no plan was found in time", None))
                continue
            if m == 1 and (best is None or best.plan is None):
                raise
            tried.append(Tried(m, None, math.inf, "the program cannot be run so", None))
            refused = m, e  # nor as more
    best = min(tried, key=lambda t: t.seconds)
    if best.plan is None:
        if lacking is not None:
            raise lacking
        if refused is not None:
            raise refused[1]
        raise NoneFasterError(min(t.bound_s for t in tried))
    bound_s = min(best.seconds, *(t.bound_s for t in tried)) if len(tried) > 1 else best.bound_s
    solver = {
        **best.plan.solver,
        "bound_s": bound_s,
        "gap": 1 - bound_s / best.seconds if best.seconds else 0.0,
        "micro_batches": told(sorted(tried, key=lambda t: t.number)),
    }
    return replace(best.plan, solver=solver).answering_as(best.plan), best
