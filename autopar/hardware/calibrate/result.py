"""A cluster from what was measured: constants, curves, where each is from and how certain it is; and the table for people.

Curves carry the prices. Constants say the same in one number, for what has no curve: the largest products' share of the peak, the slope of all-gathers.
Of a GPU that is known the vendor's peaks stay and what is fitted is the share of them that is reached; else the best that was seen counts as the peak.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autopar.cost.compute import ATTENTION
from autopar.cost.links import KINDS
from autopar.errors import AutoparError
from autopar.hardware.calibrate import fit
from autopar.hardware.calibrate.fit import Fitted, Points
from autopar.hardware.calibrate.measured import Measured
from autopar.hardware.calibrate.steps import StepOverhead, step_overhead
from autopar.hardware.calibrate.timing import Sample
from autopar.hardware.cluster import Cluster, ClusterError
from autopar.hardware.detect import kind_of
from autopar.hardware.parts import CollectiveCurve, Device, Link, Network, Nvme, PeakFlops, Source, Uncertainty, WorkCurve
from autopar.text.sizes import format_amount, format_bytes
from autopar.text.times import format_time

MEMORY_BOUND = ("cheap", "norm", "loss", "optimizer")
LARGEST = 0.25  # products of this share of the largest one's FLOPs, or more, say what is reached of the peak
RESERVE = 0.1  # of a CPU process's share of memory: interpreter, torch, buffers of the communicators


@dataclass(frozen=True)
class Calibration:
    """fitted: constants by their path in the file. seconds: that measuring took. step_overhead: what calls take in a step besides what they take by
    themselves, where steps were measured; it is in the curves of work."""

    cluster: Cluster
    fitted: dict[str, Fitted]
    seconds: float
    step_overhead: StepOverhead | None = None

    def text(self) -> str:
        c = self.cluster
        lines = [f"{c.name}: {c.nodes} x {c.devices_per_node} {c.device.name}, measured in {self.seconds:.0f} s", ""]
        lines += [f"  {path:<42}{_said(path, f.value):>14}  +- {100 * f.relative_sd:.1f} %" for path, f in self.fitted.items()]
        for what, f in (("share", self.step_overhead.share), ("more_s", self.step_overhead.seconds)) if self.step_overhead else ():
            name = f"more of a call in a step{', share' if what == 'share' else ''}"
            lines.append(f"  {name:<42}{_said(what, f.value):>14}  +- {100 * f.relative_sd:.1f} %")
        for k in c.device.curves:
            what = f"{k.of} {k.dtype}".strip()
            unit = "B/s" if k.of in MEMORY_BOUND else "FLOP/s"
            slow, fast = (k.amounts[i] / k.seconds[i] for i in (0, -1))
            span = f"{format_amount(slow, unit):>14} .. {format_amount(fast, unit)}"
            lines.append(f"  {what:<42}{span}, {len(k.amounts)} points, +- {100 * max(k.relative_sd):.1f} %")
        for wire in c.curves:
            what = f"{wire.kind} among {wire.ranks}" + (f" on {wire.nodes} nodes" if wire.nodes > 1 else "")
            span = f"{format_bytes(wire.amounts[0])} .. {format_bytes(wire.amounts[-1])} sent"
            took = f"{format_time(wire.seconds[0]):>14} .. {format_time(wire.seconds[-1])}"
            lines.append(f"  {what:<42}{took}, {span}, +- {100 * max(wire.relative_sd):.1f} %")
        return "\n".join(lines)

    def save(self, path: Path) -> None:
        """The file appears whole or not at all."""
        try:
            with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, suffix=".part", delete=False, encoding="utf-8") as f:
                f.write(self.cluster.model_dump_json(indent=1) + "\n")
            os.chmod(f.name, 0o644)
            os.replace(f.name, path)
        except OSError as e:
            raise AutoparError(
                f"The cluster file cannot be written: {e.strerror}", where=str(path), fix="name another file with --out"
            ) from None


def _said(path: str, value: float) -> str:
    """As its path ends, so is its unit."""
    if path.endswith("_Bps"):
        return format_amount(value, "B/s")
    return format_time(value) if path.endswith("_s") else f"{value:.4g}"


def calibration(m: Measured) -> Calibration:
    base, known = _base(m)
    samples = list(m.samples)
    fitted: dict[str, Fitted] = {}
    besides = step_overhead(m.steps) if m.steps else None
    device = _device(m, samples, base.device, known, fitted, besides)
    links = {where: _link(samples, base, where, known, fitted) for where in ("intra", "inter")}
    host = _copy(samples, "host", base.host, "host", fitted)
    read, write = (_copy(samples, f"nvme_{k}", None, f"nvme.{k}", fitted) for k in ("read", "write"))
    disk = Nvme(read=read, write=write)
    contention = 0.0
    if m.contention:
        seen = np.clip(m.contention, 0.0, 1.0)
        contention = float(seen.mean())
        spread = float(seen.std(ddof=1) / np.sqrt(len(seen))) / max(contention, 1e-3) if len(seen) > 1 else 0.0
        fitted["contention"] = Fitted(contention, spread)
    cluster = Cluster(
        name=f"{base.name}-calibrated", device=device, devices_per_node=m.processes, nodes=m.nodes, host=host, nvme=disk, host_memory_bytes=m.host_bytes,
        intra=links["intra"], inter=Network(**{**base.inter.model_dump(), **links["inter"].model_dump()}), contention=contention, curves=collective_curves(samples),
        sources=_sources(m, fitted, base, known, besides), uncertainties=tuple(Uncertainty(of=k, relative=f.relative_sd) for k, f in fitted.items()),
    )  # fmt: skip
    return Calibration(cluster, fitted, m.seconds, besides)


def _base(m: Measured) -> tuple[Cluster, bool]:
    """What is not measured, such as links to other nodes, is taken from here; whether its device is this one."""
    if m.device_type == "cpu":
        return Cluster.of("cpu"), False
    try:
        return Cluster.of(kind_of(m.device)), True
    except ClusterError:
        return Cluster.of("h100"), False


def _device(
    m: Measured, samples: list[Sample], base: Device, known: bool, fitted: dict[str, Fitted], besides: StepOverhead | None
) -> Device:
    cheap = _of(samples, "cheap")
    bandwidth = base.memory_bandwidth_Bps if known else max(_rates(cheap))
    largest = max(s.amount for s in cheap)
    reached = _share("device.memory_efficiency", _rates(s for s in cheap if s.amount == largest), bandwidth, fitted)
    fitted["device.launch_s"] = launch = fit.mean([s.seconds for s in cheap if s.amount == min(x.amount for x in cheap)])
    moving = _work_curve("cheap", "", _curve(cheap))
    curves, rho = fit.products(_of(samples, "matmul"), lambda nbytes: moving.at(nbytes) - moving.at(0.0))
    fitted["device.matmul_memory_overlap"] = rho
    work = [_work_curve("matmul", dtype, p) for dtype, p in curves.items()]
    for kind in ATTENTION:
        for dtype in sorted({s.dtype for s in _of(samples, kind)}):
            same = [s for s in _of(samples, kind) if s.dtype == dtype]
            work.append(_work_curve(kind, dtype, _curve(same)))
    work += [_work_curve(kind, "", _curve(_of(samples, kind))) for kind in MEMORY_BOUND]
    best = {d: max(_rates(s for s in _of(samples, "matmul") if s.dtype == d)) for d in curves}
    wide = best["float32"]
    half = best["bfloat16"] if m.device_type == "cuda" else wide
    peak = PeakFlops(bfloat16=best.get("bfloat16", wide), float16=half, float32=wide, float64=wide / 2)
    peak = base.peak_flops if known else peak
    main = "bfloat16" if m.device_type == "cuda" else "float32"

    def efficiency(kind: str, path: str) -> float:
        same = [s for s in _of(samples, kind) if s.dtype == main]
        limit = LARGEST * max(s.amount for s in same)
        return _share(path, _largest(same, lambda s: s.amount >= limit), float(getattr(peak, main)), fitted)

    return Device(
        name=m.device, peak_flops=peak, memory_bytes=m.memory_bytes, memory_bandwidth_Bps=bandwidth,
        reserve_bytes=base.reserve_bytes if m.device_type == "cuda" else RESERVE * m.memory_bytes,
        matmul_efficiency=efficiency("matmul", "device.matmul_efficiency"),
        attention_forward_efficiency=efficiency("attention", "device.attention_forward_efficiency"),
        attention_backward_efficiency=efficiency("attention_backward", "device.attention_backward_efficiency"),
        memory_efficiency=reached, matmul_memory_overlap=min(1.0, rho.value), launch_s=launch.value,
        curves=besides.of(work) if besides else tuple(work), without_triton=base.without_triton,
    )  # fmt: skip


def _link(samples: list[Sample], base: Cluster, where: str, known: bool, fitted: dict[str, Fitted]) -> Link:
    """Latency, step and bandwidth of all-gathers; a link that none went over is the base's."""
    of: Link = base.intra if where == "intra" else base.inter
    gathers = [s for s in _of(samples, "all_gather") if (s.nodes == 1) == (where == "intra")]
    if not gathers:
        return Link(**of.model_dump(include=set(Link.model_fields)))
    lines = {w: fit.line(*_columns(s for s in gathers if s.ranks == w)) for w in sorted({s.ranks for s in gathers})}
    (few, (least, _)), (many, (most, slowest)) = min(lines.items()), max(lines.items())
    step_s = max(0.0, (most.value - least.value) / (many - few)) if many > few else 0.0
    latency_s = max(0.0, least.value - step_s * (few - 1))
    fitted[f"{where}.latency_s"] = Fitted(latency_s, least.relative_sd)
    if step_s:
        fitted[f"{where}.step_s"] = Fitted(
            step_s, float(np.hypot(least.relative_sd * least.value, most.relative_sd * most.value) / (most.value - least.value))
        )
    bandwidth = of.bandwidth_Bps if known else slowest.value
    efficiency = min(1.0, max(1e-3, slowest.value / bandwidth))
    fitted[f"{where}.{'efficiency' if known else 'bandwidth_Bps'}"] = Fitted(efficiency if known else bandwidth, slowest.relative_sd)
    return Link(bandwidth_Bps=bandwidth, efficiency=efficiency, latency_s=latency_s, step_s=step_s)


def _copy(samples: list[Sample], of: str, vendor: Link | None, path: str, fitted: dict[str, Fitted]) -> Link:
    latency, rate = fit.line(*_columns(_of(samples, of)))
    fitted[f"{path}.latency_s"], fitted[f"{path}.bandwidth_Bps"] = latency, rate
    return Link(bandwidth_Bps=rate.value, efficiency=1.0, latency_s=latency.value)


def collective_curves(samples: list[Sample]) -> tuple[CollectiveCurve, ...]:
    out = []
    for kind in KINDS:
        same = _of(samples, kind)
        for ranks, nodes in sorted({(s.ranks, s.nodes) for s in same}):
            p = _curve([s for s in same if (s.ranks, s.nodes) == (ranks, nodes)])
            out.append(
                CollectiveCurve(kind=kind, ranks=ranks, nodes=nodes, amounts=p.amounts, seconds=p.seconds, relative_sd=p.relative_sd)
            )
    return tuple(out)


def _sources(m: Measured, fitted: dict[str, Fitted], base: Cluster, known: bool, besides: StepOverhead | None) -> tuple[Source, ...]:
    how = f"measured by `autopar calibrate`: {m.processes} processes a node, {m.nodes} nodes, {m.threads} threads each, all at once"
    if besides:
        share, more_s = besides.share.value, besides.seconds.value
        how += f"; device.curves are of calls in a step, {100 * share:.3g}% and {more_s:.3g} s more than what they take by themselves"
    own = ["device.name", "device.memory_bytes", "device.curves", "curves", "devices_per_node", "nodes", "host_memory_bytes", *fitted]
    if not known:
        own += ["device.peak_flops", "device.memory_bandwidth_Bps"]
    rest = ["device.reserve_bytes"] + (["device.peak_flops", "device.memory_bandwidth_Bps"] if known else [])
    links = [w for w in ("intra", "inter") if f"{w}.latency_s" not in fitted]
    return (Source(of=tuple(own), text=how), Source(of=tuple(rest + links), text=f"not measured: {base.name}.json"))


# ---- samples -------------------------------------------------------------------------------------------------------


def _of(samples: Iterable[Sample], of: str) -> list[Sample]:
    return [s for s in samples if s.of == of]


def _columns(samples: Iterable[Sample]) -> tuple[list[float], list[float]]:
    kept = list(samples)
    return [s.amount for s in kept], [s.seconds for s in kept]


def _rates(samples: Iterable[Sample]) -> list[float]:
    return [s.amount / s.seconds for s in samples]


def _largest(samples: list[Sample], enough: Callable[[Sample], bool]) -> list[float]:
    return _rates(s for s in samples if enough(s))


def _share(path: str, rates: list[float], whole: float, fitted: dict[str, Fitted]) -> float:
    found = fit.mean(rates)
    share = min(1.0, max(1e-3, found.value / whole))
    fitted[path] = Fitted(share, found.relative_sd)
    return share


def _curve(samples: list[Sample]) -> Points:
    return fit.curve(*_columns(samples))


def _work_curve(of: str, dtype: str, p: Points) -> WorkCurve:
    return WorkCurve(of=of, dtype=dtype, amounts=p.amounts, seconds=p.seconds, relative_sd=p.relative_sd)
