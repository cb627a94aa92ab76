"""Which mesh, where none is asked for.

The cluster's nodes x devices first. An axis of it has one role in a good plan, and a part of a node may have one of its own (tensor parallelism over two devices of eight, data
over the rest); so the same devices are tried as (nodes x devices / k) x k too, for every k that divides a node's devices, largest first. Each is a program of its own. They are
left out where they could save little: what communication adds to the plan that was found is all that another split of the devices might take away, unless memory makes it run
something again or keep it elsewhere: where it is not nearly used up, what runs again does so because that is as fast. Where the number of micro-batches is to be found as well, others are tried with the one that is best on the first, and the best of them with others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.planner.axes import said
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.micro_batches import AUTO
from autopar.planner.none_faster import NoneFasterError
from autopar.planner.none_faster import said as none_faster
from autopar.text.times import format_time

WORTH = 0.01  # of a step, that communication adds, from which other meshes are tried
FULL = 0.8  # of the budget, from which memory may be why something runs again
SAME = 1e-5  # relative: a plan that is faster by less is no other plan, and the first mesh's gap is its own
TRIED = "meshes"  # of a plan's solver: what was tried


def others(cluster: Cluster) -> Iterator[dict[str, int]]:
    """The cluster's devices on two axes, cut elsewhere than between nodes."""
    for k in range(cluster.devices_per_node - 1, 1, -1):
        if cluster.devices_per_node % k == 0:
            yield {"dp": cluster.size // k, "tp": k}


def may_be_better(plan: Plan) -> bool:
    """Whether another split of the devices could save what is worth it."""
    told = plan.predicted
    is_full = told.get("peak_memory_bytes", math.inf) > FULL * told.get("budget_bytes", 0.0)
    return (is_full and bool(plan.recompute or plan.offload)) or told.get("exposed_s", math.inf) > WORTH * told["step_time_s"]


def best_of(
    first: Mapping[str, int],
    rest: Iterable[dict[str, int]],
    planned: Callable[[Mapping[str, int], int | str], Plan],
    number: int | str,
    left_s: Callable[[], float] = lambda: math.inf,
    by_hand: Callable[[Mapping[str, int], int | str], Plan] | None = None,
) -> Plan:
    """The fastest plan on `first` and, where they may be better, on `rest`; it says what the others take. planned: on a mesh, with a number of micro-batches; left_s: seconds that planning
    may still take; by_hand: as `planned`, soon, since it is a hand layout: where less is left than the first mesh took. Raises what planning on `first` raises: what fits on no plan
    of that hardly fits elsewhere."""
    best, axes = planned(first, number), first
    took_s = float(best.solver.get("seconds", 0.0))
    tries = best.micro_batches if number == AUTO else number
    tried = {said(first): format_time(best.predicted["step_time_s"])}
    meshes = list(rest) if may_be_better(best) else []
    if left_s() < took_s:
        meshes.reverse()  # there may be time for one: tensors over few devices are nearest to the first's data over all
    for other in meshes:
        left = left_s()
        if left <= 0:
            tried[said(other)] = "not tried, for want of time"
            continue
        try:
            plan = by_hand(other, tries) if by_hand is not None and left < took_s else planned(other, tries)
        except InfeasibleError:
            tried[said(other)] = "does not fit"
            continue
        except NoneFasterError as e:
            tried[said(other)] = none_faster(e.bound_s, best.predicted["step_time_s"])
            continue
        except AutoparError:  # for want of time
            tried[said(other)] = "no plan was found"
            continue
        tried[said(other)] = format_time(plan.predicted["step_time_s"])
        if plan.predicted["step_time_s"] < (1 - SAME) * best.predicted["step_time_s"]:
            best, axes = plan, other
    if axes is not first and tries != number and left_s() > took_s:
        best = planned(axes, number)
    if len(tried) == 1:
        return best
    return replace(best, solver={**best.solver, TRIED: "; ".join(f"{mesh}: {what}" for mesh, what in tried.items())}).answering_as(best)
