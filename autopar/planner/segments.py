"""Where to cut a stack of layers into segments with policies of their own: at the shares of its layers that a relaxation keeps things for.

With every variable continuous, a policy between 0 and 1 is a share of the layers. Under one binding memory row at most one policy is such a share, under
k rows k of them: cut there, a program with whole policies has an answer next to the relaxation's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from autopar.planner.formulation.formulated import Formulated
from autopar.solver.frontier import Relaxed
from autopar.solver.problem import Problem

Segments = dict[str, tuple[int, ...]]


def shares(f: Formulated, problem: Problem, relaxed: Relaxed, copies: Mapping[str, int]) -> dict[str, list[int]]:
    """By stack, the numbers of layers that keep something which the others do not, those first that keep the most bytes.

    f, problem: with one segment. copies: layers of every stack, in the order of the program's."""
    kept: dict[str, dict[int, float]] = {name: defaultdict(float) for name in copies}
    names = list(copies)
    for key, share in relaxed.shares.items():
        if key[0] == "y" and 0 < share < 1:
            value = problem.values[key[1]].name
            home = f.program.copy_of.get(value.split(".")[0])
            name = "" if home is None else names[home[0]]
            if name and 0 < (k := round(share * copies[name])) < copies[name]:
                kept[name][k] += f.wires[value].nbytes * f.program.q.count(value)
    return {name: sorted(found, key=lambda k: (-found[k], k)) for name, found in kept.items()}


def two(n: int, k: int, first: bool) -> tuple[int, ...]:
    """n layers in two segments, k of them in the first or in the last; (n,) where there is nothing to cut."""
    return (n,) if not 0 < k < n else (k, n - k) if first else (n - k, k)


def three(n: int, ks: list[int], first: bool) -> tuple[int, ...]:
    """Cut at the two most important shares; fewer where there are fewer."""
    at = sorted(ks[:2])
    if len(at) < 2:
        return two(n, at[0] if at else 0, first)
    parts = (at[0], at[1] - at[0], n - at[1])
    return parts if first else parts[::-1]


def last_alone(cut: tuple[int, ...]) -> tuple[int, ...]:
    """`cut` with the last layer as a segment by itself: what it keeps, backward frees before anything else is needed."""
    *before, end = cut
    return (*before, end - 1, 1) if end > 1 else cut


def at_share(n: int, share: float, alone: bool) -> tuple[int, ...]:
    """n layers cut at `share` (not at all if 0), and before the last one if `alone`; (n,) where there are too few."""
    most = n - 2 if alone else n - 1
    cut = two(n, max(1, min(most, round(share * n))), True) if share and most > 0 else (n,)
    return last_alone(cut) if alone else cut


def suggested(f: Formulated, problem: Problem, relaxed: Relaxed | None, copies: Mapping[str, int]) -> list[Segments]:
    """Cuts to look at, none first: at the shares of `relaxed`, where there is one, from either end, in three, and each with the last layer by itself."""
    none: Segments = {name: (n,) for name, n in copies.items()}
    if relaxed is None:
        return [none]
    ks = shares(f, problem, relaxed, copies)
    ways = [{name: two(n, (ks[name] or [0])[0], first) for name, n in copies.items()} for first in (True, False)]
    ways += [{name: three(n, ks[name], first) for name, n in copies.items()} for first in (True, False)]
    ways += [{name: last_alone(cut) for name, cut in way.items()} for way in ways]
    return [none, *(way for way in ways if way != none)]
