"""Ways to save activation memory that people use, each as the set of tensors that forward keeps for backward.

    from benchmarks.baselines import baselines
    for b in baselines(program): program.point(program.keeping(b.saved))

To add one: a function of a `Program` (`program.py`) that returns names of tensors, and a line here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.baselines.balanced import balanced, by_density
from benchmarks.baselines.checkpoints import ATTENTION, HEAVY, all_but_every, compiled, eager, regions, save_list, tagged
from benchmarks.baselines.program import Program
from benchmarks.baselines.torch_partitioner import min_cut

FAMILIES = ("none", "min-cut", "memory budget", "op list", "by layer", "balanced")


@dataclass(frozen=True)
class Baseline:
    family: str
    setting: str
    saved: frozenset[str]


def baselines(
    program: Program,
    families: Sequence[str] = FAMILIES,
    budgets: Sequence[float] = tuple(i / 10 for i in range(1, 10)),
    solvers: Sequence[str] = ("dp", "greedy"),
) -> Iterator[Baseline]:
    """All settings. budgets: of the memory budget and of the balanced rule's ranking; solvers: of torch's knapsack."""
    if "none" in families:
        yield Baseline("none", "", frozenset(t.name for op in program.graph.ops if op.direction == "forward" for t in op.outputs if t))
    if "min-cut" in families:
        yield Baseline("min-cut", "decomposed", min_cut(program))
        yield Baseline("min-cut", "as captured", min_cut(program, decomposed=False))
    for solver in solvers if "memory budget" in families else ():
        for b in budgets:
            yield Baseline("memory budget", f"{b:g} {solver}", min_cut(program, b, solver))
    lists = {
        "heavy": lambda: save_list(HEAVY),
        "all but every 2nd product": lambda: all_but_every(2),
        "all but every 3rd product": lambda: all_but_every(3),
        "attention": lambda: save_list(ATTENTION),
    }
    for name, policy in lists.items() if "op list" in families else ():
        tags = tagged(program, regions(program), policy)
        yield Baseline("op list", f"{name}, eager", eager(program, tags))
        yield Baseline("op list", f"{name}, compiled", compiled(program, tags))
    ways = [(f"{k} layers a region" if k > 1 else "every layer", k, 1) for k in (1, 2, 4)] + [(f"one layer of {k}", 1, k) for k in (2, 4)]
    for name, segment, every in ways if "by layer" in families else ():
        tags = tagged(program, regions(program, segment, every), None)
        yield Baseline("by layer", f"{name}, eager", eager(program, tags))
        yield Baseline("by layer", f"{name}, compiled", compiled(program, tags))
    if "balanced" in families:
        yield Baseline("balanced", "no product twice", balanced(program))
        for b in budgets:
            yield Baseline("balanced", f"density, {b:g} of the bytes", by_density(program, b))
