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
from tests.unit.test_elastic_goodput import made

ABOUT = ["--cluster", "h100:2x4", "--batch", "16", "--seq", "64"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = tmp_path_factory.mktemp("model") / "config.json"
    config.write_text(json.dumps(TINY))
    return str(config)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr("autopar.cli.elastic.built", build)


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
def test_plan_refuses(wrong: list[str], said: str, no_model: None) -> None:
    r = run("plan", "llama3-8b", *ABOUT, *wrong)
    assert r.exit_code == 2 and r.stdout == "" and said in r.stderr, r.stderr


def test_numbers() -> None:
    assert numbers("1-3, 8", "") == (1, 2, 3, 8) and numbers("5", "") == (5,)
    for text in ("", "1-", "-1", "a", "1,,2", "1-2-3", "9" * 9):
        with pytest.raises(AutoparError, match="no numbers"):
            numbers(text, "--sizes")


# ---- what failures cost ------------------------------------------------------------------------------------------------

FAILING = [*ABOUT, "--unit", "device", "--days", "3"]


def test_simulate_prints_writes_and_draws(model: str, tmp_path: Path) -> None:
    trace, out, plot = tmp_path / "trace.csv", tmp_path / "out.json", tmp_path / "plot.svg"
    trace.write_text("hours,device,repair_hours\n10,3,2\n11,5,2\n30.5,0,never\n".replace("never", "inf"))
    r = run("simulate", model, *FAILING, "--trace", str(trace), "--spares", "0", "--restart", "10min", "-o", str(out), "--plot", str(plot))
    assert (r.exit_code, r.stderr) == (0, ""), r.output
    found = json.loads(out.read_text())
    assert (found["failures"], found["units"], found["covered"]) == (3, 8, 6), "two at once are planned for, not more"
    assert found["setting"]["restart_s"] == 600.0 and found["setting"]["spares"] == 0
    by = {o["name"]: o for o in found["outcomes"]}
    assert all(any(line.startswith(f"{name} ") for line in r.stdout.splitlines()) for name in by)
    assert by["templates, no spares"]["restarts"] == 0 and by["checkpoints, no spares"]["seconds"]["waiting"] > 41 * 3600
    assert all(name in plot.read_text() for name in by if name != "ideal: nothing fails")


def test_the_same_seed_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.cli.elastic.Asked.templates", lambda self, survive: made(8, survive))
    said = [
        run("simulate", "llama3-8b", *FAILING, "--mtbf-device", "30h", "--survive", "2", "--seed", seed).stdout for seed in ("1", "1", "2")
    ]
    assert said[0] == said[1] != said[2] and "done again" in said[0]


def test_time_between_failures_of_what(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's, a node's of four devices and the cluster's of eight say the same of what fails as one."""
    seen: list[tuple[int, float]] = []

    def poisson(units: int, mtbf_s: float, *_: Any) -> None:
        seen.append((units, mtbf_s / 3600))
        raise AutoparError("enough")

    monkeypatch.setattr("autopar.elastic.plans.failures.poisson", poisson)
    for unit in ("device", "node"):
        for option, hours in (("--mtbf-device", "80h"), ("--mtbf-node", "20h"), ("--mtbf-cluster", "10h")):
            run("simulate", model, *ABOUT, "--unit", unit, option, hours)
    assert seen == [(8, 80.0)] * 3 + [(2, 20.0)] * 3


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([], "nothing says how often"), (["--mtbf-node", "1h", "--mtbf-device", "9h"], "said twice"), (["--mtbf-node", "0h"], "no time between failures"), (["--mtbf-node", "3"], "no length of time"),
        (["--mtbf-node", "-3h"], "no length of time"), (["--mtbf-node", "never"], "no time between failures"), (["--mtbf-node", "1h", "--repair", "0s"], "a repair of 0.0 s"),
        (["--mtbf-node", "1h", "--survive", "8"], "are to be survived"), (["--mtbf-node", "1h", "--days", "0"], "the time that is simulated"),
        (["--mtbf-node", "1ms"], "more than can be replayed"), (["--mtbf-node", "1h", "--save", "never"], "save_s"), (["--mtbf-node", "1h", "--plot", "a.html"], "no picture"),
        (["--trace", "/nowhere/t.csv"], "cannot be read"), (["--mtbf-node", "1h", "-o", "/nowhere/t.json"], "cannot be written"),
    ],
)  # fmt: skip
def test_simulate_refuses(wrong: list[str], said: str, no_model: None) -> None:
    r = run("simulate", "llama3-8b", *FAILING, *wrong)
    assert r.exit_code == 2 and r.stdout == "" and said in r.stderr, r.output


def test_simulate_refuses_traces(tmp_path: Path, no_model: None) -> None:
    trace = tmp_path / "trace.csv"
    for text, said in (("hours,device\n1,8\n", "there is no device 8"), ("hours,device\n2,1\n1,1\n", "goes back")):
        trace.write_text(text)
        r = run("simulate", "llama3-8b", *FAILING, "--trace", str(trace))
        assert r.exit_code == 2 and said in r.stderr
    r = run("simulate", "llama3-8b", *FAILING, "--trace", str(trace), "--mtbf-node", "1h")
    assert r.exit_code == 2 and "say the same" in r.stderr
