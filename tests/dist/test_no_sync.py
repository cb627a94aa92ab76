"""Gradients that wait unreduced are taken in by whatever program runs next: of another branch of the model, which lacks some parameters and has others, of another size,
of another way to split. What they add up to is one device's."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.distributed.shards import cut
from autopar.graph.placement import Placement, shard
from tests.dist.habits.common import seeded
from tests.dist.launch import run
from tests.wide import cases

WIDTH = 16


class Branches(nn.Module):
    """A trunk and a head for each task, one of which a call runs. The widths of `b` do not divide by two."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 8), "b": nn.Linear(WIDTH, 5)})

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        y: torch.Tensor = self.heads[task](self.trunk(x)).square().mean()
        return y


def batch(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


# (task, rows) of calls; the last of each list reduces.
SEQUENCES = (
    [("a", 8), ("b", 8)],
    [("b", 8), ("a", 8)],
    [("a", 8), ("b", 4), ("a", 12)],
    [("a", 8), ("a", 4)],
    [("b", 8)],
    [("b", 4), ("a", 8), ("a", 8), ("b", 12)],
)


def branches(layout: str | None) -> None:
    model, plain = autopar.compile(seeded(Branches), (2,), layout=layout, backend="aot_eager", options={"seconds": 3}), seeded(Branches)
    for i, calls in enumerate(SEQUENCES):
        for j, (task, rows) in enumerate(calls):
            x = batch(rows, 10 * i + j)
            with model.no_sync() if j < len(calls) - 1 else contextlib.nullcontext():
                model(x, task).backward()
            plain(x, task).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (i, name)
            if q.grad is not None:
                assert torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-7), (i, name)
        for m in (model, plain):
            m.zero_grad()


class Added(nn.Module):
    """The gradient of the parameter is that of the output, which no operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.w


def added(layout: str | None) -> None:
    model, plain = autopar.compile(seeded(Added), (2,), layout=layout, backend="aot_eager"), seeded(Added)
    for i in range(4):
        with model.no_sync() if i < 3 else contextlib.nullcontext():
            model(batch(8, i)).square().sum().backward()
        plain(batch(8, i)).square().sum().backward()
    assert torch.allclose(model.w.grad.full_tensor(), plain.w.grad, rtol=1e-5)


def by_itself(sizes: tuple[int, ...]) -> None:
    """A gradient reduced by itself, from wherever it lies: partial sums, shards, shards of other digits."""
    model = autopar.compile(seeded(Branches), sizes, layout="fsdp", backend="aot_eager")
    model(batch(8, 0), "b").backward()
    builder: Any = model._builder
    mesh, at = builder.mesh, builder.groups.coordinates
    axes = [a.name for a in mesh.axes]
    for name in ("trunk.0.weight", "heads.b.weight", "heads.b.bias"):
        shape = tuple(model.get_parameter(name).shape)
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        parts = [torch.randn(shape, generator=torch.Generator().manual_seed(9 + r)) for r in range(dist.get_world_size())]
        parts[-1] = whole - sum(parts[:-1])
        places: list[tuple[Placement, torch.Tensor]] = [(Placement(shape, (), tuple((a, "sum") for a in axes)), parts[dist.get_rank()])]
        places.append((Placement.of(shape), whole))
        if name == "trunk.0.weight":
            places += [
                (p, cut(whole, p, mesh, at))
                for p in (shard(shape, 1, tuple(axes), mesh), replace(Placement.of(shape)).with_axis(axes[-1], (0, 2)))
            ]
        for p, local in places:
            mine = model._builder.gradient(name, builder.reduced(name, local.contiguous(), p), model.plan)
            assert torch.allclose(mine.full_tensor(), whole, rtol=1e-4, atol=1e-5), (name, str(p))


@pytest.mark.parametrize("layout", cases(("fsdp", "tp", None), (None,)))
def test_branches_and_sizes(layout: str | None) -> None:
    run(branches, 2, layout, timeout=120, patience_s=60)


def test_a_gradient_that_no_operator_makes() -> None:
    for layout in ("fsdp", "ddp"):
        run(added, 2, layout, timeout=60, patience_s=30)


def test_a_gradient_reduced_by_itself() -> None:
    run(by_itself, 4, (2, 2), timeout=120, patience_s=60)
