"""What a command says besides its result: progress on a terminal, what libraries print with -v, neither with -q; stdout has the result alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from autopar.text.stages import Begun, Note
from tests.unit.test_cli_refusals import Two, inputs

# A command of a process of its own, below which a library prints as HiGHS, torch and transformers do.
NOISY = """
import logging, os, sys, warnings
from autopar.cli import main as cli
from autopar.cli.screen import Screen
from autopar.cli.voice import voiced
from autopar.text.stages import Begun, Note

def noisy() -> None:
    with Screen("planning") as tell:
        tell(Begun("capture"), 0.0)
        os.write(1, b"HighsMipSolverData::run\\n")
        warnings.warn("cached")
        logging.getLogger("torch.distributed").warning("alltoall")
        tell("capture", 1.25)
        tell(Note("no plan takes less than 5 s"), 0.0)
    print("the result", flush=True)
    os.write(1, b"after\\n")

cli.app.command("noisy")(voiced(noisy))
sys.argv = ["autopar", "noisy", *sys.argv[1:]]
cli.main()
"""
TOLD = ("capture: 1.2 s", "no plan takes less than 5 s")
NOISE = ("HighsMipSolverData::run", "cached", "alltoall", "after")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("noisy") / "noisy.py"
    file.write_text(NOISY)
    return file


def run(script: Path, *args: str, log: str = "") -> tuple[str, str]:
    env = {**os.environ, "AUTOPAR_LOG": log}
    done = subprocess.run([sys.executable, str(script), *args], capture_output=True, text=True, check=True, env=env)
    return done.stdout, done.stderr


def on_a_terminal(script: Path, *args: str) -> tuple[str, str]:
    """Stderr is a terminal."""
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [sys.executable, str(script), *args], stdout=subprocess.PIPE, stderr=theirs, text=True, env={**os.environ, "TERM": "xterm"}
    ) as p:
        os.close(theirs)
        seen = b""
        try:
            while part := os.read(ours, 4096):
                seen += part
        except OSError:  # Linux's way of saying that the other side is closed
            pass
        assert p.stdout is not None
        out = p.stdout.read()
    os.close(ours)
    assert p.returncode == 0
    return out, seen.decode()


def test_where_nobody_looks_only_the_result_is_said(script: Path) -> None:
    assert run(script) == ("the result\n", "")


def test_a_terminal_is_told_the_stages(script: Path) -> None:
    out, seen = on_a_terminal(script)
    assert out == "the result\n"
    assert all(text in seen for text in TOLD) and not any(text in seen for text in NOISE)


def test_quiet_tells_a_terminal_nothing(script: Path) -> None:
    assert on_a_terminal(script, "-q") == ("the result\n", "")


def test_verbose_brings_all_of_it_back_beside_the_result(script: Path) -> None:
    out, err = run(script, "-v")
    assert out == "the result\n" and all(text in err for text in (*TOLD, *NOISE))


def test_who_asks_for_the_log_is_warned_as_well(script: Path) -> None:
    out, err = run(script, log="info")
    assert out == "the result\n" and "alltoall" in err and "cached" in err and TOLD[0] not in err


def test_the_planner_tells_each_stage_and_what_it_knows() -> None:
    """Stages begin before they are done; the last best plan that is told of is the plan, and no bound is above it."""
    told: list[tuple[str, float]] = []
    plan = autopar.plan(Two(), inputs(64), "h100:8", "8", progress=lambda stage, seconds: told.append((stage, seconds)))
    begun = [str(stage) for stage, _ in told if isinstance(stage, Begun)]
    done = [stage for stage, _ in told if type(stage) is str]
    notes = [stage for stage, _ in told if isinstance(stage, Note)]
    assert begun[:4] == ["capture", "fold", "formulate dp=8", "solve dp=8"] and {"capture", "formulate dp=8"} <= set(done)
    assert all(seconds == 0 for stage, seconds in told if isinstance(stage, (Begun, Note)))
    best = [note for note in notes if "the best so far" in note]
    said = next(line for line in plan.text().splitlines() if line.startswith("predicted"))
    assert best and best[-1].split("the best so far ")[1].split(",")[0] in said
