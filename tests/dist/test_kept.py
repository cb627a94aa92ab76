"""What a compiled step keeps of the model's Python, and what transformers records on the way, on gloo processes against one-device eager."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.dist.launch import run
from tests.eager import Net, seeded, trained, whole
from tests.models import ZOO


class Kept(Net):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.register_buffer("ema", torch.zeros(4))
        self.loose = torch.ones(4)
        self.a.register_forward_hook(lambda m, args, out: out * 2)
        self.b.weight.register_hook(lambda g: g * 3)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.ema = 0.9 * self.ema + x.mean(0)
            self.loose.add_(x.detach().max())
        return (x + self.ema) * self.factor + self.loose


def _kept(layout: str | None) -> None:
    def act(m: Any, i: int) -> None:
        m.factor = 1.0 + i

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    one = seeded(Kept)
    model = autopar.compile(seeded(Kept), mesh, backend="aot_eager", layout=layout, outputs="all", cluster="h100:1x2")
    torch.testing.assert_close(trained(model, act), trained(one, act), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(model.ema, one.ema)
    torch.testing.assert_close(model.loose, one.loose)
    for p, q in zip(one.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(q).detach(), p.detach(), rtol=1e-5, atol=1e-6)


def _both_layouts() -> None:
    for layout in ("fsdp", None):
        _kept(layout)


def test_on_two_ranks() -> None:
    run(_both_layouts, 2)


def _recorded() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    compare_recorded("mixtral", mesh, "all", {"output_router_logits": True, "output_hidden_states": True})


def test_what_transformers_records() -> None:
    run(_recorded, 2)


def compare_recorded(name: str, mesh: Any, outputs: str, asked: dict[str, Any]) -> None:
    """Loss, gradients, and with outputs="all" every field of the output, are those of eager."""
    one, other = (seeded(ZOO[name].build).train() for _ in range(2))
    for m in (one, other) if "output_attentions" in asked else ():
        m.set_attn_implementation("eager")
    model = autopar.compile(other, mesh, backend="aot_eager", layout="fsdp", outputs=outputs)
    batch = ZOO[name].inputs(4, 8)
    off = {"use_cache": False} if hasattr(one.config, "use_cache") else {}
    got, want = model(**batch, **asked), one(**batch, **asked, **off)
    for key, expected in want.items() if outputs == "all" else [("loss", want.loss)]:
        pairs = zip(got[key], expected, strict=True) if isinstance(expected, tuple) else [(got[key], expected)]
        for g, e in pairs:
            torch.testing.assert_close(whole(g).detach(), e.detach(), rtol=1e-4, atol=1e-5)
    sum_of = [
        m.loss + sum(whole(h).square().mean() for h in getattr(m, "hidden_states", None) or ()) if outputs == "all" else m.loss
        for m in (got, want)
    ]
    for loss in sum_of:
        loss.backward()
    for (n, p), q in zip(one.named_parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), n
        if p.grad is not None:
            torch.testing.assert_close(whole(q.grad), p.grad, rtol=1e-3, atol=1e-6, msg=lambda said, n=n: f"{n}: {said}")
