"""Layers that are alike but no copies: what is tied, and that the program says the same as without."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from autopar.cost import Cost
from autopar.graph.mesh import Mesh
from autopar.planner.formulation.largest_positions import LargestPositions
from autopar.planner.formulation.lower_bound import least_s
from autopar.planner.formulation.problem import Formulator
from autopar.planner.formulation.symmetry import SymmetryClasses, symmetry
from autopar.planner.task import Task, task
from autopar.rules import lookup
from autopar.solver.evaluate import evaluate
from autopar.solver.problem import Problem
from autopar.solver.shrink import shrink
from autopar.solver.solve import Limits, Solution, solve, solve_relaxed

WIDTH, TOKENS = 256, 4096
EXACT = Limits(gap=1e-7, seconds=60)


class Layer(nn.Module):
    """kind: how it mixes; "wide" has a third product."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        if kind == "wide":
            self.more = nn.Linear(4 * WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        h = torch.relu(h) if self.kind == "global" else nn.functional.gelu(h)
        return x + self.down(self.more(h) if self.kind == "wide" else h)


class Pattern(nn.Module):
    def __init__(self, kinds: str) -> None:
        super().__init__()
        names = {"l": "local", "g": "global", "w": "wide"}
        self.layers = nn.ModuleList(Layer(names[k]) for k in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.maps(x).square().mean()
        return out


@cache
def of(kinds: str, budget: float = 1e12) -> Task:
    with torch.device("meta"):
        model, x = Pattern(kinds), torch.empty(TOKENS, WIDTH)
    return task(model, {"x": x}, "h100:2x2", None, None, "fp32", "adamw", 1, budget, None, lambda stage, seconds: None)


def formulated(t: Task, patterns: bool, mesh: Mesh) -> tuple[SymmetryClasses, Formulator, Problem]:
    q = symmetry(shrink(t.folded), patterns)
    rules = {op.name: lookup(op) for op in q.graph.ops}
    f = Formulator(q, rules, mesh, Cost.compiled(t.cluster, mesh, q.graph, rules), t.training)
    return q, f, f.run()[0]


@pytest.mark.parametrize("kinds", ["llglllgllglg", "wllll", "lwlwlw"])
def test_products_of_layers_that_are_alike_decide_once(kinds: str) -> None:
    """Of all layers, up and down are one class each, and their parameters; what a kind has for itself is one class too."""
    q, _, _ = formulated(of(kinds), True, Mesh.of({"dp": 4}))
    products = Counter(op.target for op in q.classes.ops if op.direction == "forward" and "mm" in op.target)
    assert sum(products.values()) == 2 + ("w" in kinds)
    acts = [op.target for op in q.classes.ops if op.direction == "forward" and op.target.split(".")[1] in ("gelu", "relu")]
    assert len(acts) == 1 + ("g" in kinds)
    stored = {q.tensor_rep[t.name] for n, t in q.graph.params.items() if n.endswith("up.weight")}
    assert len(stored) == 1 and q.count(stored.pop()) == len(kinds)


def test_two_layers_of_one_product_each_stay_apart() -> None:
    """A column product and the row product behind it look alike; tied, neither could be what it is best at."""
    with torch.device("meta"):
        model, x = Two(), torch.empty(64, WIDTH)
    t = task(model, {"x": x}, "h100:4", None, None, "fp32", "adamw", 1, None, None, lambda stage, seconds: None)
    q = symmetry(shrink(t.folded), patterns=True)
    assert sum("mm" in op.target and op.direction == "forward" for op in q.classes.ops) == 2


@pytest.mark.parametrize("kinds", ["llgl", "wlll"])
def test_what_is_tied_is_a_plan_of_layers_that_decide_for_themselves(kinds: str) -> None:
    """Never faster than theirs, and here little slower, where every collective pays a latency. Where they share it, more is lost: the first and the last of four layers
    then do what those between cannot."""
    mesh = Mesh.of({"dp": 4})
    for joins, most in ((False, 1.1), (True, 1.2)):
        step = replace(of(kinds), training=replace(of(kinds).training, joins=joins))
        alone, tied = (solve(formulated(step, patterns, mesh)[2], EXACT) for patterns in (False, True))
        assert isinstance(alone, Solution) and isinstance(tied, Solution)
        assert alone.objective_s * (1 - 1e-6) <= tied.objective_s <= alone.objective_s * most


@pytest.mark.parametrize("kinds, axes", [("llgllgllgl", {"dp": 4}), ("wllll", {"dp": 2, "tp": 2})])
def test_rows_that_are_left_out_are_never_the_largest(kinds: str, axes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under budgets from all that the fastest plan wants downwards, the peak is that of all positions; and relaxed rows allow what fits."""
    mesh = Mesh.of(axes)
    _, _, few = formulated(of(kinds), True, mesh)
    monkeypatch.setattr(LargestPositions, "peaks", lambda self, said, columns: list(columns))
    monkeypatch.setattr(LargestPositions, "corners", lambda self, groups: list(itertools.chain(*groups)))
    monkeypatch.setattr(LargestPositions, "undominated", lambda self, of, given=(): list(of))
    _, _, every = formulated(of(kinds), True, mesh)
    assert len(few.rows) < len(every.rows)
    budget, looked = 1e12, 0
    for _ in range(4):
        answer = solve(replace(few, budget_bytes=budget), Limits(gap=1e-3, seconds=60))
        if not isinstance(answer, Solution):
            break
        looked += 1
        peak = max(answer.price.row_bytes)
        assert peak == pytest.approx(max(evaluate(every, answer.decision).row_bytes), abs=1.0)
        bound = solve_relaxed(replace(few, budget_bytes=budget).relaxed, few, Limits(gap=1e-3, seconds=60))
        assert bound is not None and bound.bound_s <= answer.objective_s * (1 + 1e-6)
        budget = 0.85 * peak
    assert looked > 1


@pytest.mark.parametrize("kinds, axes", [("llgllgllgl", {"dp": 4}), ("wllll", {"dp": 2, "tp": 2})])
def test_operator_by_operator_no_plan_is_faster(kinds: str, axes: dict[str, int]) -> None:
    """Without anything to redistribute (one device) that is all of a step but the optimizer's."""
    small = shrink(of(kinds).folded)
    rules = {op.name: lookup(op) for op in small.graph.ops}
    for mesh in (Mesh.of(axes), Mesh.of({"dp": 1})):
        least = least_s(small, rules, Cost.compiled(of(kinds).cluster, mesh, small.graph, rules))
        best = solve(formulated(of(kinds), True, mesh)[2], EXACT)
        assert isinstance(best, Solution) and 0 < least <= best.objective_s
        if mesh.size == 1:
            assert least >= 0.9 * sum(best.price.stage_s[:2])
