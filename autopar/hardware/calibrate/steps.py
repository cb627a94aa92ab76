"""Whole steps of a small model, beside the calls that they are made of.

Calls that are timed by themselves follow one another without a pause, with nothing else in the caches, and wait for nobody; what hands them their tensors is not
timed at all. In a step they take more. Of a step of T seconds, whose N local calls take C by the samples and whose collectives add W, what is missing is

    T - C - W  =  share C + more_s N

by least squares of relative errors over a narrow and a wide model, under layouts with few and with many collectives. Steps run under aot_eager, a call for every operator. Of
GPUs, where calls are issued ahead, none are run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from autopar.api import compile
from autopar.cost import Cost
from autopar.hardware.calibrate.fit import Fitted
from autopar.hardware.calibrate.timing import Clock
from autopar.hardware.cluster import Cluster
from autopar.hardware.parts import WorkCurve
from autopar.planner.formulation.training import TrainingConfig
from autopar.simulate.price import Price, price

VOCAB, WIDTHS, HEADS, TOKENS, BATCH, LAYERS = 1024, (128, 512), 8, 128, 4, 2  # BATCH: of a process
STEPS = 5
MILLISECOND = 1e-3
MOST, MOST_S = 2.0, 0.01  # that calls may take more: beyond, something else kept the machine busy


@dataclass(frozen=True)
class Stepped:
    """Steps of one model under one layout: seconds that they took; by prices, their local work and what collectives add; how many local calls they have."""

    seconds: tuple[float, ...]
    local_s: float
    waiting_s: float
    calls: float

    @property
    def median_s(self) -> float:
        """A step that something interrupts takes much longer, and counts little."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class StepOverhead:
    """What calls take more in a step: a share of what they take by themselves, and seconds of each."""

    share: Fitted
    seconds: Fitted

    def of(self, curves: Sequence[WorkCurve]) -> tuple[WorkCurve, ...]:
        """In a step; the optimizer, which is no call of the graph, as it is."""
        share, seconds = 1 + min(MOST, self.share.value), min(MOST_S, self.seconds.value)
        return tuple(
            c if c.of == "optimizer" else c.model_copy(update={"seconds": tuple(share * s + seconds for s in c.seconds)}) for c in curves
        )


def step_overhead(steps: Sequence[Stepped]) -> StepOverhead:
    """Neither is negative. Uncertain by how far steps lie from their medians."""
    whole = np.array([s.median_s for s in steps])
    counts = np.array([[s.local_s, s.calls] for s in steps]) / whole[:, None]
    wanted = np.array([s.median_s - s.local_s - s.waiting_s for s in steps]) / whole
    spread = np.array([1.4826 * np.median(np.abs(np.array(s.seconds) - s.median_s)) / math.sqrt(len(s.seconds)) for s in steps]) / whole
    best, sd, free = np.zeros(2), np.zeros(2), [0, 1]
    while free:
        solve = np.linalg.pinv(counts[:, free])
        found = solve @ wanted
        if (found >= 0).all():
            best[free], sd[free] = found, np.sqrt(solve**2 @ spread**2)
            break
        free.pop(int(found.argmin()))
    return StepOverhead(*(Fitted(float(x), float(e) / float(x) if x else 0.0) for x, e in zip(best, sd, strict=True)))


class _Block(nn.Module):
    """modern: a norm of elementary operators and a gated unit, of twice as many calls."""

    def __init__(self, width: int, modern: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = (_RootMeanSquare(width) if modern else nn.LayerNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=not modern) for _ in range(4))
        self.gate = nn.Linear(width, 4 * width, bias=False) if modern else None
        self.up, self.down = nn.Linear(width, 4 * width, bias=not modern), nn.Linear(4 * width, width, bias=not modern)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(b, s, HEADS, w // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, w))
        y = self.norm2(x)
        out: torch.Tensor = x + self.down(F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y))
        return out


class _RootMeanSquare(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class _Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, width)
        self.blocks = nn.Sequential(*(_Block(width, bool(i % 2)) for i in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.token(ids))))
        return logits


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Reference:
    """The model under one layout of `world` processes, ready to step (collective)."""

    def __init__(self, width: int, layout: str, world: int) -> None:
        state = torch.get_rng_state()
        torch.manual_seed(0)
        self.module = compile(
            _Model(width), {"x": world}, layout=layout, backend="aot_eager", optimizer="adamw-fused", cluster=f"cpu:{world}", loss_fn=_loss
        )
        self.ids = torch.randint(VOCAB, (BATCH * world, TOKENS))
        torch.set_rng_state(state)
        self.step = self.module.prepare(self.ids, target=self.ids)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), fused=True)
        self.seconds: list[float] = []
        self.run()

    def run(self) -> None:
        self.module(self.ids, target=self.ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measure(self, clock: Clock) -> None:
        self.seconds += [clock.agreed(clock.window(self.run, 1)) for _ in range(STEPS)]

    def stepped(self, cluster: Cluster) -> Stepped:
        alone = _free_links(cluster)
        whole_s, local_s = self._price_s(cluster), self._price_s(alone)
        later = StepOverhead(Fitted(0.0, 0.0), Fitted(MILLISECOND, 0.0)).of(alone.device.curves)
        longer = alone.model_copy(update={"device": alone.device.model_copy(update={"curves": later})})
        return Stepped(tuple(self.seconds), local_s, whole_s - local_s, (self._price_s(longer) - local_s) / MILLISECOND)

    def _price_s(self, cluster: Cluster) -> float:
        return price_of(self.module, self.step, cluster).step_time_s


def price_of(module: nn.Module, step: Any, cluster: Cluster) -> Price:
    """Of a compiled module's step, as it runs: nothing is fused."""
    trained = frozenset(n for n, p in module.named_parameters() if p.requires_grad)
    cost, training = Cost(cluster, step.groups.mesh), TrainingConfig(trained, fuses=False)
    return price(step.base, step.plan, step.graph, cost, training, step.groups.prefix)


def references(world: int) -> list[Reference]:
    layouts = ["ddp"] + ["fsdp"] * (world > 1) + ["tp"] * (world > 1 and HEADS % world == 0)
    return [Reference(width, layout, world) for width in WIDTHS for layout in layouts]


def _free_links(cluster: Cluster) -> Cluster:
    free = {"bandwidth_Bps": 1e21, "efficiency": 1.0, "latency_s": 0.0, "step_s": 0.0}
    links = {where: getattr(cluster, where).model_copy(update=free) for where in ("intra", "inter")}
    return cluster.model_copy(update={**links, "curves": (), "contention": 0.0})
