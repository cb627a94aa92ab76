"""The examples run as a user would run them, and every loss they print on several processes is the one that plain PyTorch prints on one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.wide import wide

ROOT = Path(__file__).resolve().parents[2]
TINY_DEMO = ["--steps", "6", "--layers", "2", "--hidden", "64", "--seq", "64", "--backend", "aot_eager"]

# The demo with processes that do not communicate, and a checkpoint that is not loaded: its curves cannot be one.
NOT_ONE_CURVE = """
import sys, types
sys.path.insert(0, {examples!r})
import autopar
def compile(model, mesh, **options):
    model.plan = "no plan"
    return model
autopar.compile = compile
autopar.checkpoint = types.SimpleNamespace(save=lambda *a: None, load=lambda *a: None)
import demo
if __name__ == "__main__":
    raise SystemExit(demo.main())
"""


def python(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def steps(printed: str) -> list[list[float]]:
    """The numbers of each "step ..." line."""
    return [[float(x) for x in re.findall(r"[-\d.]+(?:e[-+]\d+)?", line)] for line in printed.splitlines() if line.startswith("step ")]


EXPECTED: dict[str, list[list[float]]] = {}


def one_process(script: str, folder: Path) -> list[list[float]]:
    """A script's losses without autopar, found once."""
    if script not in EXPECTED:
        plain = python(str(ROOT / "examples" / script), "--plain", cwd=folder)
        assert plain.returncode == 0, plain.stderr
        EXPECTED[script] = steps(plain.stdout)
    return EXPECTED[script]


@pytest.mark.parametrize(
    ("script", "options"),
    [
        pytest.param("train_plain.py", [], marks=wide),
        pytest.param("train_plain.py", ["--layout", "fsdp"], marks=wide),
        pytest.param("train_plain.py", ["--layout", "tp"], marks=wide),
        pytest.param("train_local_inputs.py", [], marks=wide),
        pytest.param("train_local_inputs.py", ["--layout", "fsdp"], marks=wide),
        pytest.param("train_lora.py", ["--layout", "fsdp"], marks=wide),
        ("train_accelerate.py", ["--layout", "fsdp"]),
        pytest.param("train_accelerate.py", [], marks=wide),
    ],
)
def test_same_losses_as_one_process(script: str, options: list[str], torchrun: Callable[..., str], tmp_path: Path) -> None:
    expected = one_process(script, tmp_path)
    assert len(expected) >= 8 and expected[-1][1] < expected[0][1], "the reference does not learn: the comparison would show little"
    found = steps(torchrun(f"examples/{script}", *options, processes=2))
    assert len(found) == len(expected)
    for mine, one_device in zip(found, expected, strict=True):
        assert mine == pytest.approx(one_device, abs=1e-5), f"{mine} instead of {one_device}"


@wide
def test_a_process_is_lost(tmp_path: Path) -> None:
    expected = one_process("elastic.py", tmp_path)
    done = python("-m", "autopar.run", "--nproc-per-node", "3", str(ROOT / "examples" / "elastic.py"), "--lose", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ended by signal 9" in done.stdout + done.stderr
    found = steps(done.stdout)
    assert [step for step, _ in found] == [step for step, _ in expected]
    for mine, one_device in zip(found, expected, strict=True):
        assert mine == pytest.approx(one_device, abs=1e-5), f"{mine} instead of {one_device}"


def test_demo(tmp_path: Path) -> None:
    done = python(str(ROOT / "examples" / "demo.py"), *TINY_DEMO, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one curve" in done.stdout and "MORE THAN ROUNDING" not in done.stdout
    assert "plan: layout planned on mesh dp=4" in done.stdout and "predicted on cpu:1x4" in done.stdout


@wide
def test_demo_fails_when_the_curves_differ(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(NOT_ONE_CURVE.format(examples=str(ROOT / "examples")))
    done = python(str(script), *TINY_DEMO, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 processes, resumed: largest difference from one process" in done.stdout and "MORE THAN ROUNDING" in done.stdout
