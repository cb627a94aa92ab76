"""Memory for copies of shards: what is free, and what is said where it is not enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.distributed import last_checkpoint
from autopar.elastic import room
from autopar.elastic.room import Need, refuse_full
from autopar.errors import AutoparError
from autopar.hardware import host_memory

GB = 10**9


def test_processes_of_a_machine_need_it_together() -> None:
    needs = [Need("a", 3 * GB, 10 * GB), Need("b", 3 * GB, 5 * GB), Need("a", 3 * GB, 10 * GB), Need("b", 3 * GB, 5 * GB)]
    refuse_full(needs[:3])
    with pytest.raises(AutoparError, match=r"host memory is full: copies of shards need 6.00 GB more, and 5.00 GB are free") as e:
        refuse_full(needs)
    assert e.value.where == "machine b, 2 processes" and "from the last checkpoint" in e.value.fix


def test_a_shard_and_its_wards_in_two_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda: 7)
    need = Need.of(30, 40, 100)
    assert (need.more_bytes, need.free_bytes) == (40, 7) and Need.of(30, 40, 200).more_bytes == 0


def test_the_narrowest_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, group, groups = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "groups"
    inner = groups / "pod" / "box"
    inner.mkdir(parents=True)
    memory.write_text("MemTotal:  9000 kB\nMemAvailable:  8000 kB\n")
    group.write_text("0::/pod/box\n")
    for name, path in (("_MEMORY", memory), ("_GROUP", group), ("_GROUPS", groups)):
        monkeypatch.setattr(host_memory, name, path)
    assert host_memory.free_bytes() == 8000 * 1024
    for folder, limit in ((inner, "max"), (inner.parent, "5000")):
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text("3000\n")
        (folder / "memory.stat").write_text("anon 2000\ninactive_file 500\n")
    assert host_memory.free_bytes() == 2500, "pages of files are given back"
    group.write_text("4:memory:/pod\n")  # cgroup v1: nothing is known
    (groups / "memory.max").unlink(missing_ok=True)
    assert host_memory.free_bytes() == 8000 * 1024


def test_the_last_checkpoint_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_checkpoint, "_last", [])
    assert last_checkpoint.last_checkpoint() == "the last checkpoint"
    last_checkpoint.note("/data/run", None)
    assert last_checkpoint.last_checkpoint() == "the last checkpoint, /data/run"
    last_checkpoint.note(Path("/data/run"), 12)
    assert last_checkpoint.last_checkpoint() == "the last checkpoint, /data/run of step 12"
