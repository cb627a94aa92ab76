"""A run whose supervisor is killed: training goes on to its end, and a loss after that is an error that says where to start again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

STEPS, PASSES = 6, 2
PROGRAM = """
import json, os, signal, sys, traceback
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
import autopar
from tests.dist.test_elastic_supervisor import PASSES, batches, model

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
me, supervisor, losses = dist.get_rank(), os.getppid(), []
(folder / f"{me}.pid").write_text(str(os.getpid()))
try:
    compiled = autopar.compile(
        model(), {"dp": 2}, loss_fn=nn.functional.mse_loss, layout="fsdp", backend="aot_eager", elastic=autopar.Elastic(survive=1, silence_s=10)
    )
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    session = autopar.elastic.Session(compiled, optimizer)
    for epoch in range(PASSES):
        for x, y in session.batches(batches(epoch)):
            with session.step():
                if (me, epoch, len(losses)) == (0, 0, 2):
                    os.kill(supervisor, signal.SIGKILL)
                loss = compiled(x, target=y)
                if (me, epoch, len(losses)) == (1, 1, 9):
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        if epoch == 0:
            autopar.checkpoint.save(folder / "last", compiled, optimizer)
except Exception:
    losses.append(traceback.format_exc())
(folder / f"{me}.part").write_text(json.dumps(losses))
os.rename(folder / f"{me}.part", folder / f"{me}.json")
os._exit(0)
"""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def batches(epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(epoch)
    return [(torch.randn(8, 8, generator=g).double(), torch.randn(8, 4, generator=g).double()) for _ in range(STEPS)]


def plain() -> list[float]:
    made, losses = model(), []
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    for x, y in (b for epoch in range(PASSES) for b in batches(epoch)):
        loss = nn.functional.mse_loss(made(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_goes_on_until_a_loss(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    said = tmp_path / "said"
    with said.open("w") as out:
        command = [sys.executable, "-m", "autopar.run", "--nproc-per-node", "2", str(tmp_path / "program.py"), str(tmp_path)]
        supervisor = subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=tmp_path)
        try:
            assert supervisor.wait(120) == -signal.SIGKILL, said.read_text()
            end = time.monotonic() + 60
            while not (tmp_path / "0.json").exists():
                assert time.monotonic() < end, said.read_text()
                time.sleep(0.1)
        finally:
            for rank in range(2):  # which nobody looks after any more
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    os.kill(int((tmp_path / f"{rank}.pid").read_text()), signal.SIGKILL)
    *losses, error = json.loads((tmp_path / "0.json").read_text())
    assert len(losses) == 9, error  # a pass to its end, and half of another
    assert all(abs(a - b) < 1e-9 for a, b in zip(losses, plain(), strict=False))
    assert "StoppedError: a process was lost, and the supervisor, which would say who is left, does not answer" in error
    assert f"start again, from the last checkpoint, {tmp_path / 'last'}" in error, error
    assert said.read_text().count("the supervisor does not answer. Training goes on") == 2
