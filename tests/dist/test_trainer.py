"""Hugging Face's Trainer and TRL's, made of `autopar.trainer`: one process' curves, metrics and best model, also after the processes were killed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wide import wide

ROOT = Path(__file__).resolve().parents[2]


def ran(folder: Path, script: str, *options: str, processes: int, killed: bool = False) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*(launcher if processes else [sys.executable]), str(ROOT / "examples" / script), *options, *([] if processes else ["--plain"])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode != 0) == killed, done.stdout + done.stderr
    if killed:
        assert "SIGKILL" in done.stderr or "Signal 9" in done.stderr or done.returncode == -9, done.stderr
    return done.stdout


def lines(printed: str) -> list[list[float]]:
    return [[float(x) for x in re.findall(r"[-\d.]+(?:e[-+]\d+)?", line)] for line in printed.splitlines() if line.startswith(("step ", "best "))]


def same(mine: str, one_process: str, rel: float = 1e-5) -> None:
    found, expected = lines(mine), lines(one_process)
    assert len(expected) >= 8 and expected[-1][-2] < expected[0][1], "the reference does not learn: the comparison would show little"
    assert len(found) == len(expected), mine
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, abs=rel, rel=rel), f"{a} instead of {b}"


def test_killed_after_its_save_and_resumed(tmp_path: Path) -> None:
    expected = ran(tmp_path, "train_hf_trainer.py", processes=0)
    options = ["--layout", "fsdp", "--folder", "runs/killed"]
    ran(tmp_path, "train_hf_trainer.py", *options, "--killed-after", "4", processes=2, killed=True)
    at = sorted(p.name for p in (tmp_path / "runs/killed").glob("checkpoint-*"))
    assert at == ["checkpoint-2", "checkpoint-4"]
    same(ran(tmp_path, "train_hf_trainer.py", *options, "--resume", processes=2), expected)

    # What the Trainer saved is what transformers reads.
    from transformers import LlamaForCausalLM

    at = sorted(p.name for p in (tmp_path / "runs/killed").glob("checkpoint-*"))
    assert "checkpoint-8" in at and len(at) == 2
    one = LlamaForCausalLM.from_pretrained(tmp_path / "runs/killed/checkpoint-8")
    other = LlamaForCausalLM.from_pretrained(tmp_path / "runs/hf_trainer/checkpoint-8")
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max(), name


@wide
@pytest.mark.parametrize("processes", [2, 4])
def test_planned(processes: int, tmp_path: Path) -> None:
    same(ran(tmp_path, "train_hf_trainer.py", processes=processes), ran(tmp_path, "train_hf_trainer.py", processes=0))
