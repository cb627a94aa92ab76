"""Calibration without a machine: samples made from known constants are fitted back to them, written as a cluster file, and are its prices."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from autopar.cli.main import app
from autopar.cost import Cost
from autopar.errors import AutoparError
from autopar.graph.mesh import Mesh
from autopar.hardware.calibrate import fit
from autopar.hardware.calibrate.measure import together
from autopar.hardware.calibrate.measured import Measured
from autopar.hardware.calibrate.result import calibration
from autopar.hardware.calibrate.steps import Stepped
from autopar.hardware.calibrate.timing import Sample
from autopar.hardware.calibrate.wires import sent
from autopar.hardware.cluster import Cluster

LAUNCH, RATE, STREAM, RHO = 2e-6, 5e10, 8e9, 0.3
LATENCY, STEP, WIRE = 3e-4, 1e-4, 1e9
BACKWARD, CAUSAL = 2.0, 1.5  # times slower a FLOP than forward, in the made-up attention


def noisy(seconds: float, draw: random.Random, share: float) -> Iterator[float]:
    for _ in range(3):
        yield seconds * math.exp(draw.gauss(0, share))


def traffic(nbytes: float) -> float:
    return LAUNCH + nbytes / STREAM


def made(share: float = 0.02, processes: int = 4) -> Measured:
    """What a machine of those constants would say, with noise of `share`."""
    draw = random.Random(1)
    out: list[Sample] = []
    for dtype, rate in (("float32", RATE), ("bfloat16", 4 * RATE)):
        for m, k, n in ((64, 64, 64), (256, 256, 256), (32, 1024, 1024), (512, 512, 512), (1024, 1024, 1024), (2048, 64, 2048)):
            flops, nbytes = 2.0 * m * k * n, 4.0 * (m * k + k * n + m * n)
            took = LAUNCH + flops / rate + RHO * nbytes / STREAM
            out += [Sample("matmul", flops, s, dtype, nbytes) for s in noisy(took, draw, share)]
            out += [Sample("attention", flops, s, dtype) for s in noisy(LAUNCH + flops / rate, draw, share)]
            out += [Sample("attention_backward", flops, s, dtype) for s in noisy(LAUNCH + BACKWARD * flops / rate, draw, share)]
            out += [Sample("causal_attention", flops, s, dtype) for s in noisy(LAUNCH + CAUSAL * flops / rate, draw, share)]
    for kind in ("cheap", "norm", "loss", "optimizer"):
        for size in (1 << i for i in range(8, 27, 2)):
            out += [Sample(kind, float(size), s) for s in noisy(traffic(size), draw, share)]
    for of in ("host", "nvme_read", "nvme_write"):
        for size in (1 << 16, 1 << 20, 1 << 25):
            out += [Sample(of, float(size), s) for s in noisy(traffic(size), draw, share)]
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        for ranks in (2, processes):
            for size in (1 << i for i in range(10, 29, 2)):
                v = sent(kind, ranks, size)
                out += [Sample(kind, v, s, ranks=ranks) for s in noisy(LATENCY + (ranks - 1) * STEP + v / WIRE, draw, share)]
    return Measured(tuple(out), "cpu", "x86_64 CPU", 4e9, 16e9, 1, processes, 1, (0.5, 0.6, 0.4), 12.0)


# ---- fits ------------------------------------------------------------------------------------------------------------


def test_a_line_by_least_squares() -> None:
    draw = random.Random(0)
    points = [(float(x), s) for x in (1e3, 1e5, 1e7, 1e9) for s in noisy(1e-4 + x / 1e9, draw, 0.02)]
    latency, rate = fit.line(*zip(*points, strict=True))
    for found, true in ((latency, 1e-4), (rate, 1e9)):
        assert found.relative_sd < 0.03 and abs(found.value / true - 1) < 4 * found.relative_sd


def test_a_line_without_latency() -> None:
    """A latency below nothing is none."""
    latency, rate = fit.line([1e3, 1e6], [0.5e-6, 1e-3])
    assert latency.value == 0 and 1e9 < rate.value < 2e9


def test_uncertainty_grows_with_noise() -> None:
    def sd(share: float) -> float:
        draw = random.Random(0)
        points = [(float(x), s) for x in (1e3, 1e5, 1e7, 1e9) for s in noisy(1e-4 + x / 1e9, draw, share)]
        return max(fit.curve(*zip(*points, strict=True)).relative_sd)

    assert sd(0.0) < 1e-9 < sd(0.02) < sd(0.2) / 5


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 10)), min_size=1, max_size=30))
def test_fitted_curves_rise(points: list[tuple[float, float]]) -> None:
    p = fit.curve(*zip(*points, strict=True))
    assert all(a < b for a, b in pairwise(p.amounts)) and all(a <= b for a, b in pairwise(p.seconds))
    assert len(p.relative_sd) == len(p.amounts) and all(math.isfinite(x) for x in (*p.seconds, *p.relative_sd))


def test_an_interrupted_window_does_not_carry_the_fit() -> None:
    times = [1.0, 1.01, 0.99, 1.02, 0.98, 40.0]
    assert fit.curve([1e3] * 6, times).seconds[0] == pytest.approx(1.0, rel=0.03)
    _, rate = fit.line([1e3, 1e6] * 6, [x * 1e-6 * t for t in times for x in (1e3, 1e6)])
    assert rate.value == pytest.approx(1e6, rel=0.05)


def test_products_hide_a_part_of_their_traffic() -> None:
    samples = [s for s in made(0.01).samples if s.of == "matmul"]
    curves, rho = fit.products(samples, lambda nbytes: nbytes / STREAM)
    assert set(curves) == {"float32", "bfloat16"} and abs(rho.value - RHO) <= 0.1


# ---- the cluster -----------------------------------------------------------------------------------------------------


def test_a_calibration_is_a_cluster_file(tmp_path: Path) -> None:
    found = calibration(made())
    found.save(tmp_path / "mine.json")
    c = Cluster.of(tmp_path / "mine.json")
    assert c == found.cluster and c.size == 4 and list(tmp_path.iterdir()) == [tmp_path / "mine.json"]
    assert c.contention == pytest.approx(0.5) and c.nvme is not None
    near = {u.of: u.relative for u in c.uncertainties}
    raw = json.loads((tmp_path / "mine.json").read_text())
    for path in found.fitted:
        value = raw
        for key in path.split("."):
            value = value[key]
        assert value == pytest.approx(found.fitted[path].value, rel=1e-9) and near[path] == found.fitted[path].relative_sd
        assert path in found.text()


def test_constants_are_found_again() -> None:
    c = calibration(made()).cluster
    assert c.intra.step_s == pytest.approx(STEP, rel=0.2) and c.intra.latency_s == pytest.approx(LATENCY, rel=0.2)
    assert c.intra.reached_Bps == pytest.approx(WIRE, rel=0.1)
    assert c.host.reached_Bps == pytest.approx(STREAM, rel=0.1)
    assert c.device.peak("float64") == c.device.peak("float32") / 2
    assert c.device.matmul_efficiency * c.device.peak("float32") == pytest.approx(RATE, rel=0.3)
    forward, backward = c.device.attention_forward_efficiency, c.device.attention_backward_efficiency
    assert forward / backward == pytest.approx(BACKWARD, rel=0.1)


def test_prices_are_what_was_measured() -> None:
    """Also at sizes that were not; the shipped CPU's are not these."""
    c = calibration(made()).cluster
    cost = Cost(c, Mesh.of({"x": 4}))
    for m, k, n in ((512, 512, 512), (128, 512, 256), (700, 300, 900)):
        flops, nbytes = 2.0 * m * k * n, 4.0 * (m * k + k * n + m * n)
        assert cost.kernel_s("matmul", "float32", flops, nbytes, 1) == pytest.approx(
            LAUNCH + flops / RATE + RHO * nbytes / STREAM, rel=0.25
        )
    assert cost.kernel_s("attention_backward", "float32", 1e9, 0.0, 1) == pytest.approx(LAUNCH + BACKWARD * 1e9 / RATE, rel=0.1)
    assert cost.kernel_s("causal_attention", "float32", 1e9, 0.0, 1) == pytest.approx(LAUNCH + CAUSAL * 1e9 / RATE, rel=0.1)
    # Causal backward was not measured: as any backward.
    assert cost.kernel_s("causal_attention_backward", "float32", 1e9, 0.0, 1) == cost.kernel_s("attention_backward", "float32", 1e9, 0.0, 1)
    for kind in ("cheap", "norm", "view", "random"):
        assert cost.kernel_s(kind, "float32", 0.0, 3e6, 1) == pytest.approx(traffic(3e6), rel=0.1)
    assert cost.optimizer_s(1e6) == pytest.approx(traffic(30e6), rel=0.1)
    # In another op's kernel it has no launch of its own, and what moves nothing is free.
    assert cost.kernel_s("cheap", "float32", 0.0, 3e6, 0) == pytest.approx(traffic(3e6) - LAUNCH, rel=0.1)
    assert cost.kernel_s("cheap", "float32", 0.0, 0.0, 0) == 0
    for kind in ("all_gather", "all_reduce"):
        for size in (3e3, 5e6):
            v = sent(kind, 4, size)
            assert cost.collective(kind, ("x.0", "x.1"), v).seconds == pytest.approx(LATENCY + 3 * STEP + v / WIRE, rel=0.15)


def test_two_alike_take_twice_as_long() -> None:
    cost = Cost(calibration(made()).cluster, Mesh.of({}))
    for kind, flops in (("matmul", 1e8), ("attention", 1e8), ("cheap", 0.0)):
        assert cost.kernel_s(kind, "float32", 2 * flops, 2e6, 2) == pytest.approx(2 * cost.kernel_s(kind, "float32", flops, 1e6, 1))


@given(st.floats(0, 1e12), st.floats(1, 100), st.floats(0, 1e9), st.sampled_from(["matmul", "attention", "cheap", "loss"]))
def test_measured_work_is_monotone(flops: float, step_overhead: float, nbytes: float, kind: str) -> None:
    cost = Cost(CALIBRATED, Mesh.of({}))
    if kind in ("cheap", "loss"):
        flops = 0.0
    least = cost.kernel_s(kind, "float32", flops, nbytes, 1)
    assert least <= cost.kernel_s(kind, "float32", flops * step_overhead, nbytes * step_overhead, 1) * (1 + 1e-12)


CALIBRATED = calibration(made()).cluster


def stepped(local_s: float, calls: float, share: float, more_s: float) -> Stepped:
    """Five steps, the last of them interrupted."""
    whole_s = local_s * (1 + share) + calls * more_s + 0.005
    return Stepped((*(whole_s * x for x in (0.99, 1.0, 1.0, 1.01)), 30.0), local_s, 0.005, calls)


def test_calls_take_more_in_a_step() -> None:
    """What steps miss is in the curves of work; in collectives' and the optimizer's it is not."""
    steps = tuple(stepped(c, n, 0.3, 4e-5) for c, n in ((0.02, 200), (0.1, 220), (0.03, 250)))
    plain, found = calibration(made()).cluster, calibration(replace(made(), steps=steps))
    assert found.step_overhead is not None
    assert (found.step_overhead.share.value, found.step_overhead.seconds.value) == pytest.approx((0.3, 4e-5), rel=0.02)
    assert 0 < found.step_overhead.share.relative_sd < 0.2
    assert "of a call in a step" in found.text() and "more than what they take by themselves" in found.cluster.model_dump_json()
    for before, after in zip(plain.device.curves, found.cluster.device.curves, strict=True):
        share, more_s = (0.0, 0.0) if before.of == "optimizer" else (found.step_overhead.share.value, found.step_overhead.seconds.value)
        assert after.seconds == pytest.approx([(1 + share) * s + more_s for s in before.seconds])
    assert found.cluster.curves == plain.curves


@pytest.mark.parametrize(
    "share, more_s, want", [(-0.2, 4e-5, (0.0, None)), (0.3, -1e-5, (None, 0.0)), (-0.2, -1e-5, (0.0, 0.0)), (99.0, 0.0, (2.0, None))]
)
def test_calls_are_not_faster_in_a_step(share: float, more_s: float, want: tuple[float | None, float | None]) -> None:
    """Nor thrice as slow: then something else kept the machine busy."""
    steps = tuple(stepped(c, n, share, more_s) for c, n in ((0.02, 200), (0.1, 220), (0.03, 250)))
    plain, found = calibration(made()).cluster.device.curves[0], calibration(replace(made(), steps=steps)).cluster.device.curves[0]
    least, most = plain.seconds[0], plain.seconds[-1]
    grown = (found.seconds[-1] - found.seconds[0]) / (most - least) - 1
    added = found.seconds[0] - (1 + grown) * least
    for got, wanted in zip((grown, added), want, strict=True):
        assert got >= -1e-9 if wanted is None else got == pytest.approx(wanted, abs=1e-9)


def test_one_process_has_no_collectives() -> None:
    alone = replace(made(), samples=tuple(s for s in made().samples if s.ranks == 1), processes=1, contention=())
    c = calibration(alone).cluster
    assert c.size == 1 and not c.curves and c.contention == 0
    assert any("intra" in s.of for s in c.sources if s.text.startswith("not measured"))


def test_a_known_gpu_keeps_its_vendors_figures() -> None:
    """The share of them is what is fitted; of an unknown one the best that was seen is the peak."""
    card = replace(made(), device_type="cuda", device="NVIDIA H100 80GB HBM3", memory_bytes=8e10)
    c = calibration(card).cluster
    h100 = Cluster.of("h100").device
    assert c.device.peak_flops == h100.peak_flops and c.device.memory_bandwidth_Bps == h100.memory_bandwidth_Bps
    assert c.device.matmul_efficiency == pytest.approx(max(1e-3, 4 * RATE / h100.peak("bfloat16")), rel=0.3)
    other = calibration(replace(card, device="Tesla T4")).cluster
    assert other.device.peak("bfloat16") == pytest.approx(4 * RATE, rel=0.3) and other.device.name == "Tesla T4"


def test_samples_of_all_processes_count() -> None:
    one = made()
    both = together([one, replace(one, seconds=20.0)])
    alone = sum(s.ranks == 1 for s in one.samples)
    assert len(both.samples) == len(one.samples) + alone and both.seconds == 20.0


# ---- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["no/such/folder/x.json", "."])
def test_an_unwritable_file_is_refused_at_once(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autopar.hardware.calibrate.calibrate", lambda *a: pytest.fail("measured before it was refused"))
    got = CliRunner().invoke(app, ["calibrate", "--out", out])
    assert got.exit_code == 2 and "--out" in got.output


def test_the_command_writes_and_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(processes: int | None, seconds: float, progress: Any) -> Any:
        asked.append((processes, seconds))
        progress("all_gather among 2")
        return calibration(made())

    monkeypatch.setattr("autopar.hardware.calibrate.calibrate", run)
    got = CliRunner().invoke(app, ["calibrate", "--out", str(tmp_path / "a.json"), "--processes", "4", "--seconds", "7", "-v"])
    assert got.exit_code == 0 and asked == [(4, 7.0)]
    assert "all_gather among 2" in got.stderr and "contention" in got.stdout and Cluster.of(tmp_path / "a.json").size == 4


def test_too_many_processes_for_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.hardware.calibrate import calibrate

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(AutoparError, match="2 processes"):
        calibrate(2)
