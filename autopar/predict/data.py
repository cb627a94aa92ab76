"""Data parallelism's traffic: gradients that replicas sum, parameters that ZeRO gathers.

psi parameters that a device computes with are shared by D ranks (dp x cp: those of one sequence have the same parameters). Of an element, in wire bytes
of a rank, times psi (D - 1) / D:

    ZeRO-0, DDP       all-reduce of gradients, once a step                 2 x reduce
    ZeRO-1            reduce-scatter of gradients, all-gather of copies    reduce + param            (4 + 2 in Megatron-LM)
    ZeRO-2            the same, but gradients are nowhere whole, so they   m reduce + param
                      are reduced with every micro-batch
    ZeRO-3, FSDP      gathers before forward and before backward, reduce-scatter, every micro-batch    m (2 param + reduce)

HSDP shards over `shard_ways` ranks, and sums over the replicas of them: all-reduce of what a rank holds.

Where a runtime overlaps it, it runs beside one micro-batch, if it is once a step (reductions beside the last backward, gathers beside the next
forward), or else beside all of the step. A share of it
is waited for all the same (kernels that compete for the device, the first and the last of it):  max( share x traffic, traffic - window ).

Source: Rajbhandari et al., "ZeRO", 2020, section 7; the share is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.model import Cost
from autopar.errors import LayoutError
from autopar.layout import Layout
from autopar.predict.runtime import Runtime


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
    return ways


def is_once_a_step(layout: Layout, micro_batches: int) -> bool:
    return layout.zero < 2 or (layout.zero == 2 and micro_batches == 1)


def traffic(
    params: float, layout: Layout, runtime: Runtime, cost: Cost, replicas: int, micro_batches: int, window_s: float, step_window_s: float
) -> Traffic:
    """params: psi; window_s: compute of one micro-batch; step_window_s: compute of all of them."""
    every, ways = replicas * layout.cp, sharded_over(layout, replicas)
    if every == 1 or not params:
        return Traffic(0.0, 0.0)
    axes = tuple(c for a in ("dp", "cp") for c in cost.mesh.children(a))
    r, p = runtime.reduce_bytes, runtime.param_bytes

    def took(kind: str, nbytes: float, over: tuple[str, ...], n: int) -> float:
        twice = 2 if kind == "all_reduce" else 1
        return cost.collective(kind, over, twice * nbytes * (n - 1) / n).seconds if n > 1 else 0.0

    if layout.zero == 0:
        seconds, window = took("all_reduce", r * params, axes, every), window_s
    else:
        near, far = _split(axes, cost, ways)
        gather, scatter = took("all_gather", p * params, near, ways), took("reduce_scatter", r * params, near, ways)
        replicate = took("all_reduce", r * params / ways, far, every // ways)
        if is_once_a_step(layout, micro_batches):
            seconds, window = gather + scatter + replicate, window_s
        elif layout.zero == 2:
            seconds, window = gather + micro_batches * scatter + replicate, step_window_s
        else:
            gathers = 2 if layout.reshard_after_forward else 1
            seconds, window = micro_batches * (gathers * gather + scatter) + replicate, step_window_s
    if runtime.data_exposed >= 1:
        return Traffic(seconds, seconds)
    return Traffic(seconds, max(runtime.data_exposed * seconds, seconds - window))


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
