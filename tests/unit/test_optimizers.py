"""What is known of optimizers' memory, against torch's own; what happens when another one steps than was planned for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from autopar.cost.optimizers import KINDS, UNKNOWN, kind_of
from autopar.errors import OptimizerError
from autopar.runtime.optimizers import watch
from tests.live import LiveBytes

SIZES = (30_000, 50_000, 20_000)
MOMENTUM, DECAY = {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "weight_decay": 0.1}
FOREACH, FUSED = {"foreach": True}, {"fused": True}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "make", "options"),
    [
        ("sgd", SGD, {**DECAY, **FOREACH}), ("sgd-momentum", SGD, {**MOMENTUM, **DECAY, **FOREACH}), ("sgd-fused", SGD, {"lr": 0.1, **FUSED}),
        ("sgd-momentum-fused", SGD, {**MOMENTUM, **FUSED}), ("rmsprop", RMSprop, FOREACH), ("adagrad", Adagrad, FOREACH),
        ("adam", Adam, FOREACH), ("adam-foreach", Adam, {"weight_decay": 0.1, **FOREACH}), ("adam-fused", Adam, FUSED),
        ("adamw", AdamW, FOREACH), ("adamw-fused", AdamW, FUSED), ("nadam", NAdam, FOREACH), ("radam", RAdam, FOREACH), ("adamax", Adamax, FOREACH),
    ],
)  # fmt: skip
def test_what_a_step_needs(name: str, make: type[Optimizer], options: dict[str, Any], dtype: torch.dtype) -> None:
    """State after the first step, and what lives during the second one alone."""
    params = [nn.Parameter(torch.randn(n).to(dtype)) for n in SIZES]
    optimizer = make(params, **options)

    def grads() -> None:
        for p in params:
            p.grad = torch.randn_like(p)

    grads()
    optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.numel() > 1]
    grads()
    with LiveBytes([*params, *(p.grad for p in params if p.grad is not None), *state]) as live:
        before = live.now
        optimizer.step()
    wide, kind = params[0].element_size(), KINDS[name]
    assert sum(t.nbytes for t in state) == sum(SIZES) * (wide * kind.moments + kind.state_bytes)
    assert live.peak - before == pytest.approx(sum(SIZES) * wide * kind.temporaries, abs=100)


def test_known() -> None:
    assert kind_of(AdamW) == kind_of("AdamW") == KINDS["adamw"]
    assert kind_of(type("AdamW8bit", (), {})) == KINDS["adamw8bit"]
    assert kind_of(type("Mine", (), {})) == UNKNOWN
    with pytest.raises(OptimizerError, match="unknown optimizer 'adamx'") as e:
        kind_of("adamx")
    assert e.value.fix.startswith("did you mean adam")


@pytest.mark.parametrize(
    ("planned", "used", "refused"),
    [
        ("adamw", AdamW, False), ("adamw", SGD, False), ("sgd", AdamW, True), ("adamw-fused", AdamW, True), (AdamW, AdamW, False),
        ("adamw-fused", lambda p: AdamW(p, fused=True), False), ("adamw8bit", AdamW, True), (SGD, AdamW, True), ("sgd", SGD, False),
        ("sgd", lambda p: SGD(p, lr=0.1, momentum=0.9), True), ("sgd-momentum", lambda p: SGD(p, lr=0.1, momentum=0.9), False),
    ],
)  # fmt: skip
def test_another_one_steps(planned: Any, used: Any, refused: bool) -> None:
    module = nn.Linear(2, 2)
    watch(module, planned)
    optimizer = used(module.parameters())
    if refused:
        with pytest.raises(OptimizerError, match="steps these parameters"):
            optimizer.step()
    else:
        optimizer.step()
