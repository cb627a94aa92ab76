"""What no plan of the same batch as more micro-batches takes less than, from the program that the plan of fewer was found with.

As more micro-batches a batch takes no less of anything but memory. By the prices here a kernel, and a collective, of part of the data takes no less than that part of
the time; parameters are gathered each time; gradients are reduced, and the optimizer steps, no less often than before; and where compute hides what is sent, the sum of maxima is no less than
the maximum of sums. What does get less is what a micro-batch has in memory. So the bound is of the same program with two rows of memory left: what the optimizer's step needs
(parameters, gradients, state), but for the batch itself; and what is there between micro-batches: parameters, state, and the sums of gradients, as large as
the devices that have samples of their own make them, or as what they are reduced to, which is then done at least twice as often.

Where that bound is as good as the plan, memory cost it nothing, and more micro-batches need not be tried.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import replace

from autopar.planner.formulation.instead import Instead
from autopar.planner.formulation.lower_bound import lower_bound_problem
from autopar.planner.formulation.memory_rows import IN_STEP
from autopar.planner.formulation.names import Names
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.formulation.wires import Wires
from autopar.planner.stages import Stages
from autopar.planner.views import View
from autopar.solver.frontier import Relaxation
from autopar.solver.problem import Key, Problem, Row

SECONDS = 10.0  # for one relaxation: what it may save is to plan more micro-batches


def bound_of_more(stages: Stages, instead: Instead | None = None) -> float:
    """Seconds, of as many micro-batches as `stages` planned one of; infinite where no number of them fits; 0 where its plan was found without a program that says it, or this takes too long.

    instead: the program's other form, which the bound then holds for as well."""
    if stages.bounding is None and stages.coarse is None:
        return 0.0
    began = time.perf_counter()
    stages.begin("bound of more micro-batches")
    try:
        bound_s = _of_the_whole(stages, instead) if stages.bounding is not None else _of_merged_axes(stages, instead)
    except TimeoutError:
        bound_s = 0.0
    stages.on_progress("bound of more micro-batches", time.perf_counter() - began)
    return bound_s


def _least_s(stages: Stages, problem: Problem) -> float:
    found = Relaxation(problem).at(stages.training.budget_bytes, replace(stages.left, seconds=SECONDS))
    return math.inf if found is None else found.tangent.at_s


def _of_the_whole(stages: Stages, instead: Instead | None) -> float:
    """From the program of all axes."""
    assert stages.bounding is not None
    (problem, names), graph, more = stages.bounding, stages.view().shrunk.graph, tuple[Row, ...]()
    if stages.wires is not None:
        problem = reduced_more_often(problem, names, stages.wires)
        more = (between_calls(problem, names, stages.view(), stages.training),)
    forms = (problem,) if instead is None else (problem, instead.problem(problem, names, graph))
    return min(_least_s(stages, at_the_step(form, names, more)) for form in forms)


def _of_merged_axes(stages: Stages, instead: Instead | None) -> float:
    """From a bound that does not know the axes; and from the program of all of them without what that one says is slower than the plan (`Stages.pruned`): as more micro-batches what was left out is faster by
    no more than the first bound is less."""
    assert stages.coarse is not None
    (f, merged, whole), graph = stages.coarse, stages.view().shrunk.graph
    names, problem = f.names, lower_bound_problem(f, merged, whole)
    forms: list[tuple[Problem, Instead | None]] = [(problem, None)]
    if instead is not None:
        other = lower_bound_problem(f, merged, whole, instead.choices(names, graph))
        forms.append((instead.problem(other, names, graph), instead))
    first_s = -math.inf if stages.bounding_faster is None else _least_s(stages, problem)
    bounds = []
    for coarse, other_form in forms:
        bound_s = _least_s(stages, at_the_step(coarse, names))
        if stages.bounding_faster is not None:
            faster, axes, known_s = stages.bounding_faster
            if other_form is not None:
                faster = other_form.problem(faster, axes, graph)
            left_s = _least_s(stages, at_the_step(faster, axes))
            bound_s = max(bound_s, min(left_s, known_s - max(0.0, first_s - bound_s)))
        bounds.append(bound_s)
    return min(bounds)


def at_the_step(problem: Problem, names: Names, more: tuple[Row, ...] = ()) -> Problem:
    """`problem` with the memory of the optimizer's step alone, but for the batch, and rows `more`."""

    def without_batch(row: Row) -> Row:
        return replace(row, terms=tuple((key, n) for key, n in row.terms if key[:2] != ("x", names.inputs)))

    return replace(problem, rows=(*(without_batch(row) for row in problem.rows if row.name == IN_STEP), *more), limits=())


def reduced_more_often(problem: Problem, names: Names, wires: Wires) -> Problem:
    """`problem`, where gradients may be reduced in each of twice as many micro-batches, before they are added up."""
    values = list(problem.values)
    for v, value in enumerate(values):
        wire, flow = wires.all[value.name], value.backward
        if wire.reduces and flow is not None:
            once = [arc for arc in flow.arcs if not arc.way]
            arcs = [arc for a in once for arc in (a, *wires.early(wire, a, names.nodes[v], often=2))]
            values[v] = replace(value, backward=replace(flow, arcs=tuple(arcs)))
    return replace(problem, values=tuple(values))


def between_calls(problem: Problem, names: Names, v: View, training: TrainingConfig) -> Row:
    """What a device holds between two micro-batches: parameters, the optimizer's state, sums of gradients."""
    graph, q = v.shrunk.graph, v.q
    updated = {q.tensor_rep[t.name] for n, t in graph.params.items() if n in training.trainable}
    terms: dict[Key, float] = defaultdict(float)
    for name, t in graph.params.items():
        c, options = names.storage[q.group[t.name]]
        times, trained, grad = q.tensor_times[t.name], q.tensor_rep[t.name] in updated, graph.grads.get(name)
        for i, o in enumerate(options):
            local = math.prod(o.placement.local_shape(names.mesh))
            terms["x", c, i] += times * local * (training.master_bytes + (training.state_bytes if trained else 0.0))
        if trained and grad is not None:
            value = names.value_of[q.group[grad]]
            of, nodes, itemsize = problem.values[value], names.nodes[value], names.itemsize[problem.values[value].name]
            for end in flow.supplies if (flow := of.backward or of.forward) else ():
                for s, n in enumerate(end.nodes):
                    terms["x", end.choice, s] += times * itemsize * math.prod(nodes[n].local_shape(names.mesh))
            for a, arc in enumerate(of.backward.arcs if of.backward is not None else ()):
                if arc.way:
                    made = itemsize * math.prod(nodes[arc.src].local_shape(names.mesh))
                    terms["e", value, 1, a] += times * (names.accumulated_bytes(value, arc, of.name, training.master_bytes) - made)
    return Row("between micro-batches", 0.0, tuple(terms.items()))
