"""Rows of other people's runs: those that make no sense are told, and cost nothing else."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from autopar.cluster import Cluster
from autopar.layout import Layout
from autopar.predict.fit import Run, start
from autopar.predict.runtime import RUNTIMES
from benchmarks import published
from benchmarks.runs import rows
from tests.conftest import ROOT

GOOD = {
    "model": "GPT small", "layers": "2", "hidden": "256", "ffn": "1024", "heads": "4", "kv_heads": "4", "vocab": "1024", "seq": "128",
    "global_batch": "16", "micro_batch": "1", "gpus": "8", "gpu_type": "H100-80GB SXM", "gpu_peak_tflops": "989", "tp": "2", "pp": "1", "vpp": "",
    "cp": "", "dp": "4", "sp": "", "recompute": "", "offload": "", "other": "", "metric": "tokens_per_s_per_gpu", "value": "10000",
    "memory_gb": "", "source": "made up",
}  # fmt: skip


def written(folder: Path, *given: dict[str, str], name: str = "megatron_core_h100") -> Path:
    with (folder / f"{name}.csv").open("w", newline="") as f:
        out = csv.DictWriter(f, list(GOOD))
        out.writeheader()
        out.writerows([{**GOOD, **g} for g in given])
    return folder


def test_rows_that_cannot_be_priced_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # Of three attention heads tensor parallelism by two can give no rank its own: only the solver knows.
    written(tmp_path, {}, {"gpu_type": "abacus"}, {"tp": "3"}, {"hidden": "255", "heads": "3", "kv_heads": "3"})
    out, constants = tmp_path / "out.json", ROOT / "benchmarks" / "results" / "published.json"
    monkeypatch.setattr(sys, "argv", ["published", "--folder", str(tmp_path), "--constants", str(constants), "--out", str(out)])
    published.main()
    found = json.loads(out.read_text())
    (good,) = found["rows"]
    assert "GPT small" in good["row"] and good["predicted"] > -1
    device, size, heads = found["not priced"]
    assert device.startswith("megatron_core_h100.csv:3: 'abacus'")
    assert size.startswith("megatron_core_h100.csv:4: ") and "does not fill 8 devices" in size
    assert heads.startswith("megatron_core_h100.csv:5: ") and "cannot split" in heads
    said = capsys.readouterr().out
    assert "not priced: 3 rows" in said and all(reason in said for reason in found["not priced"])


@pytest.mark.parametrize(
    "wrong",
    [
        *({"model": "mystery"}, {"layers": ""}, {"layers": "0"}, {"heads": "7"}, {"kv_heads": "3"}, {"gpus": "12", "dp": "6"}, {"gpus": "many"}),
        *({"tp": ""}, {"tp": "-2"}, {"dp": "0"}, {"cp": "x"}, {"vpp": "2"}, {"sp": "maybe"}, {"recompute": "odd"}, {"offload": "2"}, {"offload": "some"}),
        *({"micro_batch": "3"}, {"micro_batch": "", "global_batch": "7"}, {"value": ""}, {"value": "0"}, {"value": "nan"}, {"metric": "speed"}),
        *({"metric": "MFU_pct", "gpu_peak_tflops": ""}, {"other": "step_time_s=soon"}, {"other": "precision=fp8"}),
    ],
    ids=str,
)  # fmt: skip
def test_what_makes_no_run(wrong: dict[str, str], tmp_path: Path) -> None:
    found, left = rows(written(tmp_path, {}, wrong))
    assert len(found) == 1
    assert len(left) == 1 and left[0].startswith("megatron_core_h100.csv:3: ")


def test_files_that_are_not_rows(tmp_path: Path) -> None:
    written(tmp_path, {}, name="unheard_of")
    (tmp_path / "nanotron_h100.csv").write_bytes(b"model,\xff\nx\nx,y,z\n")
    (tmp_path / "hagemann_a100.csv").write_text("")
    found, left = rows(tmp_path)
    assert not found
    assert [x.partition(":")[0] for x in left] == ["nanotron_h100.csv", "nanotron_h100.csv", "unheard_of.csv"]


def test_clusters_ship_what_was_fitted() -> None:
    """To two digits; a fit that is kept and not shipped, or the other way round, is noticed here."""
    kept = json.loads((ROOT / "benchmarks" / "results" / "published.json").read_text())["constants"]
    fitted = {name: found["value"] for name, found in kept.items()}
    for name in ("a100", "h100", "h800"):
        cluster = Cluster.of(f"{name}:1")
        shipped = start([Run((), Layout(), RUNTIMES["megatron-overlap"], cluster, 1, 1.0)])
        assert len(shipped) == 9, shipped
        for constant, value in shipped.items():
            if not constant.startswith("slowdown"):
                assert value == pytest.approx(fitted[constant], abs=0.006), (name, constant)
        assert cluster.device.attention_backward_efficiency == pytest.approx(0.8 * cluster.device.attention_forward_efficiency)
