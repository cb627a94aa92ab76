"""A bound for every plan on a mesh, whatever its axes: all work and all bytes divided evenly over all devices, and links free.

What remains is what to keep and what to make again under the memory of a device, with policies as shares of layers. Any plan computes at least
what each of its clusters computes under its fastest strategy, holds at least a device's share of every tensor, and waits for no less than
nothing; so the optimum of this program, a linear one, is no more than any plan's time. Its memory rows are relaxed ones (`Problem.relaxed_rows`), since layers may
have policies of their own: a first layer that alone runs again reads what comes from outside, where a mean over layers needs some of what they hand on.

It is used where the program of the mesh itself is too large to be solved (three axes and more).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from autopar.cost import Cost
from autopar.graph.graph import Graph, Op
from autopar.planner.formulation.accounts import account
from autopar.planner.formulation.formulated import Formulated
from autopar.planner.formulation.memory_rows import IN_STEP, rows
from autopar.planner.formulation.names import Names
from autopar.planner.formulation.problem import Formulator
from autopar.planner.formulation.training import optimizer_s
from autopar.planner.formulation.where_kept import times
from autopar.rules.grammar import Rule
from autopar.solver.problem import Choice, End, Flow, Policy, Problem, Rerun, Row, Value
from autopar.solver.shrink import Shrunk


def lower_bound_problem(f: Formulated, problem: Problem, whole: Formulator, free: Collection[int] = ()) -> Problem:
    """The relaxed program. f, problem: a formulation of the step on a mesh with the same devices (its axes may be merged);
    whole: a formulator for the mesh itself, of which only the clusters are used; free: those that take nothing."""
    least = _least(whole, free)
    c0 = f.fixed
    choices = [Choice(c.name, ("ideal",), ({},)) for c in problem.choices]
    spent: dict[int, float] = defaultdict(float)
    backward = account(1, "compute")
    by_name = {op.name: op for op in whole.program.q.classes.ops}
    for a, seconds in least.items():
        spent[a] += seconds
    for t in f.program.q.classes.params.values():
        if t.name in f.program.trained:
            share = f.program.q.count(t.name) * optimizer_s(f.cost, f.training, t.numel / f.mesh.size)
            spent[account(2, "compute")] += share
    choices[c0] = replace(choices[c0], times=(dict(spent),))
    values = [
        Value(
            v.name,
            ("",),
            _flow(v.forward),
            None if v.backward is None else _flow(v.backward),
            _policies(f, v),
        )
        for v in problem.values
    ]
    reruns = []
    for (name, segment), r in zip(f.names.reruns, problem.reruns, strict=True):
        recompute = min(t.get(backward, 0.0) for t in whole.times.recompute(by_name[name], segment)[1])
        reruns.append(Rerun(r.name, r.choice, ({backward: recompute},), _ends(r.reads), _ends(r.makes)))
    relaxed = Problem(problem.stages, problem.accounts, tuple(choices), tuple(values), tuple(reruns), (), problem.budget_bytes)
    return rows(f, relaxed, is_bound=True).relaxed


def least_s(small: Shrunk, rules: Mapping[str, Rule], cost: Cost) -> float:
    """What no plan takes less than, operator by operator: soon known, where the program of the bound takes too long."""
    return sum(small.times[op.name] * cost.least_s(op, rules[op.name]) for op in not_of_parameters(small.graph))


def not_of_parameters(graph: Graph) -> Iterator[Op]:
    """Operators but for those whose operands follow from a parameter alone, which go where who reads them is."""
    params = {t.name for t in graph.params.values()}
    for op in graph.ops:
        if op.inputs and all(t.name in params for t in op.inputs):
            params |= {t.name for t in op.outputs if t is not None}
        else:
            yield op


def _least(whole: Formulator, free: Collection[int]) -> dict[int, float]:
    """Account -> the least that the operators of all clusters take together."""
    found: dict[int, float] = defaultdict(float)
    if not whole.choices:
        whole.cluster_choices()
    for _, _, taken in (c for i, c in enumerate(whole.choices) if i not in free):
        for a in {a for t in taken for a in t}:
            found[a] += min(t.get(a, 0.0) for t in taken)
    return found


def _policies(f: Formulated, value: Value) -> tuple[Policy, ...]:
    """How a value may be kept, of which a device has its share; what carries it elsewhere is free."""
    media = dict.fromkeys(policy.medium for policy in value.policies)
    spent = times(f.program, f.cost, value.name, f.wires[value.name].nbytes / f.mesh.size)
    return tuple(Policy(0, medium, spent) for medium in media)


def _flow(f: Flow) -> Flow:
    def ends(xs: tuple[End, ...]) -> tuple[End, ...]:
        return tuple(dict.fromkeys(End(e.choice, (0,)) for e in xs))

    return Flow((), ends(f.supplies), ends(f.demands))


def _ends(pairs: tuple[tuple[int, tuple[int, ...]], ...]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple(dict.fromkeys((v, (0,)) for v, _ in pairs))


def at_the_step(problem: Problem, names: Names, more: tuple[Row, ...] = ()) -> Problem:
    """`problem` with the memory of the optimizer's step alone, but for the batch, and rows `more`."""

    def without_batch(row: Row) -> Row:
        return replace(row, terms=tuple((key, n) for key, n in row.terms if key[:2] != ("x", names.inputs)))

    return replace(problem, rows=(*(without_batch(row) for row in problem.rows if row.name == IN_STEP), *more), limits=())
