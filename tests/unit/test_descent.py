"""Answers without a solver: of the program's own demands, never better than the optimum, and near to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

import autopar
from autopar.plan.plan import Plan
from autopar.planner import best_cut, stages
from autopar.solver import solve
from autopar.solver.brute_force import brute_force
from autopar.solver.descent import Descent, descend
from autopar.solver.evaluate import evaluate
from autopar.solver.problem import Account, Arc, Choice, End, Flow, Policy, Problem, Rerun, Value
from tests.unit.test_program import random_problem

NEAR = 1.25  # of the optimum, in the middle of the problems; the largest account is no sum over choices


def test_answers_are_answers() -> None:
    """On random problems without memory: every demand is met at what is said to be the time, no forbidden strategy is taken, and no time is below the optimum."""
    ratios = []
    for seed in range(300):
        problem = replace(random_problem(seed), rows=(), limits=())
        forbidden = frozenset({(0, seed % len(problem.choices[0].labels))})
        problem = replace(problem, forbidden=forbidden)
        best, _ = brute_force(problem)
        found = descend(problem)
        d = Descent(problem)
        for at in found:
            price = evaluate(problem, d.decision(at))
            assert not price.unmet, seed
            assert price.objective_s == pytest.approx(d.seconds(at)), seed
            assert price.objective_s >= best - 1e-9, seed
            assert (0, at[0]) not in forbidden
        ratios.append(d.seconds(found[0]) / best)
    ratios.sort()
    assert ratios[len(ratios) // 2] < NEAR, ratios[len(ratios) // 2]


def test_neighbours_agree() -> None:
    """A chain of twenty, each with a strategy of its own that is slightly faster, and moving dear: all take one."""
    n = 20
    accounts = (Account(0, "compute"),)
    choices = tuple(Choice(f"c{i}", ("a", "b"), ({0: 1.0 if i % 2 else 1.1}, {0: 1.1 if i % 2 else 1.0})) for i in range(n))
    both = (Arc(0, 1, {0: 1.0}), Arc(1, 0, {0: 1.0}))
    values = tuple(Value(f"v{i}", ("a", "b"), Flow(both, (End(i, (0, 1)),), (End(i + 1, (0, 1)),))) for i in range(n - 1))
    found = descend(Problem(("step",), accounts, choices, values))[0]
    assert len(set(found)) == 1


def test_what_cannot_be_kept_is_made_again() -> None:
    """A value without policies, made of one that has some: its operator runs again, and what that reads is kept."""
    accounts = (Account(0, "compute"), Account(1, "compute"))
    choices = tuple(Choice(x, ("a",), ({0: 1.0},)) for x in "xyz")
    kept = Value("v", ("a",), Flow((), (End(0, (0,)),), (End(1, (0,)),)), Flow((), (), ()), (Policy(0),))
    again = Value("w", ("a",), Flow((), (End(1, (0,)),), ()), Flow((), (), (End(2, (0,)),)))
    rerun = Rerun("y", 1, ({1: 0.5},), ((0, (0,)),), ((1, (0,)),))
    problem = Problem(("forward", "backward"), accounts, choices, (kept, again), (rerun,))
    decision = Descent(problem).decision((0, 0, 0))
    price = evaluate(problem, decision)
    assert decision.rerun == {0} and decision.kept == {0: {0}}
    assert not price.unmet and price.objective_s == pytest.approx(3.5)


@pytest.mark.parametrize("layout", [None, "fsdp"])
def test_without_a_solver_there_is_a_plan(layout: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the solver never has an answer, the plan is one that was found without it, and says that time stopped it; of the layout, where one was asked for."""

    def none(*_: object, **__: object) -> None:
        raise solve.NoAnswer("no answer in time", -1.0)

    with_solver = _planned(layout)
    for where, name in ((stages, "solve_relaxed"), (stages, "solve"), (best_cut, "solve"), (stages, "least")):
        monkeypatch.setattr(where, name, none)
    made = _planned(layout)
    assert made.solver["stopped_by"] == "time" and made.solver["variables"] == 0
    assert made.solver["bound_s"] <= with_solver.solver["objective_s"] <= made.predicted["step_time_s"] * (1 + 1e-9)
    assert made.predicted["step_time_s"] <= 1.3 * with_solver.predicted["step_time_s"]
    if layout:
        assert made.layout == layout and all("dp" in str(p) for n, p in made.params.items() if n.endswith("q_proj.weight"))


def _planned(layout: str | None) -> Plan:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, **sizes))
    return autopar.plan(model, {"input_ids": (16, 256), "labels": (16, 256)}, "h100:8", "8", precision="bf16", layout=layout)
