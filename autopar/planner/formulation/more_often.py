"""A program of one micro-batch, as twice as many or more, each of half the samples or fewer: what becomes of it that is no faster (`autopar.planner.more_micro_batches` says why)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.planner.formulation.lower_bound import at_the_step
from autopar.planner.formulation.names import Names
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.formulation.wires import Wires
from autopar.solver.problem import Arc, Key, Problem, Row
from autopar.solver.shrink import Shrunk


@dataclass(frozen=True)
class Bounding:
    """A program of all axes, whose relaxation bounds all plans: of one step. below_s: only those that take less, since what takes no less by a bound of `lower_s` was left out.
    make: the relaxation, when it is asked for."""

    make: Callable[[], Problem]
    names: Names
    wires: Wires
    below_s: float = math.inf
    lower_s: float = -math.inf

    @cached_property
    def problem(self) -> Problem:
        return self.make()

    def with_left_out(self, bound_s: float, lower_s: float) -> float:
        """What no plan takes less than. bound_s: of a program made of this one; lower_s: in place of the bound that something was left out by."""
        return bound_s if self.below_s == math.inf else min(bound_s, self.below_s - max(0.0, self.lower_s - lower_s))


def more_often(problem: Problem, whole: Bounding, small: Shrunk, training: TrainingConfig) -> Problem:
    """`problem`, which is `whole`'s or its other form, of one micro-batch, as twice as many or more."""
    names, wires = whole.names, whole.wires
    problem = reduced_more_often(gathered_more_often(problem, wires, training), names, wires)
    return at_the_step(problem, names, (between_calls(problem, names, wires, small, training),))


def gathered_more_often(problem: Problem, wires: Wires, training: TrainingConfig) -> Problem:
    """`problem`, where parameters are gathered in each of twice as many micro-batches, or once for all of them."""
    values = list(problem.values)
    for v, value in enumerate(values):
        if not wires.all[value.name].gathered:
            continue
        arcs = [_twice(arc) for arc in value.forward.arcs]
        if training.in_a_row == 1 and training.keeps_gathered:
            arcs += [replace(arc, stays=True, once=arc.times) for arc in value.forward.arcs if arc.times]
        backward = value.backward and replace(value.backward, arcs=tuple(map(_twice, value.backward.arcs)))
        values[v] = replace(value, forward=replace(value.forward, arcs=tuple(arcs)), backward=backward)
    return replace(problem, values=tuple(values))


def _twice(arc: Arc) -> Arc:
    return arc if arc.stays else replace(arc, times={a: 2 * t for a, t in arc.times.items()})


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


def between_calls(problem: Problem, names: Names, wires: Wires, small: Shrunk, training: TrainingConfig) -> Row:
    """What a device holds between two micro-batches: parameters, the optimizer's state, sums of gradients, and what stays gathered."""
    graph, q = small.graph, names.symmetry
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
    for value, of in enumerate(problem.values):
        for a, arc in enumerate(of.forward.arcs):
            if arc.stays:
                there = math.prod(names.nodes[value][arc.dst].local_shape(names.mesh))
                terms["e", value, 0, a] += wires.all[of.name].count * names.itemsize[of.name] * there
    return Row("between micro-batches", 0.0, tuple(terms.items()))
