"""Some operators of a program give way to others: a bound of what has the others, from a formulation of what has the first.

The rest of the program, and what it may do, is the same. So a plan of the other program is an answer of this one, where the operators that give way cost what those in their place
take at least, nothing is paid for bringing their operands and results elsewhere, and positions at which any of these lives are not looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.graph.graph import Graph
from autopar.planner.formulation.accounts import account
from autopar.planner.formulation.names import Names
from autopar.solver.problem import Flow, Key, Problem, Row


@dataclass(frozen=True, eq=False)
class Instead:
    """ops: that give way. forward_s, backward_s: what those in their place take at least. least_s: what each of the others takes at least, in all its copies."""

    ops: frozenset[str]
    forward_s: float
    backward_s: float
    least_s: Mapping[str, float]

    def choices(self, names: Names, graph: Graph) -> frozenset[int]:
        """Choices of clusters that have one of the operators, of `graph`, which `names` are of."""
        reps = {names.symmetry.rep[op.name] for op in graph.ops if op.name in self.ops}
        return frozenset(names.clusters.of[rep] for rep in reps if rep in names.clusters.of)

    def problem(self, problem: Problem, names: Names, graph: Graph) -> Problem:
        """`problem`, of `graph`, whose optimum bounds the other program. What stands in a cluster with operators that give way takes its least."""
        q, gone = names.symmetry, [op for op in graph.ops if op.name in self.ops]
        results = {q.group[t.name] for op in gone for t in op.outputs if t is not None and t.name in q.group}
        values = {names.value_of[group] for group in results if group in names.value_of}
        choices = self.choices(names, graph)
        reruns = {i for i, (rep, _) in enumerate(names.reruns) if any(rep == q.rep[op.name] for op in gone)}
        times: dict[int, dict[int, float]] = {c: defaultdict(float) for c in choices}
        if choices:
            times[min(choices)] |= {account(0, "compute"): self.forward_s, account(1, "compute"): self.backward_s}
        for op in graph.ops:
            c = names.clusters.of.get(q.rep[op.name])
            if c in times and op.name not in self.ops:
                times[c][account(int(op.direction == "backward"), "compute")] += self.least_s.get(op.name, 0.0)
        return replace(
            problem,
            rows=_without({"x": choices, "y": values, "e": values, "r": reruns}, problem),
            choices=tuple(replace(c, times=(times[i],) * len(c.times)) if i in times else c for i, c in enumerate(problem.choices)),
            values=tuple(
                replace(v, forward=_free(v.forward), backward=v.backward and _free(v.backward)) if i in values else v
                for i, v in enumerate(problem.values)
            ),
        )


def _free(flow: Flow) -> Flow:
    return replace(flow, arcs=tuple(replace(arc, times={}) for arc in flow.arcs))


def _without(gone: dict[str, Iterable[int]], problem: Problem) -> tuple[Row, ...]:
    """The rows in which none of these variables stands, also by what rows have in common. A row too few is a weaker bound, and no wrong one."""
    gone = {kind: frozenset(which) for kind, which in gone.items()}
    holds: list[bool] = []  # by rest

    def any_of(keys: Iterable[Key]) -> bool:
        return any(holds[key[1]] if key[0] == "s" else key[1] in gone.get(key[0], ()) for key in keys)

    for terms in problem.rests:
        holds.append(any_of(key for key, _ in terms))
    return tuple(row for row in problem.rows if not any_of(key for key, _ in row.terms))
