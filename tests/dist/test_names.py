"""Names in the store and of groups, where processes have done different things before: one is older, one made another model by itself."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autopar
from autopar.distributed.failures import RankError
from autopar.distributed.groups import Groups
from autopar.errors import MeshError
from autopar.runtime import compile_cache
from autopar.runtime.step import Step
from tests.dist.launch import run
from tests.dist.test_lost import Net

PATIENCE_S = 8.0


def _x() -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def _train(model: Any) -> None:
    one = Net()
    loss, want = model(_x()), one(_x())
    loss.backward()
    want.backward()
    torch.testing.assert_close(loss.detach(), want.detach())
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        p.grad = None


def _world(folder: str, processes: list[int], me: int, patience_s: float) -> None:
    store = dist.FileStore(os.path.join(folder, "-".join(map(str, processes))), len(processes))
    dist.init_process_group("gloo", store=store, rank=processes.index(me), world_size=len(processes), timeout=timedelta(seconds=patience_s))
    os.environ["LOCAL_RANK"] = str(processes.index(me))


def _parts_of_a_job() -> None:
    """Four of five processes make groups of prime factors of their axis; then all five make a group."""
    mesh = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",))
    if dist.get_rank() < 4:
        groups = Groups(mesh)
        assert len(groups.mesh.axes) == 2
        for axis in groups.mesh.axes:
            groups.ensure((axis.name,))
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total, group=groups.made[(groups.mesh.axes[0].name,)])
        assert float(total) in (1.0, 5.0, 2.0, 4.0)
    ends = dist.new_group([0, 4])
    if dist.get_rank() in (0, 4):
        total = torch.ones(1)
        dist.all_reduce(total, group=ends)
        assert float(total) == 2


def _ages(folder: str) -> str:
    me = dist.get_rank()
    _parts_of_a_job()
    dist.barrier()
    dist.destroy_process_group()
    old = None
    if me in (0, 1):
        _world(folder, [0, 1], me, PATIENCE_S)
        old = autopar.compile(Net(), (2,), layout="fsdp", backend="aot_eager")
        _train(old)
        _train(old)
        dist.barrier()
        dist.destroy_process_group()
    if me == 0:  # a job of its own
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        autopar.compile(Net(), (1,), layout="fsdp", backend="inductor")
        dist.destroy_process_group()
    if me not in (0, 2):
        return ""
    _world(folder, [0, 2], me, PATIENCE_S)  # and now with a process that knows nothing of all this
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "alone"))
    if me == 2:
        autopar.compile(Net(), mesh["alone"], layout="fsdp", backend="inductor")
    model = autopar.compile(Net(), (2,), layout="fsdp", backend="aot_eager")
    _train(model)
    if old is not None:
        with pytest.raises(MeshError, match="are destroyed"):
            old(_x())
    compile_cache.LATE_S = 3.0
    compiled = autopar.compile(Net(), (2,), layout="fsdp", backend="inductor")
    assert compiled._builder.once.run(lambda: 5) == 5
    _train(model)  # after another model on another mesh with the same names
    if me == 2:

        def fails(*_: Any) -> None:
            raise KeyError("on purpose")

        Step.forward = fails  # type: ignore[method-assign]
    try:
        model(_x())
    except (RankError, KeyError) as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def test_processes_of_different_age(tmp_path: object) -> None:
    first, _, second, _, _ = run(_ages, 5, str(tmp_path), timeout=200, patience_s=PATIENCE_S)
    assert second.startswith("KeyError")
    assert first.startswith("RankError: rank 1 failed in this step: KeyError"), first
