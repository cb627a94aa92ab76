"""Activations in files on several processes: one whose disk fails stops all of them, and all of them say why."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.offload.files import NamelessFile
from tests.dist.launch import run

PATIENCE_S = 8.0


def _step(folder: str, fails: int) -> tuple[str, str, float, list[float]]:
    """rank `fails` has no room on its disk (-1: all have)."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())], nn.Linear(256, 8))
    x, y = torch.randn(8192, 256), torch.randint(0, 8, (8192,))
    offload = autopar.Offload(host=False, nvme=folder)
    step = autopar.compile(
        model, mesh, backend="aot_eager", optimizer="sgd", loss_fn=nn.functional.cross_entropy, memory=45e6, offload=offload
    )
    step.prepare(x, target=y)
    assert set(step.plan.offload.values()) == {"nvme"}
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as m:
        if rank == fails:

            def full(*_: Any) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            m.setattr(NamelessFile, "write", full)
        try:
            loss = step(x, target=y)
            loss.backward()
            said, kind, losses = "", "", [loss.item(), sum(p.grad.full_tensor().abs().sum().item() for p in step.parameters())]
        except Exception as e:
            said, kind, losses = str(e), type(e).__name__, []
    took = time.monotonic() - start
    store = dist.distributed_c10d._get_default_store()
    store.add("ended", 1)
    while store.add("ended", 0) < 2:  # nobody leaves, or enters another collective, while somebody waits in one
        time.sleep(0.1)
    return kind, said, took, losses


def test_a_full_disk_stops_every_rank(tmp_path: Path) -> None:
    results = run(_step, 2, str(tmp_path), 1, timeout=300, patience_s=PATIENCE_S)
    (kind, said, took, _), (own_kind, own, _, _) = results
    assert own_kind == "OffloadError" and "the disk is full" in own
    assert kind == "RankError" and "rank 1 failed in this step" in said and "the disk is full" in said
    assert took < PATIENCE_S + 20
    assert list(tmp_path.iterdir()) == []


def test_equals_one_device(tmp_path: Path) -> None:
    (_, _, _, a), (_, _, _, b) = run(_step, 2, str(tmp_path), -1, timeout=300)
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())], nn.Linear(256, 8))
    x, y = torch.randn(8192, 256), torch.randint(0, 8, (8192,))
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    want = [loss.item(), sum(p.grad.abs().sum().item() for p in model.parameters() if p.grad is not None)]
    assert a == pytest.approx(want, rel=1e-5) and a == b
