"""`autopar elastic`: what it prints and writes, what it refuses before a model is built, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autopar.cli.elastic import numbers
from autopar.cli.main import app
from autopar.errors import AutoparError
from tests.unit.test_cli_json import TINY

ABOUT = ["--cluster", "h100:2x4", "--batch", "16", "--seq", "64"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = tmp_path_factory.mktemp("model") / "config.json"
    config.write_text(json.dumps(TINY))
    return str(config)


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["elastic", *args])


def test_plan_prints_and_writes_every_size(model: str, tmp_path: Path) -> None:
    out = tmp_path / "templates.json"
    r = run("plan", model, *ABOUT, "--unit", "device", "--survive", "3", "--sizes", "1-3", "-o", str(out))
    assert (r.exit_code, r.stderr) == (0, "")
    written = json.loads(out.read_text())
    assert [s["units"] for s in written["sizes"]] == [8, 7, 6, 5] and set(written["templates"]) == {"1", "2", "3"}
    assert all(any(line.split()[:1] == [str(s["units"])] for line in r.stdout.splitlines()) for s in written["sizes"])


def test_plan_says_that_no_memory_will_do(model: str) -> None:
    r = run("plan", model, *ABOUT, "--memory", "1kB")
    assert r.exit_code == 3 and r.stdout == "" and r.stderr.startswith("error: No plan fits: memory of all 2 nodes")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--survive", "2"], "2 of 2 nodes are to be survived"), (["--unit", "rack"], "a unit of 'rack'"), (["--sizes", "3"], "groups of [3] nodes"),
        (["--sizes", "2-1"], "'2-1' are no numbers"), (["--micro-batch", "3"], "no number of micro-batches of 3"), (["--memory", "70G"], "'70G' has the unit"),
        (["-o", "/nowhere/t.json"], "cannot be written"),
    ],
)  # fmt: skip
def test_plan_refuses(wrong: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr("autopar.cli.elastic.built", build)
    r = run("plan", "llama3-8b", *ABOUT, *wrong)
    assert r.exit_code == 2 and r.stdout == "" and said in r.stderr, r.stderr


def test_numbers() -> None:
    assert numbers("1-3, 8", "") == (1, 2, 3, 8) and numbers("5", "") == (5,)
    for text in ("", "1-", "-1", "a", "1,,2", "1-2-3", "9" * 9):
        with pytest.raises(AutoparError, match="no numbers"):
            numbers(text, "--sizes")
