"""Data parallelism's traffic: gradients that replicas sum, parameters that ZeRO gathers.

psi parameters that a device computes with are shared by D ranks (dp x cp: those of one sequence have the same parameters). Of an element, in wire bytes
of a rank, times psi (D - 1) / D:

    ZeRO-0, DDP       all-reduce of gradients, once a step                 2 x reduce
    ZeRO-1            reduce-scatter of gradients, all-gather of copies    reduce + param            (4 + 2 in Megatron-LM)
    ZeRO-2            the same, but gradients are nowhere whole, so they   m reduce + param
                      are reduced with every micro-batch
    ZeRO-3, FSDP      gathers before forward and before backward, reduce-scatter, every micro-batch    m (2 param + reduce)

Routed experts that ep of the D ranks share are alike on D / ep of them: for their parameters D / ep stands for D above. Where experts are arranged otherwise
(`autopar.planner.expert_folding`), it is tp D / (ep expert_tp), tp ranks of which may be.

HSDP shards over `shard_ways` ranks, and sums over the replicas of them: all-reduce of what a rank holds.

Where a runtime overlaps it, and it is once a step, a chunk's gradients are reduced from its last backward on, and its parameters gathered until its first
forward is done; a rank with several chunks is done with most of them long before the step ends. So what is not ready before
chunk k is must fit into what is left of the step from then on, R (v - k) / v <= window_k, and what does not fit is waited for. Every micro-batch's
traffic runs beside all of the step; or, where the runtime does it by halves, gathers before forward beside forward, and gathers before backward and reductions beside backward, as in the
stages of the integer program. A share of it is waited for all the same (kernels that compete for the device, the first and the last of it):
max( share x traffic, what does not fit ).

Source: Rajbhandari et al., "ZeRO", 2020, section 7; the share is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.buckets import latencies, limit
from autopar.cost.model import Cost
from autopar.errors import LayoutError
from autopar.pipeline import beyond
from autopar.planner.expert_folding import TENSOR, TOKENS, named
from autopar.planner.layout import Layout
from autopar.predict.held import Held
from autopar.predict.runtime import Runtime


@dataclass(frozen=True)
class Windows:
    """What traffic may run beside. before_s: from the start of the step to the end of a chunk's first forward; after_s: from the start of its last backward to the
    end of the step, of every chunk of a rank; step_s: compute of the rank, all micro-batches, halves_s: forward and backward of it."""

    before_s: tuple[float, ...] = ()
    after_s: tuple[float, ...] = ()
    step_s: float = 0.0
    halves_s: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Traffic:
    """seconds: of all links of a rank; exposed_s: of it, compute waits for."""

    seconds: float
    exposed_s: float


def sharded_over(layout: Layout, replicas: int) -> int:
    """Ranks that ZeRO's shards lie on. Raises LayoutError where `shard_ways` does not divide."""
    every = replicas * layout.cp
    if layout.zero == 0:
        return 1
    ways = layout.shard_ways or every
    if every % ways:
        raise LayoutError(f"shard_ways {ways} does not divide {every} ranks", where="Layout", fix="give a divisor of dp x cp")
    if layout.shard_ways and ways * layout.tp % (layout.ep * (layout.expert_tp or layout.tp)):
        raise LayoutError(
            f"shards over {ways} ranks, experts over {layout.ep}", where="Layout, shard_ways", fix="give a multiple of ep, or leave it out"
        )
    return ways


def experts_over(layout: Layout, ways: int) -> int:
    """Ranks that shards of routed experts lie on, where those of other parameters lie on `ways`."""
    return layout.expert_replicas(ways) if layout.zero else 1


def is_once_a_step(layout: Layout, micro_batches: int) -> bool:
    return layout.zero < 2 or (layout.zero == 2 and micro_batches == 1)


def loss_s(layout: Layout, runtime: Runtime, cost: Cost, replicas: int) -> float:
    """Seconds that a micro-batch waits for the sum of its loss over the ranks that share it out."""
    if not runtime.sums_loss or replicas * layout.cp == 1:
        return 0.0
    axes = tuple(c for p in layout.parts(replicas) if p.dense != TENSOR for c in cost.mesh.children(p.name))
    return cost.collective("all_reduce", axes, 4).seconds


def traffic(
    params: Held, layout: Layout, runtime: Runtime, cost: Cost, replicas: int, micro_batches: int, windows: Windows, layers: int = 1
) -> Traffic:
    """params: psi; layers: of the rank, with what comes before and after them. Each is a bucket of its own at least, where the runtime does traffic by halves: it pays a latency
    for each."""
    buckets = layers if runtime.by_halves else 1
    every, ways = replicas * layout.cp, sharded_over(layout, replicas)
    routed = experts_over(layout, ways)
    ranks = layout.parts(replicas)
    dense = tuple(p.name for p in ranks if p.dense != TENSOR)
    found = _parts(params, dense, every, ways, layout, runtime, cost, micro_batches, windows, buckets)
    alike, same = named(ranks, routed=TOKENS), layout.expert_replicas(every)
    experts = _parts(Held(params.experts), alike, same, routed, layout, runtime, cost, micro_batches, windows, buckets)
    if found and experts:  # the same steps of a step: each pair runs beside the same
        found = [(a + b, window) for (a, window), (b, _) in zip(found, experts, strict=True)]
    found = found or experts
    seconds = sum(s for s, _ in found)
    if runtime.data_exposed >= 1:
        return Traffic(seconds, seconds)
    return Traffic(seconds, max(runtime.data_exposed * seconds, sum(beyond(s, window) for s, window in found)))


def _parts(
    held: Held,
    names: tuple[str, ...],
    every: int,
    ways: int,
    layout: Layout,
    runtime: Runtime,
    cost: Cost,
    micro_batches: int,
    windows: Windows,
    buckets: int,
) -> list[tuple[float, tuple[float, ...]]]:
    """Seconds of traffic, and what each may run beside. held: dense; names: axes of the mesh over which parameters are alike; every: ranks on them; buckets: at least so many,
    and besides each parameter that no bucket is worth."""
    params = held.dense
    if every == 1 or not params:
        return []
    axes = tuple(c for a in names for c in cost.mesh.children(a))
    r, p = runtime.reduce_bytes, runtime.param_bytes

    def took(kind: str, nbytes: float, over: tuple[str, ...], n: int) -> float:
        if n == 1:
            return 0.0
        twice = 2 if kind == "all_reduce" else 1
        whole_s = cost.collective(kind, over, twice * nbytes * (n - 1) / n).seconds
        if buckets == 1:
            return whole_s
        within = limit(cost, kind, over)
        if not within.alpha_s:
            return whole_s
        if not held.tensors:
            return whole_s + within.alpha_s * (max(buckets, nbytes / within.full_bytes) - 1)
        return whole_s + within.alpha_s * (latencies([(nbytes / params * n, often) for n, often in held.tensors], buckets, within) - 1)

    before, after, step_windows = windows.before_s, windows.after_s, (windows.step_s,)
    if layout.zero == 0:
        return [(took("all_reduce", r * params, axes, every), after)]
    near, far = _split(axes, cost, ways)
    gather, scatter = took("all_gather", p * params, near, ways), took("reduce_scatter", r * params, near, ways)
    replicate = took("all_reduce", r * params / ways, far, every // ways)
    if is_once_a_step(layout, micro_batches):
        return [(gather, before), (scatter + replicate, after)]
    if layout.zero == 2:
        return [(gather + micro_batches * scatter + replicate, step_windows)]
    gathers = 2 if layout.reshard_after_forward else 1
    if runtime.by_halves:
        forward_s, backward_s = windows.halves_s
        again = gather if layout.reshard_after_forward else 0.0
        return [(micro_batches * gather, (forward_s,)), (micro_batches * (again + scatter) + replicate, (backward_s,))]
    return [(micro_batches * (gathers * gather + scatter) + replicate, step_windows)]


def _split(axes: tuple[str, ...], cost: Cost, ways: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fastest axes of `axes` that make `ways` ranks, and the others."""
    near: list[str] = []
    n = 1
    for a in sorted(axes, key=cost.mesh.names.index, reverse=True):
        if n == ways:
            break
        near.append(a)
        n *= cost.mesh.axis_size(a)
    if n != ways:
        raise LayoutError(
            f"{ways} ranks are not whole axes of the mesh", where="Layout, shard_ways", fix="give a number of whole nodes, or leave it out"
        )
    return tuple(a for a in axes if a in near), tuple(a for a in axes if a not in near)
