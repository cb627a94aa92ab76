"""`autopar.plan` and the command line on a real, small model: no process group, no weights."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo import convert_frame, functional_export, guards, symbolic_convert
from typer.testing import CliRunner

import autopar
from autopar.capture import in_subprocess as in_subprocess
from autopar.cli.main import app
from autopar.errors import AutoparError, MeshError
from autopar.plan.plan import Plan
from autopar.plan.schema import canonical, dumps
from autopar.planner import over_meshes
from autopar.planner import task as tasks
from autopar.planner.infeasible import InfeasibleError
from tests.wide import cases, wide

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024}


def model() -> transformers.LlamaForCausalLM:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, **SIZES))


def planned(**kwargs: object) -> Plan:
    shapes = {"input_ids": (16, 256), "labels": (16, 256)}
    return autopar.plan(model(), shapes, "h100:8", "8", precision="bf16", **kwargs)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


def test_a_plan_says_what_it_predicts(plan: Plan) -> None:
    assert plan.fallbacks == {} and set(plan.params) == {n for n, _ in model().named_parameters()}
    p = plan.predicted
    assert p["step_time_s"] == pytest.approx(p["forward_s"] + p["backward_s"] + p["optimizer_s"])
    assert 0 < p["peak_memory_bytes"] <= p["budget_bytes"]
    assert float(plan.solver["gap"]) <= 0.01 and plan.solver["stopped_by"] == "gap"
    text = str(plan)
    assert "predicted on h100" in text and "within" in text


def test_the_same_problem_gives_the_same_plan(plan: Plan) -> None:
    assert canonical(planned()) == canonical(plan)


def test_round_trip(plan: Plan) -> None:
    assert dataclasses.replace(Plan.loads(dumps(plan)), solver={}) == dataclasses.replace(plan, solver={})


@pytest.mark.parametrize("head", cases(["plain", "auto"], ["plain"]))
def test_what_does_not_fit_is_explained(head: str) -> None:
    with pytest.raises(InfeasibleError) as e:
        planned(memory=1e6, loss_head=head)
    assert e.value.shortfall_bytes > 0 and "memory" in e.value.constraint and "a device would do" in e.value.remedy
    enough = planned(memory=1e6 + e.value.shortfall_bytes * 1.03, loss_head=head)
    assert enough.predicted["peak_memory_bytes"] <= 1e6 + e.value.shortfall_bytes * 1.03


def test_bad_input() -> None:
    with pytest.raises(MeshError):
        autopar.plan(model(), {"input_ids": (16, 256)}, "h100:8", "eight")
    with pytest.raises(AutoparError, match="optimizer"):
        planned(optimizer="adamx")
    with pytest.raises(AutoparError, match=r"8 devices|mesh"):
        autopar.plan(model(), {"input_ids": (16, 256), "labels": (16, 256)}, "h100:8", "64")


def test_stages_last_as_long_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    real = over_meshes.plan_graph

    def slow(*args: Any) -> Any:
        time.sleep(0.5)  # in a stage without a name
        return real(*args)

    monkeypatch.setattr(over_meshes, "plan_graph", slow)
    stages: list[float] = []
    start = time.perf_counter()
    planned(progress=lambda stage, seconds: stages.append(seconds))
    assert sum(stages) == pytest.approx(time.perf_counter() - start, abs=0.2)


@wide
def test_captures_at_once_give_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[int] = []
    real = tasks.capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        here.append(os.getpid())
        return real(*args, **kwargs)

    monkeypatch.setattr(tasks, "capture", counted)
    monkeypatch.setattr(in_subprocess, "PATIENCE_S", 600.0)
    plans = []
    for at_once in (False, True):
        with torch.device("meta"):
            m = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=6, **SIZES))
        plans.append(autopar.plan(m, {"input_ids": (16, 256), "labels": (16, 256)}, "h100:8", "8", precision="bf16", in_subprocess=at_once))
    assert canonical(plans[0]) == canonical(plans[1]) and len(here) == 2 + 1
    assert plans[0].solver["capture"] == plans[1].solver["capture"] == "folded from captures of 2 and 3 layers"


def test_no_guards_are_built_of_what_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("guards")

    before = functional_export._suggest_or_raise_constraint_violation, symbolic_convert.get_funcname
    monkeypatch.setattr(guards, "CheckFunctionManager", built)
    monkeypatch.setattr(convert_frame, "CheckFunctionManager", built)
    planned()
    assert before == (functional_export._suggest_or_raise_constraint_violation, symbolic_convert.get_funcname), "others' are as they were"


def test_too_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, **__: object) -> None:
        raise TimeoutError("no answer within 1 s")

    for what in ("planner.stages.solve_relaxed", "planner.without_solver.descend", "planner.budgets.Budgets"):
        monkeypatch.setattr(f"autopar.{what}", late)
    with pytest.raises(AutoparError, match="no answer within 1 s") as e:
        planned()
    assert "--time-limit" in e.value.fix


def test_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, **SIZES}))
    out = tmp_path / "plan.json"
    command = ["plan", str(config), "--cluster", "h100:8", "--mesh", "8", "--batch", "16", "--seq", "128"]
    r = CliRunner().invoke(app, [*command, "-o", str(out)])
    assert r.exit_code == 0, r.output
    assert "predicted on h100" in r.output
    assert CliRunner().invoke(app, ["show", str(out)]).exit_code == 0
    assert CliRunner().invoke(app, [*command, "--memory", "1MB"]).exit_code == 3
