"""Plans between the fastest and least memory: the search against brute force, the points against plans made apart, and what is said of them."""

from __future__ import annotations

import builtins
import functools
import itertools
import json
import math
import pickle
import sys
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar.cli.main import app
from autopar.errors import AutoparError
from autopar.plan.plan import Plan
from autopar.plan.schema import canonical, dumps
from autopar.planner import offline
from autopar.planner.frontier import Frontier, Point, PolicyCounts, moved, resharded
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.memory import Memory
from autopar.planner.request import PlanRequest
from autopar.solver.brute_force import decisions
from autopar.solver.evaluate import evaluate
from autopar.solver.frontier import Answer, Floor, Relaxation, frontier, pareto, trace
from autopar.solver.solve import Limits, smallest, whole
from tests.plans import made
from tests.unit.test_program import random_problem
from tests.wide import cases, wide

EXACT = Limits(gap=1e-9, seconds=60)


# ---- the search ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(4))
def test_the_frontier_of_a_program_is_brute_force_s(block: int) -> None:
    """Every point of it and no other; lines under few relaxations are under all of it; and no answer is faster than a relaxation says of its strategies."""
    sizes, dear = [], 0
    for seed in range(10 * block, 10 * block + 10):
        problem = replace(random_problem(seed), budget_bytes=math.inf)
        prices = [evaluate(problem, d) for d in decisions(problem)]
        all_of_them = [Answer(max(p.row_bytes), p.objective_s, 0.0, None) for p in prices if not p.unmet]
        expected = pareto(all_of_them, 1e-9)
        found = frontier(problem, 50, EXACT)
        assert [a.peak_bytes for a in found] == pytest.approx([a.peak_bytes for a in expected], rel=1e-5), seed
        assert [a.time_s for a in found] == pytest.approx([a.time_s for a in expected], rel=1e-4), seed
        assert all(a.bound_s <= a.time_s * (1 + 1e-6) for a in found), seed
        sizes.append(len(found))
        if not expected:
            continue
        floor, relaxation = Floor(), Relaxation(problem)
        for budget in (math.inf, expected[0].peak_bytes, expected[-1].peak_bytes):
            found_there = relaxation.at(budget)
            floor.add(budget, found_there)
            assert found_there is not None
            for d, p in zip(decisions(problem), prices, strict=True):
                if not p.unmet and max(p.row_bytes) <= budget:
                    dearer_s = max(found_there.dearer_s[c, s] for c, s in enumerate(d.strategies))
                    assert found_there.tangent.at_s + dearer_s <= p.objective_s * (1 + 1e-6), seed
                    dear += dearer_s > 1e-3 * p.objective_s
        for a in expected:
            assert floor.bound_s(a.peak_bytes) <= a.time_s * (1 + 1e-6), seed
    assert max(sizes) >= 4 and dear > 0


def test_few_points_of_a_program_are_spread() -> None:
    problem = replace(random_problem(11), budget_bytes=math.inf)
    every, few = frontier(problem, 50, EXACT), frontier(problem, 4, EXACT)
    assert len(every) == 8 and len(few) == 4 and {a.peak_bytes for a in few} <= {a.peak_bytes for a in every}
    assert (few[0].time_s, few[-1].peak_bytes) == (every[0].time_s, every[-1].peak_bytes)


def test_budgets_halve_what_is_hidden() -> None:
    """On a smooth curve: as many answers as were wanted, no two near each other, no budget asked for twice."""
    asked: list[float] = []

    def at(budget: float) -> Answer[None]:
        return Answer(budget, 1 + 1e9 / budget, 0.0, None)

    def ask(budget: float) -> list[Answer[None]]:
        asked.append(budget)
        return [at(budget)]

    found = trace([at(1e12), at(1e9)], ask, 20, step=0.01)
    assert len(found) == 20 and len(set(asked)) == len(asked) == 18
    gaps = [math.log(a.peak_bytes / b.peak_bytes) for a, b in itertools.pairwise(found)]
    assert min(gaps) > 0.02 and all(a.time_s < b.time_s for a, b in itertools.pairwise(found))
    assert len(trace([at(1e12), at(1e9)], ask, 20, lambda: len(asked) < 21, 0.01)) == 5  # who is out of time has what there is


def test_the_smallest_peak_within_a_time() -> None:
    tighter = 0
    for seed in range(20):
        problem = replace(random_problem(seed), budget_bytes=math.inf)
        front = frontier(problem, 50, EXACT)
        for a in front:
            found = smallest(problem, EXACT, 1e-6, a.time_s * (1 + 1e-6))
            assert found is not None and found[0] == pytest.approx(a.peak_bytes, rel=1e-4), seed
            known = whole(replace(problem, budget_bytes=found[0] * (1 + 1e-6)), EXACT, found[1])
            assert known is not None and known.objective_s <= a.time_s * (1 + 1e-4), seed
        tighter += len(front) > 1
    assert tighter > 10


# ---- plans ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def asked(verb: Callable[..., Any] = autopar.plan, mesh: str = "8", offload: bool = False, **kw: Any) -> Any:
    with torch.device("meta"):
        net = Net()
    return verb(net, {"x": torch.empty(1 << 18, 1024, device="meta")}, "h100:8", mesh, offload=offload, **kw)


@functools.cache
def found(mesh: str = "8", offload: bool = False, points: int = 8) -> Frontier:
    out: Frontier = asked(mesh=mesh, offload=offload).frontier(points)
    return out


@pytest.mark.parametrize(("mesh", "offload"), cases([("8", False), ("8", True), ("4x2", False), ("2x2x2", False)], [("4x2", False)]))
def test_points_are_pareto(mesh: str, offload: bool) -> None:
    f = found(mesh, offload)
    assert 5 <= len(f.points) <= 8 and f.complete
    for p, q in itertools.pairwise(f.points):
        assert p.peak_memory_bytes > q.peak_memory_bytes and p.step_time_s < q.step_time_s and p.changes
    assert not f.points[-1].changes
    for p in f.points:
        assert p.plan.predicted["peak_memory_bytes"] == p.peak_memory_bytes == p.plan.predicted["budget_bytes"]
        assert p.plan.predicted["step_time_s"] == p.step_time_s >= p.bound_s > 0 and 0 <= p.gap < 0.2
        assert Plan.loads(dumps(p.plan)) == replace(p.plan, solver=Plan.loads(dumps(p.plan)).solver)
    assert any(policy.startswith("offload") for p in f.points for policy in p.plan.activations.values()) == offload


@pytest.mark.parametrize("offload", cases([False, True], [False]))
def test_ends_are_those_of_plans_made_apart(offload: bool) -> None:
    f = found(offload=offload)
    for p in (f.points[3], f.points[-1]):
        apart = asked(offload=offload, memory=p.peak_memory_bytes * (1 + 1e-5))
        assert apart.predicted["step_time_s"] >= p.bound_s * (1 - 1e-6)
        assert p.step_time_s <= apart.predicted["step_time_s"] * 1.011
    fastest = asked(offload=offload, memory=1e15)
    assert f.points[0].step_time_s <= fastest.predicted["step_time_s"] * (1 + 1e-5)
    assert f.points[0].peak_memory_bytes <= fastest.predicted["peak_memory_bytes"]


@wide
def test_least() -> None:
    """The least plan is the frontier's last, wherever it is asked for; a budget below it is refused, one of it is met."""
    last = found().points[-1]
    least = asked(memory="least")
    assert least.predicted["peak_memory_bytes"] == pytest.approx(last.peak_memory_bytes, rel=1e-3)
    assert least.predicted["step_time_s"] == pytest.approx(last.step_time_s, rel=0.011)
    assert least.predicted["peak_memory_bytes"] < 0.5 * asked().predicted["peak_memory_bytes"]
    assert canonical(asked(memory="fastest")) == canonical(asked())
    assert least.explain("layers.*.up.weight", "Replicate").verdict in ("does", "costs", "does not fit", "cannot")
    f = asked(offline.frontier, memory=2 * last.peak_memory_bytes, points=4)
    assert f.points[0].peak_memory_bytes <= 2 * last.peak_memory_bytes and f.points[-1].peak_memory_bytes == pytest.approx(
        last.peak_memory_bytes, rel=1e-3
    )
    with pytest.raises(InfeasibleError, match="a device would do") as e:
        asked(offline.frontier, memory=0.9 * last.peak_memory_bytes)
    assert e.value.shortfall_bytes == pytest.approx(0.1 * last.peak_memory_bytes, rel=0.02)


def test_a_layout_has_a_frontier() -> None:
    f = asked(layout="ddp").frontier(3)
    assert {p.plan.layout for p in f.points} == {"ddp"} and f.points[-1].peak_memory_bytes > found().points[-1].peak_memory_bytes


def test_two_points_are_the_ends() -> None:
    f = found(points=2)
    assert [p.step_time_s for p in f.points] == pytest.approx([found().points[i].step_time_s for i in (0, -1)], rel=1e-3)


def test_it_is_the_same_each_time() -> None:
    again = asked().frontier(8)
    assert [(p.peak_memory_bytes, p.step_time_s, p.changes) for p in again.points] == [
        (p.peak_memory_bytes, p.step_time_s, p.changes) for p in found().points
    ]


# ---- what is said --------------------------------------------------------------------------------------------------


def policies(what: str, heavy: bool = False, size: float = 1.0, **counts: int) -> PolicyCounts:
    return PolicyCounts("layers.*.mlp", what, heavy, size, Counter({k.replace("_", ":").replace("0", " "): n for k, n in counts.items()}))


def test_changes_of_policies() -> None:
    a = {
        "x": policies("silu", size=2.0, save=80),
        "y": policies("mm", True, not0needed=80),
        "z": policies("add", recompute=80),
        "w": policies("mul", save=80),
    }
    b = {
        "x": policies("silu", size=2.0, save=64, offload_host=10, recompute=6),
        "y": policies("mm", True, not0needed=74, recompute=6),
        "z": policies("add", not0needed=80),
        "w": policies("mul", save=74, recompute=6),
    }
    assert moved(a, b) == [
        "layers.*.mlp silu x 10 layers: save -> offload:host",
        "layers.*.mlp (2 tensors) x 6 layers: save -> recompute",
        "layers.*.mlp mm x 6 layers: not needed -> recompute",
    ]
    assert moved(a, a) == []


def test_changes_of_sharding() -> None:
    fsdp, tp = (
        replace(made("tiny", {"dp": 2, "tp": 2}, layout), modules={"mm": "layers.1.a", "addmm": "layers.1.a"})
        for layout in ("fsdp", "fsdp+tp")
    )
    lines = resharded(fsdp, tp)
    assert lines and resharded(fsdp, fsdp) == [] and any(line.startswith("parameter a.weight: stored") for line in lines)
    name = next(iter(fsdp.ops))
    heavy = replace(
        fsdp, modules={name: "layers.1.a"}, ops={**fsdp.ops, name: replace(fsdp.ops[name], kind="matmul", strategy={"dp": ("m", 1)})}
    )
    other = replace(heavy, ops={**heavy.ops, name: replace(heavy.ops[name], strategy={"tp": ("m", 1)})})
    assert resharded(heavy, other) == [f"layers.*.a {fsdp.targets[name].split('.')[1]}: dp:m, tp:repeated -> dp:repeated, tp:m"]


def test_text_json_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = found()
    text = str(f)
    assert text.splitlines()[0] == f"{len(f.points)} plans between the fastest and least memory, h100:1x8, mesh dp=8"
    assert text.count(" ms ") == len(f.points) and "save -> recompute" in text and "0.00%" in text
    small = replace(f, usable_bytes=f.points[2].peak_memory_bytes, complete=False)
    assert small.text().count("of a device") == 2 and "time limit" in small.text().splitlines()[0]
    raw = json.loads(f.to_json())
    assert [p["step_time_s"] for p in raw["points"]] == [p.step_time_s for p in f.points] and raw["points"][0]["changes"] == list(
        f.points[0].changes
    )
    pytest.importorskip("plotly")
    f.plot(tmp_path / "f.html")
    assert "no plan is faster" in (tmp_path / "f.html").read_text() and (tmp_path / "f.html").stat().st_size > 10_000
    with pytest.raises(AutoparError, match="cannot be written"):
        f.plot(tmp_path)
    real = builtins.__import__

    def without(name: str, *args: Any, **kw: Any) -> Any:
        if name.startswith("plotly"):
            raise ImportError(name)
        return real(name, *args, **kw)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(AutoparError, match=r"autopar\[report\]"):
        f.plot(tmp_path / "g.html")


# ---- errors and wishes ---------------------------------------------------------------------------------------------


def test_a_plan_from_a_file_has_no_frontier() -> None:
    plan = asked()
    for copy in (Plan.loads(dumps(plan)), pickle.loads(pickle.dumps(plan)), found().points[0].plan):
        with pytest.raises(AutoparError, match=r"autopar\.plan"):
            copy.frontier()
    for points in (1, 0, True, 2.5):
        with pytest.raises(AutoparError, match="at least 2"):
            plan.frontier(points)


def test_memory_as_it_is_written() -> None:
    assert Memory.of(None) == Memory.of("fastest") == Memory(None, False) and Memory.of("least") == Memory(None, True)
    assert Memory.of(6e10) == Memory(6e10) and PlanRequest.of(None, 6e10, None, None).memory_bytes == 6e10
    assert PlanRequest.of(None, "least", None, None).least and not PlanRequest.of(None, "fastest", None, None).least
    for wrong in (0, -1.0, math.nan, True, "most", "60GB"):
        with pytest.raises(AutoparError, match=r"60e9.*least"):
            Memory.of(wrong)
    with pytest.raises(AutoparError, match="least memory anyway"):
        asked(offline.frontier, memory="least")


def test_too_little_time_is_said() -> None:
    f = asked(offline.frontier, mesh="4x2", options={"seconds": 0.1})
    assert not f.complete and 1 <= len(f.points) < 20 and "time limit" in f.text()


def test_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    plan = made("tiny", {"dp": 2, "tp": 2}, "fsdp")
    two = Frontier((Point(2e9, 1.0, 1.0, plan, ("a: save -> recompute",)), Point(1e9, 2.0, 1.5, plan)), 8e10, "h100:8", 1.0)

    def planned(*args: Any, **kw: Any) -> Any:
        calls.append(kw)
        return two if "points" in kw else plan

    monkeypatch.setitem(sys.modules, "autopar.planner.offline", types.SimpleNamespace(frontier=planned))
    monkeypatch.setitem(sys.modules, "autopar.search.everywhere", types.SimpleNamespace(plan=planned))

    def run(verb: str, *args: str) -> Any:
        return CliRunner().invoke(app, [verb, "qwen3-0.6b", "--cluster", "h100:1x8", "--batch", "16", "--seq", "512", *args])

    out, plot = tmp_path / "points.json", tmp_path / "f.html"
    r = run("frontier", "--points", "5", "--out", str(out), "--plot", str(plot), "--memory", "60GB", "--layers", "2")
    assert (r.exit_code, r.stdout) == (0, two.text() + "\n"), r.stderr
    assert (
        calls[-1]["points"] == 5
        and calls[-1]["memory"] == 60 * 10**9
        and json.loads(out.read_text()) == json.loads(two.to_json())
        and plot.exists()
    )
    assert run("frontier").exit_code == 0 and calls[-1]["points"] == 20 and calls[-1]["memory"] is None
    assert run("plan", "--memory", "least").exit_code == 0 and calls[-1]["memory"] == "least"
    before = len(calls)
    for wrong, said in (
        (["--points", "1"], "--points"),
        (["--plot", "/nowhere/f.html"], "cannot be written"),
        (["--memory", "most"], "amount of memory"),
    ):
        r = run("frontier", *wrong)
        assert r.exit_code == 2 and said in r.stderr and len(calls) == before
