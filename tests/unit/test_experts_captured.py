"""Routed experts are one operator of a captured step, in every family that goes through transformers' registry; what means something else stays as it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.capture import Call, capture
from autopar.capture.describe import describe
from autopar.graph.graph import Graph
from autopar.kernels.gates import gate, named
from autopar.rules.experts import BACKWARD, FORWARD
from tests.experts import FAMILIES, LAYERS, build, inputs
from tests.wide import cases


def graph_of(model: nn.Module, kwargs: dict[str, Tensor]) -> Graph:
    call = Call.of((), kwargs)
    return describe(capture(model, call, tuple((tuple(t.shape), t.dtype) for t in call.tensors)))


@pytest.mark.parametrize("name", cases(FAMILIES, ("mixtral", "gpt_oss", "deepseek_v3")))
def test_experts_are_one_operator(name: str) -> None:
    model = build(name)
    targets = [op.target for op in graph_of(model, inputs(2, 8)).ops]
    assert targets.count(FORWARD) == targets.count(BACKWARD) == LAYERS.get(name, 2)
    assert not any(
        "sort" in t or "grouped_mm" in t or "histc" in t for t in targets if name != "mixtral"
    )  # whose auxiliary loss counts tokens
    assert model.config._experts_implementation == "grouped_mm", "the user's model was changed"


def test_another_implementation_is_kept() -> None:
    """A kernel that a user registered computes with other numbers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def theirs(self: Any, hidden: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        return hidden * 2.0

    ALL_EXPERTS_FUNCTIONS.register("theirs", theirs)
    try:
        model = build("qwen3_moe")
        model.set_experts_implementation("theirs")
        assert not any(op.target == FORWARD for op in graph_of(model, inputs(2, 8)).ops)
    finally:
        ALL_EXPERTS_FUNCTIONS._global_mapping.pop("theirs", None)


def test_experts_with_tensors_of_their_own_are_kept() -> None:
    """A gate that learns is no function of rows alone."""
    model = build("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.experts.act_fn = nn.PReLU()
    assert not any(op.target == FORWARD for op in graph_of(model, inputs(2, 8)).ops)


def test_names_of_gates() -> None:
    swiglu = lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]  # noqa: E731
    name = named(swiglu, torch.float32)
    assert name is not None and name == named(copy.copy(swiglu), torch.float32) != named(swiglu, torch.float64)
    h = torch.randn(5, 12, requires_grad=True)
    want = swiglu(h)
    da = torch.randn_like(want)
    torch.testing.assert_close(gate(name).forward(h), want)
    torch.testing.assert_close(gate(name).backward(h.detach(), da), torch.autograd.grad(want, h, da)[0])


@pytest.mark.parametrize(
    "fn",
    [
        lambda h: F.dropout(h, 0.5),
        lambda h: h * torch.ones(64),
        lambda h: h.sum(0, keepdim=True),
        lambda h: h - h.mean(0),
        lambda h: h.double(),
    ],
    ids=["random", "width", "rows", "mean", "dtype"],
)
def test_what_is_no_gate(fn: Any) -> None:
    """Random numbers, a width of its own, a sum over rows, another precision."""
    assert named(fn, torch.float32) is None
