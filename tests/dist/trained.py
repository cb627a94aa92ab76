"""A compiled model trained beside the same on one device: how far apart they come."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.kernels.random import EagerRandom


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """As a share of the largest element of `a`, the reference; infinite where it is no number."""
    whole = b.full_tensor() if isinstance(b, DTensor) else b
    assert whole.shape == a.shape
    if not a.numel():
        return 0.0
    d = float((a - whole).abs().max() / (a.abs().max() + 1e-6))
    return d if math.isfinite(d) else math.inf


def _loss(out: Any) -> torch.Tensor:
    loss: torch.Tensor = out["loss"] if isinstance(out, Mapping) else out.loss
    return loss


def trained_beside(
    reference: nn.Module, compiled: Any, batch: dict[str, Any], seed: int, steps: int, local: bool = False, scale: float = 1.0
) -> dict[str, float]:
    """Steps of AdamW on both. The largest differences of losses, gradients and parameters, of the parameters that this rank has. local: it is given its own part of the
    batch."""
    theirs = dict(reference.named_parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3, eps=1e-3) for m in (reference, compiled)]
    worst = {"loss": 0.0, "gradients": 0.0, "parameters": 0.0}

    def note(what: str, a: torch.Tensor, b: torch.Tensor) -> None:
        worst[what] = max(worst[what], difference(a, b))

    samples = next(len(v) for v in batch.values() if isinstance(v, torch.Tensor))
    for step in range(steps):
        with EagerRandom(seed, step):
            loss = _loss(reference(**batch))
            (loss * scale).backward()
        each = samples // compiled.data_world if local else samples
        first = each * compiled.data_rank if local else 0
        mine = _loss(compiled(**{k: v[first : first + each] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}))
        assert mine.dim() == 0
        (mine * scale).backward()
        note("loss", loss.detach(), mine.detach())
        for n, q in compiled.named_parameters():
            p = theirs[n]
            assert (p.grad is None) == (q.grad is None), n
            if p.grad is not None and q.grad is not None:
                note("gradients", p.grad, q.grad)
        for o in optimizers:
            o.step()
            o.zero_grad()
        for n, q in compiled.named_parameters():
            note("parameters", theirs[n].detach(), q.detach())
    return worst
