"""What one device does in a stretch of a step, as quantities: prices come later, from any device and any links.

A `Task` is a kernel: its kind says which of the device's rates bounds it. A `Transfer` is a collective of activations. Both have a count: a
layer's are those of one layer on average, if layers differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

MATMUL, MEMORY = "matmul", "memory"


@dataclass(frozen=True)
class Task:
    """kind: as `Cost.kernel_s` has them, attention one of `compute.ATTENTION`; dtype: what products are made in; moved_bytes: to and from device memory; launches: kernels;
    even_flops: of attention, if ranks that share a sequence share what causality leaves evenly (`flops`: as our kernels do it, who are given a mask where
    queries are a part of all); square_flops: with what causality hides; weights: elements of parameters' gradients that it makes; again: it is forward's, and runs in backward;
    load: of routed experts, FLOPs of the fullest rank over `flops`, which are the mean; remade_flops: of `flops`, what is no gradient but made a second time."""

    kind: str
    dtype: str
    flops: float
    moved_bytes: float
    launches: float
    even_flops: float = 0.0
    square_flops: float = 0.0
    weights: float = 0.0
    again: bool = False
    load: float = 1.0
    remade_flops: float = 0.0

    @property
    def is_core(self) -> bool:
        """Whether it is attention's forward."""
        return self.square_flops > 0 and not self.kind.endswith("_backward")


@dataclass(frozen=True)
class Transfer:
    """kind: a collective's (`autopar.cost.links.KINDS`); axes: names of `autopar.planner.expert_folding`, such as "tp" or "cp"; wire_bytes: what a
    rank sends. attended: it brings attention its keys and values or takes their gradients away, and may run beside it (ring attention). routed: of rows sent to experts,
    how many each token has chosen of how many."""

    kind: str
    axes: tuple[str, ...]
    wire_bytes: float
    attended: bool = False
    routed: tuple[int, int] | None = None


@dataclass(frozen=True)
class Workload:
    """Tasks and transfers with their counts."""

    tasks: dict[Task, float] = field(default_factory=dict)
    transfers: dict[Transfer, float] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        return sum(n * t.flops for t, n in self.tasks.items())

    def scaled(self, times: float) -> Workload:
        return Workload({t: times * n for t, n in self.tasks.items()}, {t: times * n for t, n in self.transfers.items()})

    @staticmethod
    def together(parts: Iterable[Workload]) -> Workload:
        tasks: dict[Task, float] = {}
        transfers: dict[Transfer, float] = {}
        for p in parts:
            for task, n in p.tasks.items():
                tasks[task] = tasks.get(task, 0.0) + n
            for transfer, n in p.transfers.items():
                transfers[transfer] = transfers.get(transfer, 0.0) + n
        return Workload(tasks, transfers)
