"""Optimizers of the kinds that other libraries have, written as those are with torch's operators: moments in eight bits by blocks, preconditioners of whole matrices, and one that works on
the shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.dist.habits import Prepared, habit
from tests.dist.habits.updates import stepped

BLOCK = 32


class Adam8bit(torch.optim.Optimizer):
    """As bitsandbytes and torchao keep moments: a byte each, which is the nearest of 256 values between -1 and 1, denser near zero, and a scale for every block."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        steps = torch.linspace(-1, 1, 255)
        self.values = torch.cat([steps.sign() * steps.abs() ** 3, torch.ones(1)])
        self.edges = (self.values[1:] + self.values[:-1]) / 2

    def packed(self, t: Tensor) -> tuple[Tensor, Tensor]:
        blocks = torch.nn.functional.pad(t.flatten(), (0, -t.numel() % BLOCK)).reshape(-1, BLOCK)
        scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12)
        return torch.bucketize(blocks / scale, self.edges).to(torch.uint8), scale

    def unpacked(self, codes: Tensor, scale: Tensor, like: Tensor) -> Tensor:
        return (self.values[codes.int()] * scale).flatten()[: like.numel()].reshape(like.shape)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    for name in ("m", "v"):
                        state[name], state[f"{name}_scale"] = self.packed(torch.zeros_like(p))
                state["step"] += 1
                m = self.unpacked(state["m"], state["m_scale"], p).lerp(p.grad, 0.1)
                v = self.unpacked(state["v"], state["v_scale"], p).lerp(p.grad * p.grad, 0.05)
                p -= group["lr"] * (m / (1 - 0.9 ** state["step"])) / ((v / (1 - 0.95 ** state["step"])).clamp(min=0).sqrt() + 1e-3)
                state["m"], state["m_scale"] = self.packed(m)
                state["v"], state["v_scale"] = self.packed(v)


class Shampoo(torch.optim.Optimizer):
    """G -> L^-1/4 G R^-1/4 with L, R the sums of G G' and G' G; SGD where there is no matrix."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                g = p.grad
                if g.dim() == 2:
                    state = self.state[p]
                    for name, now in (("left", g @ g.T), ("right", g.T @ g)):
                        state[name] = state[name] + now if name in state else now + 1e-2 * torch.eye(len(now))
                    g = self.root(state["left"]) @ g @ self.root(state["right"])
                p.add_(g, alpha=-group["lr"])

    @staticmethod
    def root(t: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(t)
        found: Tensor = (vectors * values.clamp(min=1e-6).pow(-0.25)) @ vectors.T
        return found


class OnShards(torch.optim.Optimizer):
    """Lion by elements, on what is here of each tensor, as a kernel of somebody's own would."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                here, g, m = (t.to_local() if isinstance(t, DTensor) else t for t in (p, p.grad, state["m"]))
                here -= group["lr"] * (0.9 * m + 0.1 * g).sign()
                m.lerp_(g, 0.01)


@habit(1e-3)
def optimizer_of_eight_bits(prepared: Prepared) -> dict[str, Any]:
    return stepped(prepared, lambda m: Adam8bit(m.parameters(), lr=1e-2))


@habit(1e-3)
def optimizer_of_whole_matrices(prepared: Prepared) -> dict[str, Any]:
    return stepped(prepared, lambda m: Shampoo(m.parameters(), lr=1e-2))


@habit(1e-3)
def optimizer_on_shards(prepared: Prepared) -> dict[str, Any]:
    return stepped(prepared, lambda m: OnShards(m.parameters(), lr=1e-3))
