"""On CPU, graphs' collectives run one after another in each group: two of gloo's own threads at a time damage the heap (`_torch.orderly`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar import _torch
from autopar.distributed.groups import Groups
from tests.dist.launch import run
from tests.wide import cases, wide

IN_FLIGHT = 8


def gathered(sizes: tuple[int, ...], count: int) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])
    groups = Groups(mesh)
    ops = torch.ops._c10d_functional
    for axes in [("a",), ("b",), ("a", "b")] if len(sizes) == 2 else [("a",)]:
        name = groups.ensure(axes)
        backend = _torch.process_group(name)._get_backend(torch.device("cpu"))
        assert backend.options._threads == 1
        assert backend.options._timeout == _torch.default_timeout("cpu")
        ranks = next(g for g in groups.mesh.groups(axes) if dist.get_rank() in g)
        for i in range(count):
            issued = [ops.all_gather_into_tensor(torch.full((4,), float(dist.get_rank() + i)), len(ranks), name) for _ in range(IN_FLIGHT)]
            for y in issued:
                assert ops.wait_tensor(y).view(-1, 4)[:, 0].tolist() == [r + i for r in ranks]


def twice(again: str, count: int) -> None:
    """Once more after the default group was destroyed and made anew."""
    gathered((2, 2), count)
    gathered((4,), count)
    gathered((2, 2), count)  # the groups that are there
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(again, n), rank=rank, world_size=n)
    gathered((2, 2), count)


@pytest.mark.parametrize("count", cases((20, 100), (20,)))
def test_collectives_of_a_group_run_one_after_another(count: int, tmp_path: Path) -> None:
    run(twice, 4, str(tmp_path / "again"), count)


LEAVES = """
import atexit, os
from pathlib import Path

@atexit.register  # before autopar's, so run after it
def threads_of_groups():
    left = [n for t in os.listdir("/proc/self/task") if "gloo" in (n := Path(f"/proc/self/task/{t}/comm").read_text().strip())]
    print(f"left: {left}" + chr(10), end="", flush=True)  # one write: the processes share the pipe

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import autopar

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
model = autopar.compile(torch.nn.Linear(4, 4), mesh, backend="aot_eager", layout="ddp")
model(torch.ones(4, 4)).sum().backward()
dist.all_gather_object([None, None], 0)
dist.destroy_process_group()
"""


@wide
def test_no_group_has_threads_when_python_ends(torchrun: Callable[..., str], tmp_path: Path) -> None:
    """One that drops a tensor then aborts the process, now and then."""
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    assert torchrun(str(script), processes=2).count("left: []") == 2
