"""Weights in and out, copies, averages, initialisation."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.dist.habits import Prepared, habit
from tests.dist.habits.common import Classes, Words, features, gradients, ids, labels, parameters, seeded


def step(model: Any, optimizer: Any, i: int) -> float:
    loss = model(ids(i), labels=ids(i + 1))["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@habit()
def pretrained_weights(prepared: Prepared) -> dict[str, Any]:
    """A state dict of plain tensors, the same on every rank, loaded after the call."""
    weights = seeded(Words, seed=5).state_dict()
    model = prepared(seeded(Words))
    said = model.load_state_dict(weights)
    out = parameters(model)
    model(ids(1), labels=ids(2))["loss"].backward()
    return {
        "missing": list(said.missing_keys),
        "unexpected": list(said.unexpected_keys),
        **{f"loaded {k}": v.clone() for k, v in out.items()},
        **gradients(model),
    }


@habit()
def weights_loaded_in_part(prepared: Prepared) -> dict[str, Any]:
    weights = {k: v for k, v in seeded(Words, seed=5).state_dict().items() if not k.startswith("head")}
    model = prepared(seeded(Words))
    said = model.load_state_dict({**weights, "other": torch.zeros(2)}, strict=False)
    return {"missing": list(said.missing_keys), "unexpected": list(said.unexpected_keys), **parameters(model)}


@habit()
def saved_and_loaded(prepared: Prepared) -> dict[str, Any]:
    """torch.save of both state dicts in the middle, and back."""
    model = prepared(seeded(Words))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, 0)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    step(model, optimizer, 1)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return {"loss": step(model, optimizer, 2), **parameters(model)}


@habit()
def state_on_the_cpu(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words))
    return {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}


@habit()
def deep_copy(prepared: Prepared) -> dict[str, Any]:
    """A copy of before a step, evaluated after it, and trained itself."""
    model = prepared(seeded(Words))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step(model, optimizer, 0)
    other = copy.deepcopy(model)
    step(model, optimizer, 1)
    own = torch.optim.SGD(other.parameters(), lr=0.1)
    loss = step(other, own, 3)
    return {"loss": loss, **{f"copy {k}": v for k, v in parameters(other).items()}, **parameters(model)}


@habit()
def averaged_model(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for i in range(3):
        step(model, optimizer, i)
        average.update_parameters(model)
    average.eval()
    with torch.no_grad():
        logits = average(ids(7))["logits"]
    return {"logits": logits, **parameters(average)}


@habit()
def average_by_hand(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words))
    shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for i in range(3):
        step(model, optimizer, i)
        for n, p in model.named_parameters():
            shadow[n].mul_(0.9).add_(p.detach(), alpha=0.1)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(shadow[n])
    return parameters(model)


@habit()
def soft_update_of_a_target(prepared: Prepared) -> dict[str, Any]:
    """Reinforcement learning's two networks."""
    online, target = prepared(seeded(Classes)), prepared(seeded(Classes))
    target.load_state_dict(online.state_dict())
    for p in target.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-2)
    for i in range(3):
        with torch.no_grad():
            wanted = features(i, width=1)[:, 0] + 0.9 * target(features(i + 1)).max(-1).values
        chosen = online(features(i)).gather(1, labels(i)[:, None]).squeeze(1)
        F.smooth_l1_loss(chosen, wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, q in zip(target.parameters(), online.parameters(), strict=True):
                p.data.mul_(0.9).add_(q.data, alpha=0.1)
    return {**parameters(online), **{f"target {k}": v for k, v in parameters(target).items()}}


@habit()
def initialised_after(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words))
    for n, p in model.named_parameters():
        if n.endswith("bias"):
            nn.init.zeros_(p)
        elif p.dim() > 1:
            nn.init.constant_(p, 0.01)
    with torch.no_grad():
        model.head.weight.fill_(0.02)
    model(ids(1), labels=ids(2))["loss"].backward()
    return {**parameters(model), **gradients(model)}


@habit()
def a_plain_tensor_copied_in(prepared: Prepared) -> dict[str, Any]:
    """One weight set from a tensor of its own."""
    model = prepared(seeded(Words))
    table = seeded(Words, seed=9).words.weight.detach()
    with torch.no_grad():
        model.words.weight.copy_(table)
        model.up.weight.data = model.up.weight.data * 0.5
    return {"loss": model(ids(1), labels=ids(2))["loss"], **parameters(model)}


@habit()
def tied_weights(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words, tied=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [step(model, optimizer, i) for i in range(3)]
    return {"losses": losses, "tied": model.head.weight is model.words.weight, **parameters(model)}


@habit()
def weights_as_one_vector(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    return {"vector": nn.utils.parameters_to_vector(model.parameters())}
