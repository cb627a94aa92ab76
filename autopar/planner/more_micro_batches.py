"""What no plan of the same batch as more micro-batches takes less than, from the program that the plan of fewer was found with.

As more micro-batches a batch takes no less of anything but memory. By the prices here a kernel, and a collective, of part of the data takes no less than that part of
the time; parameters are gathered each time, so twice as often at least, or stay where they were gathered; gradients are reduced, and the optimizer steps, no less often than before; and where compute hides what is sent, the sum of maxima is no less than
the maximum of sums. What does get less is what a micro-batch has in memory. So the bound is of the same program with two rows of memory left: what the optimizer's step needs
(parameters, gradients, state), but for the batch itself; and what is there between micro-batches: parameters, state, and the sums of gradients, as large as
the devices that have samples of their own make them, or as what they are reduced to, which is then done at least twice as often.

Where that bound is as good as the plan, memory cost it nothing, and more micro-batches need not be tried.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.planner.formulation.instead import Instead
from autopar.planner.formulation.lower_bound import at_the_step
from autopar.planner.formulation.more_often import more_often
from autopar.planner.stages import Stages
from autopar.solver.frontier import Relaxation
from autopar.solver.problem import Problem

SECONDS = 10.0  # for one relaxation: what it may save is to plan more micro-batches


def bound_of_more(stages: Stages, instead: Instead | None = None, enough_s: float = 0.0) -> float:
    """Seconds, of as many micro-batches as `stages` planned one of; infinite where no number of them fits; 0 where its plan was found without a program that says it, or this takes too long.

    instead: the program's other form, which the bound then holds for as well. enough_s: what cannot come to that much is not looked for."""
    if stages.bounding_more is None and stages.coarse is None:
        return 0.0
    with stages.timed("bound of more micro-batches"):
        try:
            return _bound_s(stages, instead, enough_s)
        except TimeoutError:
            return 0.0


def _least_s(stages: Stages, problem: Problem) -> float:
    found = Relaxation(problem).at(stages.training.budget_bytes, replace(stages.left, seconds=SECONDS))
    return math.inf if found is None else found.tangent.at_s


def _bound_s(stages: Stages, instead: Instead | None, enough_s: float) -> float:
    """From the program of all axes, or what was left of it, and from a bound that does not know the axes. What was left out of the first is faster, as more micro-batches, by no
    more than the second is less."""
    graph, coarse, whole = stages.view().shrunk.graph, stages.coarse, stages.bounding_more
    least_s = math.inf
    for other in (None,) if instead is None else (None, instead):
        bound_s = 0.0
        if coarse is not None:
            bound_s = _least_s(stages, at_the_step(stages.coarse_problem(other), coarse[0].names))
        if whole is not None and whole.with_left_out(math.inf, bound_s) >= enough_s:
            problem = whole.problem if other is None else other.problem(whole.problem, whole.names, graph)
            more_s = _least_s(stages, more_often(problem, whole, stages.view().shrunk, stages.training))
            bound_s = max(bound_s, whole.with_left_out(more_s, bound_s))
        least_s = min(least_s, bound_s)
        if least_s < enough_s:  # which the other form would not change
            break
    return least_s
