"""Loops: sizes that vary, evaluation between, data loaders, several backwards."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.dist.habits import Prepared, habit
from tests.dist.habits.common import Classes, Words, features, gradients, ids, labels, parameters, seeded


@habit()
def loader_with_a_smaller_last_batch(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(features(0, 20), labels(0, 20)), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **parameters(model)}


@habit()
def a_batch_smaller_than_the_mesh(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    F.cross_entropy(model(features(1)), labels(1)).backward()
    loss = F.cross_entropy(model(features(2, 1)), labels(2, 1))
    loss.backward()
    return {"loss": loss, **gradients(model)}


@habit()
def lengths_that_vary(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words))
    losses = []
    for i, n in enumerate((8, 11, 5, 8)):
        loss = model(ids(i, length=n), labels=ids(i + 1, length=n))["loss"]
        loss.backward()
        losses.append(loss.item())
    return {"losses": losses, **gradients(model)}


@habit()
def lengths_of_training_and_evaluation(prepared: Prepared) -> dict[str, Any]:
    """Batches padded to their longest member, in training and in evaluation."""
    model = prepared(seeded(Words))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    for i, (n, m) in enumerate(((8, 11), (11, 7), (13, 9), (6, 15))):
        model.train()
        loss = model(ids(i, length=n), labels=ids(i + 1, length=n))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            out = model(ids(9, length=m), labels=ids(10, length=m))
            seen += [loss.item(), out["loss"].item(), out["logits"].exp().sum().item()]
    return {"seen": seen, **parameters(model)}


@habit()
def micro_batches_of_different_lengths(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words), grad_accumulation=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for i, n in enumerate((8, 11, 6, 14, 9, 12)):
        loss = model(ids(i, length=n), labels=ids(i + 1, length=n))["loss"] / 3
        loss.backward()
        losses.append(loss.item())
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, **parameters(model)}


@habit()
def two_lengths_in_flight(prepared: Prepared) -> dict[str, Any]:
    """Both forwards before both backwards, of a batch that varies too."""
    model = prepared(seeded(Words))
    losses = []
    for i, (a, b) in enumerate((((8, 8), (8, 12)), ((4, 10), (8, 9)), ((6, 14), (4, 7)))):
        one, other = (model(ids(i, *s), labels=ids(i + 1, *s))["loss"] for s in (a, b))
        (one + other).backward()
        losses += [one.item(), other.item()]
    return {"losses": losses, **gradients(model)}


@habit()
def documents_in_a_row(prepared: Prepared) -> dict[str, Any]:
    """Several sequences packed into one, told apart by position ids that start anew; lengths vary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=32, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32, num_hidden_layers=1)
    model = prepared(seeded(lambda: LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))))
    losses = []
    for i, n in enumerate((12, 18, 15)):
        at = torch.cat([torch.arange(n - 5), torch.arange(5)]).expand(4, n)
        loss = model(input_ids=ids(i, 4, n), position_ids=at, labels=ids(i + 1, 4, n)).loss
        loss.backward()
        losses.append(loss.item())
    return {"losses": losses, **gradients(model)}


@habit()
def evaluation_between(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    for i in range(3):
        model.train()
        loss = model(ids(i), labels=ids(i + 1))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.inference_mode():
            out = model(ids(9), labels=ids(10))
            seen += [out["loss"].item(), out["logits"].exp().sum().item()]
    return {"seen": seen, **parameters(model)}


@habit()
def best_of_validation(prepared: Prepared) -> dict[str, Any]:
    """Early stopping: the best weights are kept on the side and put back."""
    model = prepared(seeded(Classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    best, kept = float("inf"), None
    for i in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(features(i)), labels(i)).backward()
        optimizer.step()
        with torch.no_grad():
            loss = F.cross_entropy(model(features(50)), labels(50)).item()
        if loss < best:
            best, kept = loss, {k: v.clone() for k, v in model.state_dict().items()}
    assert kept is not None
    model.load_state_dict(kept)
    return {"best": best, **parameters(model)}


@habit()
def retained_graph(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    out = model(features(1))
    F.cross_entropy(out, labels(1)).backward(retain_graph=True)
    out.square().mean().backward()
    return gradients(model)


@habit()
def one_loss_after_another(prepared: Prepared) -> dict[str, Any]:
    """Gradients of parts of a batch added up by several backwards."""
    model = prepared(seeded(Classes))
    for part in features(1, 24).split(8):
        model(part).square().mean().backward()
    return gradients(model)


@habit()
def gradients_without_backward(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    loss = F.cross_entropy(model(features(1)), labels(1))
    found = torch.autograd.grad(loss, list(model.parameters()))
    return {f"gradient {i}": g for i, g in enumerate(found)}


@habit()
def anomaly_and_finite_checks(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    with torch.autograd.set_detect_anomaly(True):
        loss = F.cross_entropy(model(features(1)), labels(1))
        assert torch.isfinite(loss)
        loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    return {"loss": loss, **gradients(model)}


@habit()
def input_gradient(prepared: Prepared) -> dict[str, Any]:
    """Saliency, or an attack: the sign of the input's gradient, then a step on what that makes."""
    model = prepared(seeded(Classes))
    x = features(1).requires_grad_()
    F.cross_entropy(model(x), labels(1)).backward()
    assert x.grad is not None
    model.zero_grad()
    F.cross_entropy(model((x + 0.1 * x.grad.sign()).detach()), labels(1)).backward()
    return {"input": x.grad, **gradients(model)}
