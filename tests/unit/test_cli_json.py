"""Every command with --json prints one document, alone on stdout, that is of its kind in the tables of `autopar.cli.documents`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from autopar.cli import documents
from autopar.cli.documents import DOCUMENTS, DifferenceDocument, PlanDocument
from autopar.cli.main import app
from autopar.plan.plan import Plan
from autopar.planner import task as tasks
from tests.unit.test_calibrate import made as measured

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def about(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    config = tmp_path_factory.mktemp("model") / "config.json"
    config.write_text(json.dumps(TINY))
    return [str(config), "--cluster", "h100:2", "--batch", "2", "--seq", "64"]


@pytest.fixture(scope="module")
def printed(about: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What a command prints, each run once."""
    folder = tmp_path_factory.mktemp("out")
    plan, other, out = (str(folder / name) for name in ("plan.json", "other.json", "cluster.json"))
    calls = {
        "plan": ["plan", *about, "-o", plan],
        "other": ["plan", *about, "--layout", "ddp", "-o", other],
        "show": ["show", plan],
        "diff": ["diff", plan, other],
        "same": ["diff", plan, plan],
        "explain": ["explain", about[0], "mlp.gate_proj", "tp:out", *about[1:], "--mesh", "tp=2"],
        "frontier": ["frontier", *about, "--points", "2"],
        "search": ["search", *about, "--top", "2"],
        "predict": ["predict", *about, "--tp", "2"],
        "calibrate": ["calibrate", "--out", out],
        "report": ["report", plan, other, "-o", str(folder / "plan.html")],
        "trace": ["trace", plan, "-o", str(folder / "trace.json")],
        "compile": ["compile", about[0], "--plan", plan, *about[3:], "-o", str(folder / "ahead")],
        "elastic plan": ["elastic", "plan", *about, "--unit", "device", "--survive", "1"],
        "elastic simulate": ["elastic", "simulate", *about, "--unit", "device", "--survive", "1", "--mtbf-cluster", "2h", "--days", "2"],
    }
    same_step = ("plan", "other", "explain", "frontier")  # captured once
    captured: list[Any] = []
    real = tasks.program

    def program(*args: Any) -> Any:
        captured.extend(() if captured else (real(*args),))
        return captured[0]

    needs = {
        "show": ["plan"],
        "report": ["plan", "other"],
        "trace": ["plan"],
        "compile": ["plan"],
        "diff": ["plan", "other"],
        "same": ["plan"],
    }
    known: dict[str, dict[str, Any]] = {}

    def run(command: str) -> dict[str, Any]:
        for first in needs.get(command, []):
            run(first)
        if command not in known:
            with pytest.MonkeyPatch.context() as patch:
                if command in same_step:
                    patch.setattr(tasks, "program", program)
                r = CliRunner().invoke(app, [*calls[command], "--json"])
            assert r.exit_code == (1 if command == "diff" else 0), r.output
            known[command] = json.loads(r.stdout)
        return known[command]

    return run


KINDS = {
    "plan": "plan", "show": "plan", "diff": "difference", "same": "difference", "explain": "explanation", "frontier": "frontier",
    "search": "search", "predict": "prediction", "calibrate": "calibration", "report": "written", "trace": "written", "compile": "written",
    "elastic plan": "elastic-templates", "elastic simulate": "elastic-simulation",
}  # fmt: skip


@pytest.mark.parametrize("command", KINDS)
def test_a_document_is_of_its_kind(command: str, printed: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.hardware.calibrate.result import calibration

    monkeypatch.setattr("autopar.hardware.calibrate.calibrate", lambda *a: calibration(measured()))
    monkeypatch.setattr("autopar.cli.compile.compile_for", lambda *a, **how: None)  # compiled in tests/dist/test_artifacts.py
    found = printed(command)
    model = next(d for d in DOCUMENTS if d.model_fields["kind"].default == KINDS[command])
    assert (found["kind"], found["version"]) == (KINDS[command], model.model_fields["version"].default)
    model.model_validate_json(json.dumps(found), strict=True)
    with pytest.raises(ValidationError):  # the tables are of these fields alone
        model.model_validate({**found, "another": 1})
    with pytest.raises(ValidationError):
        model.model_validate({k: v for k, v in found.items() if k != list(model.model_fields)[-1]})


def test_every_command_prints_one(about: list[str]) -> None:
    """One that is added has to be added here."""
    groups = [("", app), *((f"{g.name} ", g.typer_instance) for g in app.registered_groups)]
    names = {
        f"{before}{c.name or c.callback.__name__}" for before, group in groups if group for c in group.registered_commands if c.callback
    }
    assert names == KINDS.keys() - {"same"}


def test_the_plan_in_it_is_the_plan(printed: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    found = printed("plan")
    plan = Plan.loads(json.dumps(found["plan"]))
    assert plan.mesh_axes == found["mesh"] and plan.predicted == found["predicted"] and printed("show") == found
    p = found["predicted"]
    assert p["tokens_per_s"] == pytest.approx(2 * 64 / p["step_time_s"]) and 0 < p["mfu"] < 1


def test_a_plan_and_a_prediction_count_the_same_work(printed: Callable[[str], dict[str, Any]]) -> None:
    """By other ways: from the folded program, and from the pieces of a micro-batch that tensor-parallel devices share."""
    plan, predicted = printed("plan")["predicted"], printed("predict")
    assert plan["mfu"] * plan["step_time_s"] == pytest.approx(predicted["mfu"] * predicted["step_time_s"], rel=1e-9)


def test_a_difference_names_the_figures(printed: Callable[[str], dict[str, Any]]) -> None:
    found, same = printed("diff"), printed("same")
    assert not found["equal"] and found["lines"] and same["equal"] and not same["lines"] and not same["predicted"]
    assert found["predicted"]["step_time_s"] == [printed("plan")["predicted"]["step_time_s"], printed("other")["predicted"]["step_time_s"]]


def test_a_figure_that_one_plan_does_not_know_is_null() -> None:
    DifferenceDocument.model_validate_json(
        '{"kind": "difference", "version": 1, "equal": false, "lines": [], "predicted": {"mfu": [null, 0.5]}}'
    )
    with pytest.raises(ValidationError):
        PlanDocument.model_validate_json('{"kind": "plan", "version": 2}')


def test_the_page_of_the_docs_is_these_tables() -> None:
    page = Path(__file__).parents[2] / "docs" / "json.md"
    assert page.read_text(encoding="utf-8") == documents.page()
