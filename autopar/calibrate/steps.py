"""Whole steps of a small model, beside the calls that they are made of.

Calls that are timed by themselves follow one another without a pause, with nothing else in the caches, and wait for nobody; what hands them their tensors is not
timed at all. In a step they take more: a step's local work takes C by the samples of its N calls, and T - W indeed, the step less its exposed
collectives. What is missing hardly depends on how large the calls are, so (T - W - C) / N is added to each. Steps run under aot_eager, a call for every
operator. Of GPUs, where calls are issued ahead, none are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.calibrate.timing import Clock
from autopar.cluster import Cluster
from autopar.hardware import WorkCurve

VOCAB, WIDTH, HEADS, TOKENS, BATCH, LAYERS = 1024, 256, 8, 128, 4, 2  # BATCH: of a process
STEPS = 5
MILLISECOND = 1e-3


@dataclass(frozen=True)
class Stepped:
    """A step: seconds that it took; by prices, its local work and its exposed collectives, and its calls."""

    seconds: float
    local_s: float
    waiting_s: float
    calls: float

    @property
    def missing_s(self) -> float:
        """Of one call."""
        return (self.seconds - self.waiting_s - self.local_s) / self.calls


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(b, s, HEADS, w // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.token(ids))))


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Reference:
    """The model under one layout of `world` processes, ready to step (collective)."""

    def __init__(self, layout: str, world: int) -> None:
        import autopar  # which imports this package

        state = torch.get_rng_state()
        torch.manual_seed(0)
        self.module = autopar.compile(
            _Model(), {"x": world}, layout=layout, backend="aot_eager", optimizer="adamw-fused", cluster=f"cpu:{world}", loss_fn=_loss
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

    def stepped(self, cluster: Cluster) -> tuple[Stepped, ...]:
        alone = _free_links(cluster)
        whole_s, local_s = self._price_s(cluster), self._price_s(alone)
        longer = alone.device.model_copy(update={"curves": later(alone.device.curves, MILLISECOND)})
        calls = (self._price_s(alone.model_copy(update={"device": longer})) - local_s) / MILLISECOND
        return tuple(Stepped(s, local_s, whole_s - local_s, calls) for s in self.seconds)

    def _price_s(self, cluster: Cluster) -> float:
        from autopar.cost import Cost
        from autopar.formulate.setting import Setting
        from autopar.price import price

        step: Any = self.step
        trained = frozenset(n for n, _ in self.module.named_parameters())
        setting = Setting(trained, fuses=False)
        return price(step.base, step.plan, step.graph, Cost(cluster, step.groups.mesh), setting, step.groups.prefix).step_time_s


def references(world: int) -> list[Reference]:
    layouts = ["ddp"] + ["fsdp"] * (world > 1) + ["tp"] * (world > 1 and HEADS % world == 0)
    return [Reference(layout, world) for layout in layouts]


def later(curves: Sequence[WorkCurve], seconds: float) -> tuple[WorkCurve, ...]:
    """Every call so much longer; the optimizer, which is no call of the graph, as it is."""
    return tuple(c if c.of == "optimizer" else c.model_copy(update={"seconds": tuple(seconds + s for s in c.seconds)}) for c in curves)


def _free_links(cluster: Cluster) -> Cluster:
    free = {"bandwidth_Bps": 1e21, "efficiency": 1.0, "latency_s": 0.0, "step_s": 0.0}
    links = {where: getattr(cluster, where).model_copy(update=free) for where in ("intra", "inter")}
    return cluster.model_copy(update={**links, "curves": (), "contention": 0.0})
