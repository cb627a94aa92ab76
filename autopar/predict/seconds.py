"""Seconds of a stretch: `Cost`'s prices of kernels and collectives, and what a runtime overlaps."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost import two_level
from autopar.cost.compute import ATTENTION
from autopar.cost.model import Cost
from autopar.predict.runtime import Runtime
from autopar.predict.work import MATMUL, MEMORY, Workload


@dataclass(frozen=True)
class Seconds:
    """Of one micro-batch: compute_s; exposed_s: of communication that it waits for."""

    compute_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.compute_s + other.compute_s, self.exposed_s + other.exposed_s)

    def times(self, n: float) -> Seconds:
        return Seconds(n * self.compute_s, n * self.exposed_s)


NOTHING = Seconds(0.0, 0.0)


def seconds(workload: Workload, cost: Cost, runtime: Runtime, backward: bool, scores_bytes: float = 0.0) -> Seconds:
    """scores_bytes: of the matrix of scores, which attention that is not one kernel passes over."""
    compute_s = attention_s = 0.0
    for task, n in workload.tasks.items():
        moved, kind = task.moved_bytes, task.kind
        flops = task.even_flops if task.even_flops and runtime.context_even else task.flops
        if runtime.keeps_rows:
            flops -= task.remade_flops
        if task.square_flops and runtime.unfused_passes:
            # Two products over the whole square, in backward four (the kernel makes the scores again there: five).
            kind, flops = MATMUL, task.square_flops * (1 if task.is_core else 4 / 5)
        if task.weights:  # as wide as what earlier micro-batches left there, which is read and added to
            half = runtime.accumulated_bytes / 2  # read; the other half is written
            moved += task.weights * ((max(2.0, half) if cost.cluster.device.reads_ahead else runtime.accumulated_bytes) - 2.0)
        took = n * cost.kernel_s(kind, task.dtype, task.load * flops, moved, task.launches)
        took /= runtime.attention_rate if kind in ATTENTION else 1.0
        compute_s += took
        attention_s += took if task.square_flops else 0.0
    if runtime.unfused_passes and scores_bytes:
        compute_s += cost.kernel_s(MEMORY, "", 0.0, runtime.unfused_passes * scores_bytes * (2 if backward else 1), 3.0)
    blocking_s = ring_s = 0.0
    for t, n in workload.transfers.items():
        axes = tuple(c for a in t.axes for c in cost.mesh.children(a))
        once_s = cost.collective(t.kind, axes, t.wire_bytes).seconds
        if t.routed and runtime.two_level:
            once_s = min(once_s, two_level.seconds(cost.cluster, cost.mesh, axes, t.wire_bytes, *t.routed))
        took = n * once_s * (2 / 3 if t.routed and backward and runtime.keeps_rows else 1)  # of x, the gradient and dx, not x
        if t.attended and any(a.startswith("cp") for a in t.axes):
            ring_s += took
        else:
            blocking_s += took * (1 - runtime.tensor_hidden)
    ring_s = max(0.0, ring_s - attention_s) if runtime.context_hidden else ring_s
    return Seconds(runtime.slowdown * compute_s, blocking_s + ring_s)
