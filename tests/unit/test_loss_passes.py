"""What becomes of a cross-entropy's backward before Inductor has it: no constant of tokens x vocabulary, and no row reduced twice."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import _torch
from autopar.passes.constant_scatters import constant_scatters
from tests.eager import seeded, whole

aten = torch.ops.aten


def _decomposed(f: Any, *args: torch.Tensor) -> Any:
    """As halves are before Inductor gets them, and whether anything is still scattered."""
    mode = _torch.new_fake_mode()
    with mode:
        fakes = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype) for a in args]
        recorded = _torch.recorded(f, fakes)
    gm = constant_scatters(_torch.decompose_late(recorded, fakes, mode), mode)
    return gm, any("scatter" in str(n.target) for n in gm.graph.nodes)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_loss(reduction: int, weighted: bool, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 11, generator=g).log_softmax(1).to(dtype)
    target = torch.tensor([3, -100, 0, 10, -100, 3])
    weight = torch.rand(11, generator=g).to(dtype)
    grad = torch.randn(6 if reduction == 0 else (), generator=g).to(dtype)
    total = torch.tensor(2.5, dtype=dtype)

    def f(grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, total: torch.Tensor) -> Any:
        return (aten.nll_loss_backward(grad, x, target, weight if weighted else None, reduction, -100, total),)

    gm, scatters = _decomposed(f, grad, x, target, weight, total)
    assert not scatters
    (got,) = gm(grad, x, target, weight, total)
    (want,) = f(grad, x, target, weight, total)
    torch.testing.assert_close(got, want, rtol=0 if dtype == torch.float32 else 1e-2, atol=0)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_values_of_a_row(dim: int) -> None:
    """What each rank of a split vocabulary makes of its targets."""
    index = torch.tensor([[2], [0], [1]]) if dim else torch.tensor([[2, 0, 1, 1]])
    value = torch.randn(index.shape)

    def f(index: torch.Tensor, value: torch.Tensor) -> Any:
        return (torch.zeros(3, 4).scatter(dim, index, value) * 2,)

    gm, scatters = _decomposed(f, index, value)
    assert not scatters and torch.equal(gm(index, value)[0], f(index, value)[0])


def test_several_values_of_a_row_stay() -> None:
    index, value = torch.tensor([[2, 2], [0, 1], [1, 3]]), torch.randn(3, 2)

    def f(index: torch.Tensor, value: torch.Tensor) -> Any:
        return (torch.zeros(3, 4).scatter(1, index, value),)

    assert _decomposed(f, index, value)[1]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.embedding(ids))).flatten(0, 1), target.flatten())


def test_a_log_softmax_made_again(one_process: None) -> None:
    """Of one number a row: what is saved, what backward does, and the gradients."""
    one = seeded(Head)
    g = torch.Generator().manual_seed(1)
    ids, target = torch.randint(64, (4, 8), generator=g), torch.randint(64, (4, 8), generator=g)
    with mock.patch("autopar.passes.row_statistics.LEAST_BYTES", 1), mock.patch("autopar.passes.fused_recompute.LEAST_BYTES", 1):
        model = autopar.compile(copy.deepcopy(one), {"dp": 1}, memory="least", loss_head="plain", cluster="h100:1x1")
        loss = model(ids, target)
    assert "_log_softmax" in model.plan.recompute
    (step,) = model._programs.steps()
    readers = [n for n in step.base.backward.graph.nodes if n.target is aten._log_softmax_backward_data.default]
    made = [a for n in readers for a in n.all_input_nodes[1:]]
    while any(a.target in (aten.detach.default, aten.alias.default) for a in made):
        made = [b for a in made for b in a.all_input_nodes]
    assert [a.target for a in made] == [aten.sub.Tensor]
    want = one(ids, target)
    loss.backward()
    want.backward()
    torch.testing.assert_close(whole(loss), want, rtol=1e-6, atol=1e-6)
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-4, atol=1e-6)
