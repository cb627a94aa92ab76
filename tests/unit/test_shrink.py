"""Folded graphs with few copies, and layers cut into segments: what they stand for, and that the same decision has the same price in all."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from autopar.cost import Cost
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.planner.formulation.names import Names
from autopar.planner.formulation.problem import Formulator
from autopar.planner.formulation.symmetry import symmetry
from autopar.planner.formulation.training import TrainingConfig
from autopar.rules import lookup
from autopar.solver.evaluate import evaluate
from autopar.solver.fold import Folded, fold
from autopar.solver.problem import Decision, Problem
from autopar.solver.shrink import Shrunk, shrink
from autopar.solver.solve import Solution, solve
from tests.plans import captured

LAYERS = 6
MESH = Mesh.of({"dp": 4})


@functools.cache
def whole(name: str) -> Folded:
    return fold(captured(name, LAYERS).graph)


def formulated(small: Shrunk, only: Sequence[int] | None = None, budget_bytes: float = float("inf")) -> tuple[Problem, Names]:
    rules = {op.name: lookup(op) for op in small.graph.ops}
    cost = Cost.compiled(Cluster.of("h100:8"), MESH, small.graph, rules)
    training = TrainingConfig(frozenset(small.graph.params), budget_bytes=budget_bytes)
    f = Formulator(symmetry(small), rules, MESH, cost, training, only)
    return f.run()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("counts", [None, (3, 3), (1, 5), (5, 1), (2, 2, 2), (1, 1, 1, 1, 1, 1)])
def test_stands_for_the_whole(name: str, counts: tuple[int, ...] | None) -> None:
    f = whole(name)
    (stack,) = f.stacks
    if sum(counts or (f.copies[0],)) != f.copies[0]:
        pytest.fail(f"{name} folds {f.copies[0]} copies, the test is of {LAYERS}")
    small = shrink(f, {stack.name: counts} if counts else None)
    ops = {op.name: op for op in small.graph.ops}
    stood = Counter(small.image[op.name] for op in f.graph.ops)
    assert stood == Counter({n: k for n, k in small.times.items()})
    made: set[str] = {t.name for t in (*small.graph.inputs, *small.graph.tangents)}
    made |= {t.name for t in (*small.graph.params.values(), *small.graph.buffers.values())}
    results = {t.name for op in small.graph.ops for t in op.outputs if t is not None}
    for op in small.graph.ops:
        assert all(t.name in made or t.name not in results for t in op.inputs), f"{op.name} reads what is made later"
        made |= {t.name for t in op.outputs if t is not None}
    for op in f.graph.ops:
        like = ops[small.image[op.name]]
        assert like.target == op.target and [t.shape for t in like.inputs] == [t.shape for t in op.inputs]
    assert len(counts or ()) <= 1 or {small.segment[n] for n in ops} == set(range(len(counts or ())))


def test_segments_must_add_up() -> None:
    f = whole("llama")
    with pytest.raises(ValueError, match="segments"):
        shrink(f, {f.stacks[0].name: (3, 4)})
    with pytest.raises(ValueError, match="segments"):
        shrink(f, {f.stacks[0].name: (6, 0)})


@pytest.mark.parametrize("counts", [(3, 3), (1, 5), (2, 3, 1)])
def test_one_decision_one_price(counts: tuple[int, ...]) -> None:
    """All segments given the policies that one segment has: time and memory at every position are the same."""
    f = whole("llama")
    one = shrink(f)
    problem, _ = formulated(one)
    free = solve(problem)
    assert isinstance(free, Solution)
    only = free.decision.strategies
    tight, names = formulated(one, only, 0.8 * max(free.price.row_bytes))
    found = solve(tight)
    assert isinstance(found, Solution) and found.decision.rerun
    cut, cut_names = formulated(shrink(f, {f.stacks[0].name: counts}), only)
    decision = spread(tight, names, cut, cut_names, found.decision)
    price = evaluate(cut, decision)
    assert not price.unmet
    assert price.objective_s == pytest.approx(found.price.objective_s, rel=1e-9)
    assert max(price.row_bytes) == pytest.approx(max(found.price.row_bytes), rel=1e-9)


def spread(p: Problem, names: Names, cut: Problem, cut_names: Names, d: Decision) -> Decision:
    """`d` of `p`, in which all layers share their policies, as a decision of `cut`."""

    def key(value: str, n: Names) -> tuple[str, int]:
        """Values of a class are told apart by who reads them."""
        q = n.symmetry
        readers = {(q.rep[op.name], i) for op in q.graph.ops for i, t in enumerate(op.inputs) if t.name in q.members[value]}
        return q.tensor_rep[value], hash(frozenset(readers))

    mine = {key(v.name, names): i for i, v in enumerate(p.values)}
    again = {names.reruns[i][0] for i in d.rerun}
    kept: dict[int, frozenset[int]] = {}
    arcs: dict[tuple[int, int], frozenset[int]] = {}
    for i, v in enumerate(cut.values):
        theirs = mine[key(v.name, cut_names)]
        assert p.values[theirs].nodes == v.nodes
        if theirs in d.kept:
            kept[i] = d.kept[theirs]
        for direction in (0, 1):
            if (theirs, direction) in d.arcs:
                arcs[i, direction] = d.arcs[theirs, direction]
    rerun = frozenset(i for i, (op, _) in enumerate(cut_names.reruns) if op in again)
    return Decision(tuple(0 for _ in cut.choices), kept, rerun, arcs)


def test_counts_of_values() -> None:
    """What only the last layer hands on is counted once, what all layers make as often as there are layers."""
    q = symmetry(shrink(whole("llama")))
    counts: Mapping[str, int] = Counter(q.count(v) for v in q.members)
    assert counts[LAYERS] > 20 and counts[LAYERS - 1] >= 1 and counts[1] > 10
