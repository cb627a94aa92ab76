"""Global constants fitted to measured runs: what share of their peaks devices and links reach, and what frameworks overlap.

At most ten constants for all runs and one for each framework: its slowdown, or, where its network is not known (a share that is not 1), that. theta_i is a constant's relative distance from where it starts (of fractions in
logits, so that they stay below 1). Least squares of

    ( log predicted(theta) - log measured ) / noise      for every run
    theta_i / spread_i                                    for every constant: how far from where it starts it is believed to be

errors beyond OUTLIER noises counting in proportion, not squared (Huber): some published runs are of clusters that misbehaved. By Gauss-Newton with numerical derivatives (predictions are nearly linear in theta). The posterior's standard deviations are those of the linearised problem,
(J' J)^-1.  Every prediction is a whole one, by `step`: there is no second model here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.planner.layout import Layout
from autopar.predict.pieces import Piece
from autopar.predict.runtime import Runtime
from autopar.predict.step import Step, step

NOISE = 0.03  # of a measured step time, relative
OUTLIER = 1.5
ROUNDS = 6
SMALL = 1e-3  # of theta, for derivatives
BACKWARD = 0.8  # of attention's forward efficiency, its backward's (cluster files have the same ratio)


@dataclass(frozen=True)
class Run:
    """A measured step. pieces: of its micro-batch (`predict.api.micro_batch`). others: pieces and layout of other ways to run it, where it is not known
    which was taken: whoever tuned it took the fastest that fits."""

    pieces: tuple[Piece, ...]
    layout: Layout
    runtime: Runtime
    cluster: Cluster
    global_batch: int
    step_s: float
    others: tuple[tuple[tuple[Piece, ...], Layout], ...] = ()

    def predicted(self, values: Mapping[str, float]) -> Step:
        cluster, runtime = applied(values, self.cluster, self.runtime)
        assert runtime is not None
        first = step(self.pieces, self.layout, runtime, cluster, self.global_batch)
        more = [step(pieces, layout, runtime, cluster, self.global_batch) for pieces, layout in self.others]
        fitting = [s for s in (first, *more) if s.fullest_bytes <= cluster.device.usable_bytes]
        return min(fitting, key=lambda s: s.step_time_s, default=first) if more else first

    def predicted_s(self, values: Mapping[str, float]) -> float:
        return self.predicted(values).step_time_s


@dataclass(frozen=True)
class Fit:
    """values: constants by name; relative_sd: one standard deviation, as a share of the value."""

    values: Mapping[str, float]
    relative_sd: Mapping[str, float]

    def cluster(self, cluster: Cluster) -> Cluster:
        return applied(self.values, cluster, None)[0]

    def runtime(self, runtime: Runtime, cluster: Cluster) -> Runtime:
        found = applied(self.values, cluster, runtime)[1]
        assert found is not None
        return found

    def __str__(self) -> str:
        return "\n".join(f"{name:<34} {v:7.3f} +- {self.relative_sd.get(name, 0.0) * v:.3f}" for name, v in sorted(self.values.items()))


# Relative spread that a constant is believed to have around where it starts; fractions stay below 1.
SPREAD = {
    "matmul": 0.1, "attention": 0.15, "memory": 0.1, "matmul memory": 0.3, "intra": 0.1, "inter": 0.1, "tensor hidden": 0.3, "data exposed": 0.5,
    "slowdown": 0.15, "network": 0.5,
}  # fmt: skip


def generation(cluster: Cluster) -> str:
    """Devices of one generation share their efficiencies: "A" of "NVIDIA A100 ..."; a name that says none is a generation of its own."""
    words = cluster.device.name.split()
    return words[1][0] if len(words) > 1 and words[0] == "NVIDIA" else cluster.device.name


def start(runs: Sequence[Run]) -> dict[str, float]:
    """Constants as the runs' cluster files and runtimes have them."""
    out: dict[str, float] = {}
    for r in runs:
        d, g = r.cluster.device, generation(r.cluster)
        found = {
            f"matmul {g}": d.matmul_efficiency, f"attention {g}": d.attention_forward_efficiency, "memory": d.memory_efficiency,
            "matmul memory": d.matmul_memory_overlap, "intra": r.cluster.intra.efficiency, "inter": r.cluster.inter.efficiency,
        }  # fmt: skip
        if r.runtime.network_share != 1:
            found[f"network {r.runtime.name}"] = r.runtime.network_share
        else:
            found[f"slowdown {r.runtime.name}"] = r.runtime.slowdown
        if r.runtime.tensor_hidden:
            found["tensor hidden"] = r.runtime.tensor_hidden
        if 0 < r.runtime.data_exposed < 1:
            found["data exposed"] = r.runtime.data_exposed
        for name, v in found.items():
            out.setdefault(name, v)
    return out


def applied(values: Mapping[str, float], cluster: Cluster, runtime: Runtime | None) -> tuple[Cluster, Runtime | None]:
    """A cluster and a runtime with constants of `values`; what it does not name stays."""
    d, g = cluster.device, generation(cluster)
    attention = values.get(f"attention {g}", d.attention_forward_efficiency)
    device = d.model_copy(
        update={
            "matmul_efficiency": values.get(f"matmul {g}", d.matmul_efficiency),
            "attention_forward_efficiency": attention,
            "attention_backward_efficiency": BACKWARD * attention if f"attention {g}" in values else d.attention_backward_efficiency,
            "memory_efficiency": values.get("memory", d.memory_efficiency),
            "matmul_memory_overlap": values.get("matmul memory", d.matmul_memory_overlap),
        }
    )
    intra = cluster.intra.model_copy(update={"efficiency": values.get("intra", cluster.intra.efficiency)})
    inter = cluster.inter.model_copy(update={"efficiency": values.get("inter", cluster.inter.efficiency)})
    where = cluster.model_copy(update={"device": device, "intra": intra, "inter": inter})
    if runtime is None:
        return where, None
    tensor_hidden, data_exposed = runtime.tensor_hidden, runtime.data_exposed
    return where, replace(
        runtime,
        slowdown=values.get(f"slowdown {runtime.name}", runtime.slowdown),
        network_share=values.get(f"network {runtime.name}", runtime.network_share),
        tensor_hidden=values.get("tensor hidden", tensor_hidden) if tensor_hidden else tensor_hidden,
        data_exposed=values.get("data exposed", data_exposed) if 0 < data_exposed < 1 else data_exposed,
    )


def _moved(name: str, start: float, theta: float) -> float:
    if name.startswith("slowdown"):
        return start * math.exp(theta)
    odds = start / (1 - start) * math.exp(theta / (1 - start))
    return odds / (1 + odds)


def fit(
    runs: Sequence[Run],
    held: Mapping[str, float] | None = None,
    progress: Callable[[int, float], None] | None = None,
    believed: Mapping[str, float] | None = None,
) -> Fit:
    """believed: where constants start; default what the runs' clusters and runtimes have. Those must not come from the same runs, else these count twice. held: constants that are not fitted, with their values. progress: called with each round and the mean of |log error| before it.

    Raises AutoparError without runs, or where a measured time is not positive.
    """
    if not runs:
        raise AutoparError("there are no runs to fit to", where="Cluster.fit", fix="give measured runs")
    if any(not r.step_s > 0 for r in runs):
        raise AutoparError("a measured step takes no time", where="Cluster.fit", fix="give seconds of a step")
    held = dict(held or {})
    first = start(runs)
    first |= {n: v for n, v in (believed or {}).items() if n in first} | held
    free = [n for n in first if n not in held]
    spread = np.array([next(s for k, s in SPREAD.items() if n == k or (n.startswith(k + " ") and n not in SPREAD)) for n in free])
    measured = np.log([r.step_s for r in runs])
    theta = np.zeros(len(free))

    def values(t: np.ndarray) -> dict[str, float]:
        return {**first, **{n: _moved(n, first[n], float(x)) for n, x in zip(free, t, strict=True)}}

    def logs(t: np.ndarray) -> np.ndarray:
        now = values(t)
        return np.log([r.predicted_s(now) for r in runs])

    jacobian = np.zeros((len(runs), len(free)))
    damp = normal = np.diag(1 / spread**2)
    for i in range(ROUNDS):
        here = logs(theta)
        wrong = here - measured
        if progress:
            progress(i, float(np.abs(wrong).mean()))
        if i % 2 == 0:  # nearly linear: derivatives serve two rounds
            for k in range(len(free)):
                moved = theta.copy()
                moved[k] += SMALL
                jacobian[:, k] = (logs(moved) - here) / SMALL
        weights = np.minimum(1.0, OUTLIER * NOISE / np.maximum(np.abs(wrong), 1e-12)) / NOISE**2
        normal = (jacobian.T * weights) @ jacobian + damp
        change = -np.linalg.solve(normal, (jacobian.T * weights) @ wrong + damp @ theta)
        theta = theta + np.clip(change, -0.3, 0.3)
        if np.abs(change).max() < 1e-4:
            break
    sd = np.sqrt(np.diag(np.linalg.inv(normal)))
    return Fit(values(theta), dict(zip(free, map(float, sd), strict=True)))
