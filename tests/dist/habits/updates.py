"""Optimizers, clipping, scaling, what is done to gradients and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.dist.habits import BOUNDS, HABITS, Prepared, habit
from tests.dist.habits.common import Classes, Words, features, gradients, ids, labels, parameters, seeded


def stepped(prepared: Prepared, make: Callable[[Any], Any], steps: int = 4) -> dict[str, Any]:
    model = prepared(seeded(Words))
    optimizer = make(model)
    losses = []
    for i in range(steps):
        loss = model(ids(i), labels=ids(i + 1))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, **parameters(model)}


def _optimizers() -> dict[str, Callable[[Any], Any]]:
    O = torch.optim  # noqa: E741
    return {
        "sgd": lambda m: O.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        "adam": lambda m: O.Adam(m.parameters(), lr=1e-2, amsgrad=True),
        "adamw": lambda m: O.AdamW(m.parameters(), lr=1e-2),
        "adamw_fused": lambda m: O.AdamW(m.parameters(), lr=1e-2, fused=True),
        "adagrad": lambda m: O.Adagrad(m.parameters(), lr=1e-2),
        "adadelta": lambda m: O.Adadelta(m.parameters(), lr=0.5),
        "adamax": lambda m: O.Adamax(m.parameters(), lr=1e-2),
        "nadam": lambda m: O.NAdam(m.parameters(), lr=1e-2),
        "radam": lambda m: O.RAdam(m.parameters(), lr=1e-2),
        "rmsprop": lambda m: O.RMSprop(m.parameters(), lr=1e-3, centered=True),
        "rprop": lambda m: O.Rprop(m.parameters(), lr=1e-3),
        "asgd": lambda m: O.ASGD(m.parameters(), lr=1e-2),
        "adafactor": lambda m: O.Adafactor(m.parameters(), lr=1e-2),
        "muon": lambda m: O.Muon([p for p in m.parameters() if p.dim() == 2], lr=1e-2),
    }


def _named(name: str, make: Callable[[Any], Any]) -> None:
    def run(prepared: Prepared) -> dict[str, Any]:
        return stepped(prepared, make)

    HABITS[f"optimizer_{name}"] = run
    # Muon orthogonalizes in bfloat16, where a last digit of a gradient may count for more.
    BOUNDS[f"optimizer_{name}"] = 1e-2 if name == "muon" else 2e-4 if name in ("adamax", "rprop", "radam", "nadam") else 1e-4


for _name, _make in _optimizers().items():
    _named(_name, _make)


@habit(1e-3)
def optimizer_lbfgs(prepared: Prepared) -> dict[str, Any]:
    """A closure that is called several times a step."""
    model = prepared(seeded(Classes))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(features(1)), features(2, width=4))
        loss.backward()
        return loss

    return {"losses": [float(optimizer.step(closure)) for _ in range(2)], **parameters(model)}


@habit()
def parameter_groups(prepared: Prepared) -> dict[str, Any]:
    def make(m: Any) -> Any:
        decay = [p for n, p in m.named_parameters() if p.dim() > 1 and "words" not in n]
        rest = [p for n, p in m.named_parameters() if not (p.dim() > 1 and "words" not in n)]
        return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 1e-3}], lr=1e-2)

    return stepped(prepared, make)


@habit()
def clipped_by_norm_and_value(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words))
    model(ids(1), labels=ids(2))["loss"].backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    first = gradients(model)
    first = {k: g.clone() for k, g in first.items()}
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    return {"norm": norm, **{f"first {k}": g for k, g in first.items()}, **gradients(model)}


@habit()
def norms_of_gradients(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words))
    model(ids(1), labels=ids(2))["loss"].backward()
    each = {f"norm {n}": p.grad.norm().item() for n, p in model.named_parameters()}
    total = torch.sqrt(sum(p.grad.pow(2).sum() for p in model.parameters())).item()
    return {
        **each,
        "total": total,
        "largest": max(p.grad.abs().max().item() for p in model.parameters()),
        "count": sum(p.numel() for p in model.parameters()),
    }


@habit()
def updated_by_hand(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words))
    for i in range(3):
        model.zero_grad()
        model(ids(i), labels=ids(i + 1))["loss"].backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.data.mul_(0.999)
    return parameters(model)


@habit()
def gradients_changed_by_hand(prepared: Prepared) -> dict[str, Any]:
    def make(m: Any) -> Any:
        for p in m.parameters():
            p.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return torch.optim.SGD(m.parameters(), lr=0.1)

    return stepped(prepared, make)


@habit()
def accumulated(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(6):
        (model(ids(i), labels=ids(i + 1))["loss"] / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return parameters(model)


@habit()
def schedule(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    s = torch.optim.lr_scheduler
    scheduler = s.SequentialLR(optimizer, [s.LinearLR(optimizer, 0.1, total_iters=2), s.CosineAnnealingLR(optimizer, 4)], milestones=[2])
    for i in range(5):
        model(ids(i), labels=ids(i + 1))["loss"].backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {"rate": scheduler.get_last_lr(), **parameters(model)}


@habit()
def plateau(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for i in range(4):
        loss = model(ids(i), labels=ids(i + 1))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(loss)
    return {"rate": optimizer.param_groups[0]["lr"], **parameters(model)}


@habit(3e-2)
def autocast(prepared: Prepared) -> dict[str, Any]:
    """bfloat16: the bound is its rounding."""
    model = prepared(seeded(Classes))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(features(1)), labels(1))
    loss.backward()
    return {"loss": loss.float(), **gradients(model)}


@habit()
def frozen_midway(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for i in range(4):
        if i == 2:
            model.a.requires_grad_(False)
        optimizer.zero_grad()
        F.cross_entropy(model(features(i)), labels(i)).backward()
        optimizer.step()
    return parameters(model)


@habit()
def optimizer_made_first(prepared: Prepared) -> dict[str, Any]:
    """As for DDP: the optimizer has the parameters of before."""
    one = seeded(Classes)
    model = prepared(one)
    optimizer = torch.optim.Adam(one.parameters(), lr=1e-2)
    for i in range(3):
        F.cross_entropy(model(features(i)), labels(i)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters(model)
