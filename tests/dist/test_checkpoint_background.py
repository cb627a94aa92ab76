"""Saves beside training, and earlier checkpoints that are kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.checkpoint import dcp as checkpoint
from autopar.errors import CheckpointError
from tests.dist.kill_saves import build, fill, whole
from tests.dist.launch import run
from tests.dist.test_checkpoint import OPTIMIZERS, _assert_same, _everything, _placed, _steps


def _made() -> tuple[Any, torch.optim.Optimizer]:
    model = _placed(0, (2,))
    optimizer = OPTIMIZERS["adamw"]([p for p in model.parameters() if p.requires_grad])
    _steps(model, optimizer)
    return model, optimizer


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}


class Slow:
    """torch.distributed.checkpoint, whose save waits until it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may, real = threading.Event(), checkpoint.dcp.save

        def save(*args: Any, **kwargs: Any) -> Any:
            assert self.may.wait(60)
            return real(*args, **kwargs)

        monkeypatch.setattr(checkpoint.dcp, "save", save)


def _steps_in(folder: str) -> list[int]:
    """The step that the manifest names, then those that are kept, as any process could read them."""
    manifest = json.loads((Path(folder) / checkpoint.MANIFEST).read_text())
    return [manifest["step"], *(e["step"] for e in manifest["earlier"])]


def _beside(folder: str) -> None:
    model, optimizer = _made()
    checkpoint.save(folder, model, optimizer, step=1)
    with pytest.MonkeyPatch.context() as patch:
        slow = Slow(patch)
        _steps(model, optimizer)
        want = _copy(_everything(model, optimizer))
        optimizer.param_groups[0]["lr"] = 0.25
        saving = checkpoint.save(folder, model, optimizer, step=2, wait=False)
        optimizer.param_groups[0]["lr"] = 0.75
        _steps(model, optimizer)  # it trains on, collectives and all
        model.norm.running_mean.fill_(9.0)
        dist.barrier()
        assert not saving.done() and _steps_in(folder) == [1], "the earlier one stays until the new one is whole"
        dist.barrier()
        slow.may.set()
        saving.wait()
        dist.barrier()
    assert saving.done() and _steps_in(folder) == [2]
    assert checkpoint.load(folder, model, optimizer)["step"] == 2
    _assert_same(_everything(model, optimizer), want)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_what_is_saved_is_what_there_was_at_the_call(tmp_path: Path) -> None:
    run(_beside, 2, str(tmp_path / "c"))


def _fails(folder: str) -> None:
    model, optimizer = _made()
    checkpoint.save(folder, model, optimizer, step=1)
    want = _copy(_everything(model, optimizer))
    _steps(model, optimizer)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise OSError("the disk is full")

    real = checkpoint._sum
    for who_hears in ("wait", "save", "load"):
        checkpoint._sum = broken if dist.get_rank() == 1 else real
        saving = checkpoint.save(folder, model, optimizer, step=2, wait=False)
        with pytest.raises(CheckpointError, match="the disk is full"):
            if who_hears == "wait":
                saving.wait()
            elif who_hears == "save":
                checkpoint.save(folder, model, optimizer, step=3, wait=False)
            else:
                checkpoint.load(folder, model, optimizer)
        checkpoint._sum = real
    checkpoint.load(folder, model, optimizer)  # what was heard is not said again
    _assert_same(_everything(model, optimizer), want)
    checkpoint.save(folder, model, optimizer, step=4, wait=False).wait()
    dist.barrier()
    assert _steps_in(folder) == [4] and len(os.listdir(folder)) == 2, "what was cut short is gone"


def test_errors_are_raised_on_every_rank_and_the_earlier_one_stays(tmp_path: Path) -> None:
    run(_fails, 2, str(tmp_path / "c"))


def _keep(folder: str) -> None:
    model, optimizer = _made()
    states = {}
    for step in range(1, 6):
        _steps(model, optimizer)
        checkpoint.save(folder, model, optimizer, step=step, extra=f"step {step}", keep=3, wait=step % 2 == 0)
        states[step] = _copy(_everything(model, optimizer))
    for step in (3, 5, 4):
        assert checkpoint.load(folder, model, optimizer, step=step) == {"step": step, "extra": f"step {step}"}
        _assert_same(_everything(model, optimizer), states[step])
    with pytest.raises(CheckpointError, match="no checkpoint of step 2; there are those of 5, 4, 3"):
        checkpoint.load(folder, model, optimizer, step=2)
    assert checkpoint.load(folder, model, optimizer)["step"] == 5
    assert len(os.listdir(folder)) == 4, "a manifest and three folders"
    checkpoint.save(folder, model, optimizer, step=6, keep=2)
    assert _steps_in(folder) == [6, 5]
    checkpoint.save(folder, model, optimizer, step=7)
    assert _steps_in(folder) == [7] and len(os.listdir(folder)) == 2
    with pytest.raises(CheckpointError, match="keeps at least itself"):
        checkpoint.save(folder, model, optimizer, keep=0)


def test_earlier_checkpoints_are_kept(tmp_path: Path) -> None:
    run(_keep, 2, str(tmp_path / "c"))


def test_a_program_that_ends_has_written_and_says_what_failed(tmp_path: Path) -> None:
    """Without processes, and without a `wait`."""
    program = (
        "import sys, torch, autopar\n"
        "from tests.dist.kill_saves import build, fill\n"
        "model = build('256')\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "fill(model, optimizer, 7)\n"
        "if sys.argv[2] == 'fails':\n"
        "    autopar.checkpoint.dcp._sum = None\n"
        "autopar.checkpoint.save(sys.argv[1], model, optimizer, step=7, wait=False)\n"
        "fill(model, optimizer, 8)\n"
    )
    for how in ("fails", "works"):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / how), how],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert ("a checkpoint was not saved" in done.stderr) == (how == "fails"), done.stderr
    model = build("256")
    optimizer = torch.optim.AdamW(model.parameters())
    assert checkpoint.load(tmp_path / "works", model, optimizer)["step"] == 7
    other = build("256")
    state = torch.optim.AdamW(other.parameters())
    fill(other, state, 7)
    assert all(torch.equal(a, b) for a, b in zip(whole(model, optimizer), whole(other, state), strict=True))
    with pytest.raises(CheckpointError, match="incomplete"):
        checkpoint.load(tmp_path / "fails", model, optimizer)
