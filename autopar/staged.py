"""Solves a step on a mesh: the whole program where it is small enough (one and two axes), else by merging axes.

On three axes an operator has tens of strategies and a tensor as many placements, and redistributions between all of them: the program is
too large to be solved in the time that a user waits. But few good plans use every axis for something else. So axes are merged: first all
into one, then into two in every way; each is the same problem with fewer strategies, at the same prices, and its answer is an answer of
the whole. How good it is is said against a bound of the whole (`formulate.ideal`), never against that of the smaller program;
merging ends as soon as the gap is reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from autopar.cost import Cost
from autopar.formulate.ideal import ideal
from autopar.formulate.problem import Formulator, Names, Setting
from autopar.formulate.quotient import Quotient
from autopar.mesh import Mesh
from autopar.rules.grammar import Rule
from autopar.solver.problem import Problem
from autopar.solver.solve import Infeasible, Limits, Solution, least, solve

WHOLE_AXES = 2  # up to so many axes the whole program is solved
Found = tuple[Problem, Names, Solution | Infeasible]
Tell = Callable[[str, float], None]


def solve_on(
    q: Quotient,
    rules: Mapping[str, Rule],
    mesh: Mesh,
    cost: Cost,
    setting: Setting,
    limits: Limits,
    tell: Tell,
    restrict: Callable[[Problem, Names], Problem] = lambda problem, names: problem,
) -> Found:
    """restrict: takes strategies away (a layout). Raises TimeoutError when the clock stopped before any answer."""
    start = time.perf_counter()

    def formulated(m: Mesh) -> tuple[Formulator, Problem, Names]:
        began = time.perf_counter()
        f = Formulator(q, rules, m, cost, setting)
        problem, names = f.run()
        tell(f"formulate {_axes(m)}", time.perf_counter() - began)
        return f, restrict(problem, names), names

    if sum(n > 1 for n in mesh.parents.values()) <= WHOLE_AXES:
        _, problem, names = formulated(mesh)
        return problem, names, solve(problem, limits, progress=tell)

    bound = -1.0
    best: Found | None = None
    for smaller in merged(mesh):
        left = limits.seconds - (time.perf_counter() - start)
        if best is not None and left <= 0:
            break
        f, problem, names = formulated(smaller)
        if bound < 0:
            began = time.perf_counter()
            bound = least(ideal(f, problem, Formulator(q, rules, mesh, cost, setting)), limits)
            tell("bound", time.perf_counter() - began)
        try:
            found = solve(problem, replace(limits, seconds=max(1.0, left)), progress=tell)
        except TimeoutError:
            if best is None:
                raise
            break
        if isinstance(found, Solution):
            found = replace(found, bound_s=min(bound, found.objective_s))
            if best is None or isinstance(best[2], Infeasible) or found.objective_s < best[2].objective_s:
                best = problem, names, found
            if found.gap <= limits.gap:
                break
        elif best is None or (isinstance(best[2], Infeasible) and found.least_bytes < best[2].least_bytes):
            best = problem, names, found
    assert best is not None
    if isinstance(best[2], Solution) and best[2].gap > limits.gap:
        spent = time.perf_counter() - start > limits.seconds
        best = *best[:2], replace(best[2], stopped_by="time" if spent else "axes")
    return best


def merged(mesh: Mesh) -> Iterator[Mesh]:
    """`mesh` with all its axes as one, then as two in every way, neighbours first."""
    parents = [p for p, n in mesh.parents.items() if n > 1]
    yield _with_parents(mesh, [parents])
    splits = [i for i in range(1, 2 ** (len(parents) - 1))]
    ways = [([p for k, p in enumerate(parents) if not i >> k & 1], [p for k, p in enumerate(parents) if i >> k & 1]) for i in splits]
    order = {p: k for k, p in enumerate(parents)}
    ways.sort(key=lambda w: sum(order[b] - order[a] > 1 for part in w for a, b in zip(part, part[1:], strict=False)))
    for way in ways:
        yield _with_parents(mesh, sorted(way, key=lambda part: order[part[0]]))


def _with_parents(mesh: Mesh, groups: list[list[str]]) -> Mesh:
    name = {p: "+".join(group) for group in groups for p in group}
    return Mesh(tuple(replace(a, parent=name.get(a.parent, a.parent)) for a in mesh.axes))


def _axes(mesh: Mesh) -> str:
    return " x ".join(f"{p}={n}" for p, n in mesh.parents.items() if n > 1) or "one device"
