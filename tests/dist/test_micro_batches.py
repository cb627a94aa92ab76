"""A call run as micro-batches is the call on one device: its loss, every gradient, three steps of AdamW.

python -m tests.dist.test_micro_batches --processes 2
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError
from autopar.graph.calls import is_collective
from autopar.passes.overlap import inputs_of, is_ahead, mark
from autopar.planner.formulation.names import moved
from autopar.runtime.outputs import NotComputedError
from tests.dist.launch import run
from tests.dist.test_planned import _cluster
from tests.dist.trained import trained_beside
from tests.models import ZOO
from tests.wide import cases, wide

BATCH, SEQ, SEED = 8, 16, 3


class Mlp(nn.Module):
    """A mean over elements, part of it by hand, beside what no sample is in."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.net(x)
        decay = sum(p.square().sum() for p in self.net.parameters())
        return {"loss": F.mse_loss(out, y) + (out.abs().sum() / x.shape[0]) * 0.1 + 0.01 * decay, "out": out}


class Masked(nn.Module):
    """A sum over a count of the data's, and a sample's own position looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, at: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.net(x)
        picked = out[torch.arange(x.shape[0]), at]
        return {"loss": (out.square().mean(-1) * mask).sum() / mask.sum().clamp(min=1) + picked.sum() / (at > 1).sum()}


def _built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(1)
    if name == "mlp":
        return Mlp(), {"x": torch.randn(BATCH, 6, generator=g), "y": torch.randn(BATCH, 4, generator=g)}
    if name == "masked":
        mask = (torch.rand(BATCH, 3, generator=g) > 0.5).float()
        mask[:3] = 0  # of a whole micro-batch
        return Masked(), {"x": torch.randn(BATCH, 3, 6, generator=g), "mask": mask, "at": torch.randint(0, 3, (BATCH,), generator=g)}
    return ZOO[name].build(2).train(), ZOO[name].inputs(BATCH, SEQ)


def _trained(
    name: str,
    number: int | str | None,
    layout: str | None,
    local: bool = False,
    steps: int = 3,
    scale: float = 1.0,
    backend: str = "aot_eager",
) -> float:
    """Trains compiled and on one device; the largest difference of losses, gradients and parameters, as a share of each tensor's largest element."""
    reference, batch = _built(name)
    model = copy.deepcopy(reference)
    torch.manual_seed(SEED)
    planned: dict[str, Any] = {"cluster": _cluster()} if layout is None else {"layout": layout}
    compiled = autopar.compile(model, backend=backend, micro_batches=number, inputs="local" if local else "global", **planned)
    worst = trained_beside(reference, compiled, batch, SEED, steps, local, scale)
    assert len(dict(compiled.named_parameters())) == len(dict(reference.named_parameters()))
    assert compiled.plan.micro_batches == (number if isinstance(number, int) else compiled.plan.micro_batches)
    return max(worst.values())


Case = tuple[str, int | str | None, str | None, bool]
FIRST: list[Case] = [("toy-dropout", 3, "fsdp", False), ("mlp", "auto", None, False), ("masked", 4, "fsdp", True)]
NEXT: list[Case] = [
    ("llama", 3, "fsdp", False),
    ("llama", 2, None, True),
    ("gpt2", 2, "ddp", True),
    ("mlp", 3, "ddp", False),
    ("lora", 2, "fsdp", False),
]
CASES = FIRST + NEXT
LAYOUTS: list[str | None] = ["fsdp", "ddp", None]
# A model's numbers of micro-batches and the layouts go round together: each model sees all of both, and each pair some model.
MORE: list[Case] = [
    *((name, m, LAYOUTS[(i + m) % 3], False) for i, name in enumerate(("llama", "gpt2", "bert", "t5", "mixtral")) for m in (1, 2, 3)),
    *((name, 2 + i % 2, "fsdp", True) for i, name in enumerate(("llama", "gpt2", "bert", "masked"))),
    *((name, m, layout, False) for name in ("mlp", "masked", "lora") for m, layout in ((2, None), (3, "fsdp"), (8, None))),
]


def _all(which: list[Case]) -> list[float]:
    return [_trained(name, m, layout, local) for name, m, layout, local in which]


BY_MODEL = {name: [c for c in MORE if c[0] == name] for name in dict.fromkeys(c[0] for c in MORE)}


@pytest.mark.parametrize("which", cases(["first", "next", *BY_MODEL], ["first"]))
def test_equals_one_device(which: str) -> None:
    run_cases = {"first": FIRST, "next": NEXT, **BY_MODEL}[which]
    for ranks in run(_all, 2, run_cases):
        assert max(ranks) < 2e-4, list(zip(run_cases, ranks, strict=True))


@wide
def test_equals_one_device_alone() -> None:
    (found,) = run(_all, 1, [("llama", 8, "fsdp", False), ("gpt2", 3, "fsdp", False), ("mlp", 2, "ddp", False)])
    assert max(found) < 2e-4, found


def _reduced_first(name: str, number: int, layout: str, sizes: tuple[int, ...], steps: int) -> float:
    """As `_trained`, with gradients reduced before they are added up: by the first `steps` collectives of those that bring them to their parameters, or all of them (0)."""
    reference, batch = _built(name)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])

    def compiled(**more: Any) -> Any:
        torch.manual_seed(SEED)
        return autopar.compile(copy.deepcopy(reference), mesh, backend="aot_eager", micro_batches=number, **more)

    first = compiled(layout=layout)
    first(**batch).loss.backward()
    plan, step = first.plan, first.compiled_steps[0]
    params, early = dict(plan.params), 0
    for name, (made, _) in step.accumulated.items():
        c = params[name]
        way = moved(made, c.storage, plan.mesh) or []
        at = c.storage if not steps or len(way) <= steps else way[steps - 1].dst
        if way and (at == c.storage or at.shape == c.shape):
            params[name], early = dataclasses.replace(c, accumulated=at), early + 1
    assert early
    again = compiled(plan=dataclasses.replace(plan, params=params))
    return max(trained_beside(reference, again, batch, SEED, 3).values())


REDUCED_FIRST = [("llama", 3, "fsdp", 0), ("gpt2", 3, "ddp", 0), ("toy-dropout", 4, "fsdp", 0)]
REDUCED_FIRST_ON_TWO_AXES = [("llama", 2, "fsdp+tp", 0), ("gpt2", 2, "fsdp+tp", 1)]


def _all_reduced_first(which: list[tuple[str, int, str, int]], sizes: tuple[int, ...]) -> list[float]:
    return [_reduced_first(name, m, layout, sizes, steps) for name, m, layout, steps in which]


def test_reduced_before_they_are_added_up() -> None:
    for found in run(_all_reduced_first, 2, REDUCED_FIRST, (2,)):
        assert max(found) < 2e-4, list(zip(REDUCED_FIRST, found, strict=True))


@wide
def test_reduced_before_they_are_added_up_on_two_axes() -> None:
    for found in run(_all_reduced_first, 4, REDUCED_FIRST_ON_TWO_AXES, (2, 2)):
        assert max(found) < 2e-4, list(zip(REDUCED_FIRST_ON_TWO_AXES, found, strict=True))


def _gathered_once(name: str, number: int, layout: str, sizes: tuple[int, ...], backend: str) -> float:
    """As `_trained`, with all parameters gathered once a call, by its first micro-batch of each size."""
    reference, batch = _built(name)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])

    def compiled(**more: Any) -> Any:
        torch.manual_seed(SEED)
        return autopar.compile(copy.deepcopy(reference), mesh, backend=backend, micro_batches=number, **more)

    first = compiled(layout=layout)
    first(**batch).loss.backward()
    params = {n: dataclasses.replace(c, once_a_call=c.storage != c.compute) for n, c in first.plan.params.items()}
    again = compiled(plan=dataclasses.replace(first.plan, params=params))
    worst = max(trained_beside(reference, again, batch, SEED, 3).values())
    for step in again.compiled_steps:
        assert step.is_gathered_once and step.base.later is not None
        marked = mark(step.base.later.forward, inputs_of(step.base.later, False))
        assert not [n for n in marked.graph.nodes if is_collective(n) and is_ahead(n)]
    assert any(step._later is not None for step in again.compiled_steps)
    return worst


GATHERED_ONCE = [("llama", 3, "fsdp", "aot_eager"), ("toy-dropout", 4, "fsdp", "inductor"), ("lora", 2, "fsdp", "aot_eager")]
GATHERED_ONCE_ON_TWO_AXES = [
    ("llama", 2, "fsdp+tp", "aot_eager"),
    ("gpt2", 4, "fsdp+tp", "inductor"),
    ("mixtral", 4, "fsdp+tp", "aot_eager"),
]


def _all_gathered_once(which: list[tuple[str, int, str, str]], sizes: tuple[int, ...]) -> list[float]:
    return [_gathered_once(name, m, layout, sizes, backend) for name, m, layout, backend in which]


def test_gathered_once_a_call() -> None:
    for found in run(_all_gathered_once, 2, GATHERED_ONCE, (2,)):
        assert max(found) < 2e-4, list(zip(GATHERED_ONCE, found, strict=True))


@wide
def test_gathered_once_a_call_on_two_axes() -> None:
    for found in run(_all_gathered_once, 4, GATHERED_ONCE_ON_TWO_AXES, (2, 2)):
        assert max(found) < 2e-4, list(zip(GATHERED_ONCE_ON_TWO_AXES, found, strict=True))


def _loops(name: str) -> None:
    """What a loop does besides: scales, accumulates, clips, has hooks, asks for more than the loss; and what it may not."""
    assert _trained(name, 3, "fsdp", scale=1024.0) < 2e-4
    reference, batch = _built(name)
    compiled = autopar.compile(copy.deepcopy(reference), layout="fsdp", backend="aot_eager", micro_batches=3)
    called: list[int] = []
    next(compiled.parameters()).register_post_accumulate_grad_hook(lambda p: called.append(1) if p.grad is not None else None)
    halves = [{k: v[i : i + 4] for k, v in batch.items()} for i in (0, 4)]
    for half, k in zip(halves, (3.0, 0.5), strict=True):
        (reference(**half).loss * k).backward()
    with compiled.no_sync():
        (compiled(**halves[0]).loss * 3.0).backward()
    assert not called
    (compiled(**halves[1]).loss * 0.5).backward()
    assert len(called) == 1
    ours, theirs = (torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (compiled, reference))
    assert isinstance(ours, DTensor)
    assert torch.allclose(ours.full_tensor(), theirs, rtol=1e-4)
    for p, q in zip(reference.parameters(), compiled.parameters(), strict=True):
        assert isinstance(q.grad, DTensor)
        assert p.grad is not None
        assert torch.allclose(p.grad, q.grad.full_tensor(), rtol=1e-3, atol=1e-6)
    out = compiled(**batch)
    with pytest.raises(NotComputedError, match="3 micro-batches"):
        out.logits  # noqa: B018
    out.loss.backward(retain_graph=True)
    with pytest.raises(AutoparError, match="backward runs twice"):
        out.loss.backward()
    last = {k: v[:1] for k, v in batch.items()}  # fewer samples than micro-batches
    assert torch.allclose(compiled(**last).loss.detach(), reference(**last).loss.detach(), rtol=1e-5)
    with torch.no_grad():
        assert torch.allclose(compiled(**batch).logits, reference(**batch).logits, atol=1e-4)


@wide
@pytest.mark.parametrize("name", ("toy", "llama"))
def test_loops(name: str) -> None:
    run(_loops, 2, name)


def _refused() -> list[str]:
    said = []

    def refusal(model: nn.Module, batch: dict[str, Any], number: Any = 2, **more: Any) -> None:
        with pytest.raises(AutoparError) as e:
            autopar.compile(model, layout="fsdp", backend="aot_eager", micro_batches=number, **more)(**batch)
        said.append(str(e.value))

    conv = ZOO["convnet"].build(1).train()
    refusal(conv, {"x": torch.randn(4, 3, 16, 16), "target": torch.zeros(4, dtype=torch.int64)}, loss_fn=F.cross_entropy)

    class Contrasts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            z = F.normalize(self.net(x), dim=-1)
            return {"loss": F.cross_entropy(z @ z.T, torch.arange(len(x)))}

    x = {"x": torch.randn(4, 6)}
    refusal(Contrasts(), x)
    refusal(nn.Linear(6, 4), {"input": torch.randn(4, 6)})
    refusal(Mlp(), {"x": torch.randn(2, 6).requires_grad_(), "y": torch.randn(2, 4)})
    refusal(Mlp(), x, 0)
    refusal(Mlp(), x, "auto")
    refusal(Mlp(), x, 2, outputs="all")
    return said


def test_refusals() -> None:
    for said in run(_refused, 2):
        for text, wants in zip(
            said,
            (
                "batch_norm",
                "mixes the samples",
                "return its loss",
                "wants a gradient",
                "micro_batches=0",
                "a question to the planner",
                "outputs=",
            ),
            strict=True,
        ):
            assert wants in text, text
            assert "what to do" in text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    for case, *found in zip(CASES, *run(_all, parser.parse_args().processes, CASES), strict=True):
        print(case, found)


if __name__ == "__main__":
    main()
