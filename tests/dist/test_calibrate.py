"""Calibration on this machine: a few seconds of it give a file that prices; interrupted, it leaves nothing; under torchrun, nodes are told apart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopar.cost import Cost
from autopar.cost.compute import ATTENTION
from autopar.cost.links import KINDS
from autopar.errors import AutoparError
from autopar.graph.mesh import Mesh
from autopar.hardware.calibrate import calibrate
from autopar.hardware.cluster import Cluster
from tests.dist.launch import run
from tests.wide import wide


@wide
def test_this_machine(tmp_path: Path) -> None:
    said: list[str] = []
    found = calibrate(2, 1.0, said.append)
    assert found is not None and said
    found.save(tmp_path / "here.json")
    c = Cluster.of(tmp_path / "here.json")
    assert (c.nodes, c.devices_per_node) == (1, 2)
    assert {k.kind for k in c.curves} == set(KINDS) - {"slice"} and all(k.ranks == 2 for k in c.curves)
    assert {k.of for k in c.device.curves} == {"matmul", *ATTENTION, "cheap", "norm", "loss", "optimizer"}
    cost = Cost(c, Mesh.of({"x": 2}))
    for kind in ("all_gather", "send"):
        assert 0 < cost.collective(kind, ("x",), 1e4).seconds <= cost.collective(kind, ("x",), 1e8).seconds


def _as_two_nodes() -> tuple[int, list[tuple[str, int, int]]] | None:
    """As on two nodes of one process."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    found = calibrate(None, 1.0)
    return None if found is None else (found.cluster.nodes, [(k.kind, k.ranks, k.nodes) for k in found.cluster.curves])


@wide
def test_processes_of_torchrun() -> None:
    first, second = run(_as_two_nodes, 2)
    assert second is None and first is not None
    nodes, curves = first
    assert nodes == 2 and ("all_gather", 2, 2) in curves


def _children(pid: int) -> list[int]:
    return [int(p) for t in Path(f"/proc/{pid}/task").iterdir() for p in (t / "children").read_text().split()]


@wide
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autopar", "calibrate", "-v", "--processes", "2", "--out", "mine.json"]
    env = {k: v for k, v in os.environ.items() if k != "RANK"} | {"TMPDIR": str(tmp_path)}
    p = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert p.stderr is not None
    for line in p.stderr:
        if "memory-bound" in line:
            break
    children = _children(p.pid)
    assert len(children) >= 2
    p.send_signal(signal.SIGINT)
    assert p.wait(30) == 130 and "interrupted" in p.stderr.read()
    end = time.monotonic() + 20
    while any(Path(f"/proc/{c}").exists() for c in children) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [c for c in children if Path(f"/proc/{c}").exists()]
    # An empty folder is torch's: it makes one for its cache when it first traces anything.
    assert [p for p in tmp_path.rglob("*") if not p.is_dir()] == []


def test_a_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.hardware.calibrate import world

    with pytest.raises(AutoparError, match="deliberately") as e:
        world.spawned(_fails, 2, 1.0, lambda line: None)
    assert "RuntimeError" in e.value.where


def _fails(*args: object) -> None:
    raise RuntimeError("deliberately")
