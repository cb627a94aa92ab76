"""Clusters: the shipped descriptions, names and sizes, and files by strangers, which are refused in a sentence and never with a traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.hardware import detect
from autopar.hardware.cluster import FOLDER, MAX_FILE_BYTES, Cluster, ClusterError, names
from autopar.hardware.parts import Curve


def test_every_shipped_description_loads() -> None:
    assert set(names()) >= {"h100", "a100", "h200", "h800", "cpu"}
    for name in names():
        c = Cluster.of(name)
        assert c.name == name and 0 < c.device.usable_bytes < c.device.memory_bytes
        assert c.device.peak_flops.float64 <= c.device.peak_flops.float32 <= c.device.peak_flops.bfloat16


def figures(x: Any, path: str = "") -> list[str]:
    """The paths of all numbers of a description."""
    if isinstance(x, dict):
        return [f for k, v in x.items() if k != "sources" for f in figures(v, f"{path}.{k}" if path else k)]
    return [path] if isinstance(x, (int, float)) else []


@pytest.mark.parametrize("name", names())
def test_every_shipped_figure_has_its_source(name: str) -> None:
    raw = json.loads((FOLDER / f"{name}.json").read_text())
    named = {path: s["text"] for s in raw["sources"] for path in s["of"]}
    assert len(named) == sum(len(s["of"]) for s in raw["sources"]) and all(t.strip() for t in named.values())
    found = figures(raw)
    for f in found:
        assert any(f == path or f.startswith(path + ".") for path in named), f"{f} has no source"
    known = {"device.name", *found}
    assert all(any(k == path or k.startswith(path + ".") for k in known) for path in named), "a source of nothing"


def test_vendor_figures() -> None:
    h100, a100, h200, h800 = (Cluster.of(n) for n in ("h100", "a100", "h200", "h800"))
    assert h100.device.peak("bfloat16") == 989e12 and a100.device.peak("float16") == 312e12
    assert h100.intra.bandwidth_Bps == 450e9 and a100.intra.bandwidth_Bps == 300e9 and h800.intra.bandwidth_Bps == 200e9
    assert h100.inter.bandwidth_Bps == 400e9 / 8 and a100.inter.bandwidth_Bps == 200e9 / 8
    assert h200.device.memory_bandwidth_Bps == 4.8e12 and h200.device.memory_bytes > 141e9
    # Usable was 0.95 to 0.97 of the 80 GiB.
    for c in (h100, a100, h800):
        assert 0.95 <= c.device.usable_bytes / (80 * 2**30) <= 0.97


@pytest.mark.parametrize(
    "dtype, as_", [("float8_e4m3fn", "bfloat16"), ("int64", "float32"), ("complex64", "float32"), ("complex128", "float64")]
)
def test_peak_of_other_dtypes(dtype: str, as_: str) -> None:
    d = Cluster.of("a100").device
    assert d.peak(dtype) == d.peak(as_)


@pytest.mark.parametrize(
    "text, nodes, per_node",
    [
        ("h100:32x8", 32, 8), ("h100:8", 1, 8), ("h100:4", 1, 4), ("h100:256", 32, 8), ("h100", 1, 8), ("H100:2x4 ", 2, 4),
        ("cpu:4", 1, 4), ("cpu:2x2", 2, 2), ("a100:1", 1, 1),
    ],
)  # fmt: skip
def test_names(text: str, nodes: int, per_node: int) -> None:
    c = Cluster.of(text)
    assert (c.nodes, c.devices_per_node, c.size) == (nodes, per_node, nodes * per_node)
    assert Cluster.of(c.name) == c


def test_a_part_of_a_node_has_its_part_of_the_host() -> None:
    whole, half = Cluster.of("h100:8"), Cluster.of("h100:4")
    assert half.host_memory_bytes == whole.host_memory_bytes / 2
    assert half.host_bytes_per_device == whole.host_bytes_per_device


def test_a_cluster_is_itself_and_a_key() -> None:
    c = Cluster.of("h100:2x8")
    assert Cluster.of(c) is c and {c: 1}[Cluster.of("h100:2x8")] == 1 and c.node_of(8) == 1
    with pytest.raises(ValueError):
        c.nodes = 3


@pytest.mark.parametrize(
    "text, says",
    [
        ("h10:8", "h100"), ("h10O:8", "h100"), ("a10:8", "a100"), ("tpu", "cpu"), ("h100:12", "nodes of 8"), ("h100:1x16", "16"), ("h100:0", "at least one"),
        ("h100:0x8", "at least one"), ("h100:", "sizes"), ("h100:8x", "sizes"), ("h100:-8", "sizes"), ("h100:2x8x8", "sizes"),
        ("h100:" + "9" * 5000, "sizes"), ("h100:８", "sizes"), ("", "did you mean"), ("x" * 5000, "did you mean"), ("a\0b", "did you mean"),
        ("nope.json", "no such"), ("/", "no such"),
    ],
)  # fmt: skip
def test_wrong_names_are_refused_with_a_way_out(text: str, says: str) -> None:
    with pytest.raises(ClusterError, match="what to do") as e:
        Cluster.of(text)
    assert says in str(e.value) and len(str(e.value)) < 700 and isinstance(e.value, AutoparError)


def test_other_types_are_refused() -> None:
    with pytest.raises(ClusterError, match="int"):
        Cluster.of(8)  # type: ignore[arg-type]


def test_an_unknown_device_is_described_or_measured() -> None:
    with pytest.raises(ClusterError) as e:
        Cluster.of("mi300x:8")
    assert "copy" in e.value.fix and "autopar calibrate" in e.value.fix


# ---- cards and switches ----------------------------------------------------------------------------------------------


def with_inter(tmp_path: Path, **inter: Any) -> Cluster:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(description() | {"inter": {"efficiency": 0.8, "latency_s": 2e-5, **inter}}))
    return Cluster.of(path)


@pytest.mark.parametrize("cards, share", [(8, 50e9), (4, 25e9), (1, 6.25e9), (16, 100e9)])
def test_a_device_has_its_share_of_the_cards(tmp_path: Path, cards: int, share: float) -> None:
    c = with_inter(tmp_path, nics_per_node=cards, nic_bandwidth_Bps=50e9)
    assert c.inter.bandwidth_Bps == share and c.inter.nic_Bps == pytest.approx(0.8 * 50e9)
    assert Cluster.model_validate_json(c.model_dump_json()) == c
    assert c.inter.share_Bps(8, 8) == c.inter.reached_Bps
    # Alone it has the card next to it, or its cards.
    assert c.inter.share_Bps(8, 1) == pytest.approx(0.8 * 50e9 * max(1, cards // 8))


def test_one_description_of_the_cards(tmp_path: Path) -> None:
    """A device's share, as before there were cards, is all of one card."""
    h100 = Cluster.of("h100").inter
    assert with_inter(tmp_path, bandwidth_Bps=50e9, efficiency=h100.efficiency).inter == h100
    with pytest.raises(ClusterError, match="nics_per_node"):
        with_inter(tmp_path, bandwidth_Bps=50e9, nics_per_node=4, nic_bandwidth_Bps=50e9)
    for bad in ({"nics_per_node": 4}, {"nics_per_node": "4", "nic_bandwidth_Bps": 5e10}, {"nics_per_node": 0, "nic_bandwidth_Bps": 5e10}):
        with pytest.raises(ClusterError, match="inter"):
            with_inter(tmp_path, **bad)


def test_a_tree_is_read(tmp_path: Path) -> None:
    c = with_inter(tmp_path, nics_per_node=8, nic_bandwidth_Bps=5e10, tree={"leaf_nodes": 32, "oversubscription": 2.0})
    assert c.inter.tree is not None and c.inter.tree.leaf_nodes == 32
    with pytest.raises(ClusterError, match="oversubscription"):
        with_inter(tmp_path, bandwidth_Bps=5e10, tree={"leaf_nodes": 32, "oversubscription": 0.5})


# ---- this machine ----------------------------------------------------------------------------------------------------


def test_detect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Cluster.detect().size == min(os.cpu_count() or 1, 64)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Cluster.detect().name == "cpu:2x2"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    card = SimpleNamespace(name="NVIDIA H200", total_memory=140 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(detect, "why_not", lambda device, dtype: "triton is not there")
    assert Cluster.detect().name == "h200:2x2" and Cluster.detect().device.memory_bytes == card.total_memory
    assert Cluster.of("h200").device.why_no_triton("bfloat16") == "" and "float64" in Cluster.of("h200").device.why_no_triton(
        "float32", "float64"
    )
    assert Cluster.detect().device.why_no_triton("bfloat16") == "triton is not there"
    card.name = "Tesla T4"
    with pytest.raises(ClusterError, match="autopar calibrate"):
        Cluster.detect()


# ---- curves ------------------------------------------------------------------------------------------------------------


def test_a_curve_by_hand() -> None:
    c = Curve(amounts=(1e3, 1e5, 1e6), seconds=(1e-5, 1e-3, 2e-3))  # the whole is steeper than its last stretch
    assert [c.at(x) for x in (0, 10, 1e3, 1e5, 1e6)] == [1e-5, 1e-5, 1e-5, 1e-3, 2e-3]
    assert c.at(1e4) == pytest.approx(1e-4) and c.at(3e6) == pytest.approx(2e-3 + 2e6 * 1.99e-3 / 9.99e5)


@given(
    st.lists(st.tuples(st.floats(1, 1e12), st.floats(1e-9, 1e3)), min_size=1, max_size=8, unique_by=lambda p: p[0]),
    st.floats(0, 1e13),
    st.floats(0, 1e13),
)
def test_curves_never_fall(points: list[tuple[float, float]], a: float, b: float) -> None:
    amounts, seconds = zip(*sorted(points), strict=True)
    c = Curve(amounts=amounts, seconds=tuple(sorted(seconds)))
    low, high = sorted((a, b))
    assert c.at(low) <= c.at(high) * (1 + 1e-12)


@pytest.mark.parametrize(
    "amounts, seconds, says",
    [((1.0, 1.0), (1.0, 2.0), "ascend"), ((1.0, 2.0), (2.0, 1.0), "fall"), ((1.0,), (1.0, 2.0), "as many"), ((), (), "at least")],
)
def test_bad_curves(amounts: tuple[float, ...], seconds: tuple[float, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Curve(amounts=amounts, seconds=seconds)


# ---- files ---------------------------------------------------------------------------------------------------------


def description() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "h100.json").read_text())
    return found


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    mine = description() | {"name": "mine", "nodes": 4, "nvme": {k: description()["host"] for k in ("read", "write")}}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(mine))
    c = Cluster.of(path)
    assert c == Cluster.of(str(path)) and (c.name, c.size) == ("mine", 32)
    assert c.nvme is not None and c.nvme.read == c.host
    path.write_text(c.model_dump_json())
    assert Cluster.of(path) == c


def test_a_name_of_ours_wins_over_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cpu").write_text("no JSON")
    (tmp_path / "own").write_text(json.dumps(description() | {"name": "own"}))
    assert Cluster.of("cpu").name == "cpu" and Cluster.of("own").name == "own"


BAD_NUMBERS = [0, -1, "8", True, None, float("nan"), float("inf"), -float("inf"), 10**400, 1e300, [], {}]


@pytest.mark.parametrize("value", BAD_NUMBERS, ids=lambda v: str(v)[:12])
@pytest.mark.parametrize(
    "at", ["nodes", "host_memory_bytes", "device.memory_bytes", "device.peak_flops.float32", "intra.bandwidth_Bps", "inter.efficiency"]
)
def test_bad_numbers(tmp_path: Path, at: str, value: object) -> None:
    whole = description()
    inner = whole
    *path, last = at.split(".")
    for k in path:
        inner = inner[k]
    inner[last] = value
    (tmp_path / "bad.json").write_text(json.dumps(whole))
    with pytest.raises(ClusterError, match="not valid") as e:
        Cluster.of(tmp_path / "bad.json")
    assert at in str(e.value)
    assert e.value.__cause__ is None and e.value.__suppress_context__, "the reader's own traceback shows through"


@pytest.mark.parametrize(
    "change, says",
    [
        ({"colour": "green"}, "colour"), ({"x" * 100_000: 1}, "not permitted"), ({"nodes": 2.5}, "nodes"), ({"name": 7}, "name"),
        ({"intra": [1, 2]}, "intra"), ({"nvme": {"read": 1}}, "nvme"), ({"device": None}, "device"),
        ({"inter": {"bandwidth_Bps": 1e9, "efficiency": 1.5, "latency_s": 0}}, "inter.efficiency"),
        ({"inter": {"bandwidth_Bps": 1e9, "efficiency": 0.5, "latency_s": -1}}, "inter.latency_s"),
        ({"device": description()["device"] | {"reserve_bytes": 1e12}}, "reserve_bytes"),
    ],
    ids=lambda v: str(v)[:24],
)  # fmt: skip
def test_bad_descriptions(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    (tmp_path / "bad.json").write_text(json.dumps(description() | change))
    with pytest.raises(ClusterError, match="what to do") as e:
        Cluster.of(tmp_path / "bad.json")
    assert says in str(e.value) and len(str(e.value)) < 2000


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"7", b"null", b'"h100"', b"\xff\xfe\x00", b"[" * 100_000, b'{"a":' * 100_000, b"0" * (MAX_FILE_BYTES + 1), b"{}"],
    ids=range(11),
)
def test_files_that_are_no_description(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(text)
    with pytest.raises(ClusterError) as e:
        Cluster.of(str(tmp_path / "bad.json"))
    assert "bad.json" in str(e.value) and "pydantic" not in str(e.value)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    short = description()
    del short["device"]["memory_bandwidth_Bps"]
    (tmp_path / "bad.json").write_text(json.dumps(short))
    with pytest.raises(ClusterError, match=r"device\.memory_bandwidth_Bps"):
        Cluster.of(tmp_path / "bad.json")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "closed.json").write_text("{}")
    (tmp_path / "closed.json").chmod(0)
    with pytest.raises(ClusterError, match="cannot be read"):
        Cluster.of(tmp_path / "closed.json")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no such"):
        Cluster.of(tmp_path)
