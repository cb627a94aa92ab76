"""In which programs a step is solved, where one has no answer in time or axes are many."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.plan.plan import Plan
from autopar.plan.schema import dumps
from autopar.planner import budgets, stages, without_solver
from autopar.planner.infeasible import InfeasibleError
from autopar.solver.solve import NoAnswer
from autopar.text.sizes import format_bytes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x))).square().mean()
        return out


class Deep(nn.Module):
    """Most of its memory are results of functions that are soon computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for m in self.maps:
            x = x + m(torch.tanh(x).exp().sin())
        return x.square().mean()


class Rolled(nn.Module):
    """Every view is joined of two views of the one before: 2^40 ways from the first to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(1024, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.map(x))
        for _ in range(40):
            x = torch.cat((x[:, 1:], x[:, :1]), 1)
        return torch.tanh(self.map(x)).square().mean()


def planned(mesh: str, model: nn.Module | None = None, **kw: Any) -> autopar.Plan:
    return autopar.plan(model or Net(), {"x": torch.empty(1 << 14, 1024, device="meta")}, "h100:8", mesh, **kw)


def test_two_axes_without_an_answer_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is one of the whole mesh, no better than the whole program's, and so is the bound."""
    best = planned("4x2")
    true, left = stages.solve_relaxed, [True]

    def no_time(*args: Any, **kw: Any) -> Any:
        if left.pop() if left else False:
            raise NoAnswer("no answer within 60 s", 1e-9)
        return true(*args, **kw)

    monkeypatch.setattr(stages, "solve_relaxed", no_time)
    merged = planned("4x2")
    assert not left and merged.mesh_axes == best.mesh_axes and merged.solver["stopped_by"] in ("gap", "axes", "time")
    assert float(merged.solver["bound_s"]) <= best.predicted["step_time_s"] * (1 + 1e-9) <= merged.predicted["step_time_s"] * (1 + 0.011)
    assert float(merged.solver["bound_s"]) > 0 and 0 <= float(merged.solver["gap"]) < 1


def test_strategies_without_time_for_cuts_are_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the relaxation chose is not given up, nor its bound: with everything kept, if that fits."""
    deep = Deep()
    best = planned("4x2", deep)

    def late(*args: Any, **kw: Any) -> Any:
        raise TimeoutError("the time that planning may take is over")

    monkeypatch.setattr(stages.Stages, "cut", late)
    monkeypatch.setattr(stages, "is_recomputed", lambda problem, decision: True)  # memory of what runs again is not known
    kept = planned("4x2", deep)
    assert kept.solver["stopped_by"] == "time" and kept.mesh_axes == best.mesh_axes
    assert 0 < float(kept.solver["bound_s"]) <= best.predicted["step_time_s"] * (1 + 1e-9) <= kept.predicted["step_time_s"] * (1 + 0.011)
    assert 0 <= float(kept.solver["gap"]) < 0.2


def test_ways_through_views_are_not_walked_one_by_one() -> None:
    assert planned("4", Rolled()).mesh_axes == {"dp": 4}


def no_time(*args: Any, **kw: Any) -> Any:
    raise NoAnswer("no answer within 60 s", 1e-9)


def test_one_axis_without_an_answer_is_asked_as_a_frontier_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where little more than the least memory is given. Where that is not enough, it is said whether nothing is, or nothing that was found."""
    deep = Deep()
    most, least = planned("8", deep), planned("8", deep, memory="least").predicted["peak_memory_bytes"]
    assert least < 0.9 * most.predicted["peak_memory_bytes"]
    rooms = most.predicted["peak_memory_bytes"] * 1.01, least * 1.001
    best = [planned("8", deep, memory=b) for b in rooms]
    monkeypatch.setattr(stages, "solve_relaxed", no_time)
    for plan, budget in zip(best, rooms, strict=True):
        found = planned("8", deep, memory=budget)
        assert found.predicted["peak_memory_bytes"] <= budget
        assert plan.predicted["step_time_s"] * 0.99 <= found.predicted["step_time_s"] <= plan.predicted["step_time_s"] * 1.1
        assert float(found.solver["bound_s"]) <= plan.predicted["step_time_s"] * (1 + 1e-9)
    with pytest.raises(InfeasibleError) as e:
        planned("8", deep, memory=0.3 * least)
    assert e.value.shortfall_bytes == pytest.approx(0.7 * least, rel=0.05)
    with pytest.raises(AutoparError, match=rf"of what was found in time, {format_bytes(least)}"):
        planned("8", deep, memory=0.95 * least)


def test_no_answer_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "solve_relaxed", no_time)
    monkeypatch.setattr(without_solver, "descend", no_time)
    monkeypatch.setattr(budgets, "Budgets", no_time)
    with pytest.raises(AutoparError, match=r"no answer within 60 s(?s:.*)more time"):
        planned("8")


def test_the_whole_of_three_axes_is_no_worse_than_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out for being dearer than a known answer changes no optimum: merged axes alone are never better, and proven less good."""
    whole = planned("2x2x2", options={"gap": 1e-4, "seconds": 120})
    monkeypatch.setattr(stages.Stages, "pruned", lambda self, v, best, *bounds: best)
    merged = planned("2x2x2", options={"gap": 1e-4, "seconds": 120})
    assert whole.predicted["step_time_s"] <= merged.predicted["step_time_s"] * (1 + 1e-9)
    assert float(whole.solver["gap"]) <= 1e-4 < 1e-3 < float(merged.solver["gap"])
    assert float(whole.solver["bound_s"]) <= whole.predicted["step_time_s"] * (1 + 1e-9)


def test_a_plan_explains_itself() -> None:
    """As `autopar.explain` does, which plans anew. A copy that went through a file or a pickle is the same plan and says where to ask."""
    plan = planned("8")
    answer = plan.explain("up", "dp:out")
    asked = autopar.explain(Net(), {"x": torch.empty(1 << 14, 1024, device="meta")}, "h100:8", "8", op="up", placement="dp:out")
    assert answer == asked and answer.verdict in ("costs", "does")
    for copy in (Plan.loads(dumps(plan)), pickle.loads(pickle.dumps(plan))):
        assert copy == plan
        with pytest.raises(AutoparError, match=r"autopar\.explain"):
            copy.explain("up", "dp:out")
