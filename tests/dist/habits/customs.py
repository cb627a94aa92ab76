"""What people's training scripts do besides: scaling, averages swapped in, freezing and groups added midway, finders of learning rates, mixing of samples, distillation, adversaries, ..."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset, WeightedRandomSampler

from tests.dist.habits import Prepared, habit
from tests.dist.habits.common import BATCH, Classes, Words, features, gradients, ids, labels, parameters, seeded


def step(model: Any, optimizer: Any, i: int) -> float:
    loss = F.cross_entropy(model(features(i)), labels(i))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@habit()
def gradient_scaler(prepared: Prepared) -> dict[str, Any]:
    """One step is skipped, its gradients being infinite."""
    model = prepared(seeded(Classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    losses, scales = [], []
    for i in range(5):
        loss = F.cross_entropy(model(features(i)), labels(i))
        scaler.scale(loss * (float("inf") if i == 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return {"losses": losses, "scales": scales, **parameters(model)}


@habit()
def average_swapped_in_for_evaluation(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
    seen = []
    for i in range(3):
        step(model, optimizer, i)
        with torch.no_grad():
            for n, p in model.named_parameters():
                shadow[n].lerp_(p, 0.1)
            backup = {n: p.detach().clone() for n, p in model.named_parameters()}
            for n, p in model.named_parameters():
                p.copy_(shadow[n])
            model.eval()
            seen.append(model(features(9)).sum().item())
            model.train()
            for n, p in model.named_parameters():
                p.copy_(backup[n])
    return {"seen": seen, **parameters(model)}


@habit()
def average_swapped_by_data(prepared: Prepared) -> dict[str, Any]:
    """As above, by exchanging `.data`."""
    model = prepared(seeded(Classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, 0)
    shadow = [p.detach().clone() * 0.5 for p in model.parameters()]

    def swap() -> None:
        for p, s in zip(model.parameters(), shadow, strict=True):
            tmp = p.data.clone()
            p.data.copy_(s)
            s.copy_(tmp)

    swap()
    with torch.no_grad():
        halved = model(features(9)).sum().item()
    swap()
    step(model, optimizer, 1)
    return {"halved": halved, **parameters(model)}


@habit()
def frozen_then_thawed_by_layer(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    for p in model.parameters():
        p.requires_grad_(False)
    optimizer, losses = None, []
    for i, layer in enumerate((model.c, model.b, model.a)):
        for p in layer.parameters():
            p.requires_grad_(True)
        if optimizer is None:
            optimizer = torch.optim.SGD([{"params": list(layer.parameters())}], lr=0.1)
        else:
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.1 / (i + 1)})
        losses += [step(model, optimizer, 2 * i), step(model, optimizer, 2 * i + 1)]
    return {"losses": losses, **parameters(model)}


@habit()
def learning_rate_found(prepared: Prepared) -> dict[str, Any]:
    """The rate grows until the loss does; then all starts again from what was kept."""
    model = prepared(seeded(Classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kept, kept_optimizer = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    losses, best = [], math.inf
    for i in range(8):
        losses.append(step(model, optimizer, i))
        best = min(best, losses[-1])
        if losses[-1] > 4 * best:
            break
        for g in optimizer.param_groups:
            g["lr"] *= 3
    model.load_state_dict(kept)
    optimizer.load_state_dict(kept_optimizer)
    losses.append(step(model, optimizer, 0))
    return {"losses": losses, **parameters(model)}


@habit()
def samples_mixed(prepared: Prepared) -> dict[str, Any]:
    """Mixup, with its random numbers outside of the model."""
    model = prepared(seeded(Classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    losses = []
    for i in range(3):
        lam, order = float(torch.distributions.Beta(0.4, 0.4).sample()), torch.randperm(BATCH)
        x, y = features(i), labels(i)
        out = model(lam * x + (1 - lam) * x[order])
        loss = lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[order])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, **parameters(model)}


@habit()
def labels_smoothed_with_focal_loss(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    out = model(features(1))
    smooth = F.cross_entropy(out, labels(1), label_smoothing=0.1, reduction="none")
    loss = ((1 - torch.exp(-smooth)) ** 2 * smooth).mean()
    loss.backward()
    return {"loss": loss, **gradients(model)}


@habit()
def two_views_contrasted(prepared: Prepared) -> dict[str, Any]:
    """SimCLR: all against all, its own view excepted."""
    model = prepared(seeded(Classes, classes=8))
    z = F.normalize(torch.cat([model(features(1)), model(features(2))]), dim=-1)
    similar = z @ z.T / 0.2
    similar.fill_diagonal_(-1e9)
    n = len(z) // 2
    loss = F.cross_entropy(similar, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))
    loss.backward()
    return {"loss": loss, **gradients(model)}


@habit()
def queue_of_negatives(prepared: Prepared) -> dict[str, Any]:
    """MoCo: keys of a model that follows, in a queue."""
    model = prepared(seeded(Classes, classes=8))
    keys = copy.deepcopy(model)
    for p in keys.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    queue, losses = F.normalize(features(50, batch=16, width=8), dim=-1), []
    for i in range(3):
        q = F.normalize(model(features(i)), dim=-1)
        with torch.no_grad():
            for p, k in zip(model.parameters(), keys.parameters(), strict=True):
                k.mul_(0.9).add_(p, alpha=0.1)
            k = F.normalize(keys(features(i) + 0.1), dim=-1)
        scores = torch.cat([(q * k).sum(-1, keepdim=True), q @ queue.T], 1) / 0.1
        loss = F.cross_entropy(scores, torch.zeros(len(q), dtype=torch.long))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        queue = torch.cat([k, queue])[:16].detach()
        losses.append(loss.item())
    return {"losses": losses, "queue": queue, **parameters(model)}


@habit()
def hidden_layers_distilled(prepared: Prepared) -> dict[str, Any]:
    teacher, student = prepared(seeded(Words, seed=3)), prepared(seeded(Words))
    bridge = seeded(nn.Linear, 16, 16, seed=8)
    optimizer = torch.optim.AdamW([*student.parameters(), *bridge.parameters()], lr=1e-2)
    losses = []
    for i in range(2):
        with torch.no_grad():
            t = teacher(ids(i))
        s = student(ids(i))
        soft = F.kl_div(F.log_softmax(s["logits"], -1), F.log_softmax(t["logits"], -1), reduction="batchmean", log_target=True)
        loss = soft + F.mse_loss(bridge(s["hidden"]), t["hidden"]) + (1 - F.cosine_similarity(s["hidden"], t["hidden"], dim=-1)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "bridge": bridge.weight.detach(), **parameters(student)}


@habit()
def curriculum_of_lengths(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for i, length in enumerate((4, 8, 12)):
        x = ids(i, length=length)
        loss = model(x, labels=x)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, **parameters(model)}


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return features(i, batch=1)[0], labels(i, batch=1)[0]


@habit()
def loader_with_workers(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        g = torch.Generator().manual_seed(3)
        for x, y in DataLoader(Rows(), BATCH, sampler=RandomSampler(Rows(), generator=g), num_workers=1):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"losses": losses, **parameters(model)}


@habit()
def classes_weighed_by_sampler(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    y = labels(0, batch=24)
    sampler = WeightedRandomSampler(
        (1 / torch.bincount(y, minlength=4).clamp(min=1))[y].tolist(), 16, generator=torch.Generator().manual_seed(1)
    )
    losses = []
    for a, b in DataLoader(TensorDataset(features(0, batch=24), y), BATCH, sampler=sampler):
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, **parameters(model)}


@habit()
def stopped_early_and_restored(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    best, best_state, patience, stopped = math.inf, None, 0, -1
    for i in range(8):
        step(model, optimizer, i)
        with torch.no_grad():
            held_out = F.cross_entropy(model(features(99)), labels(99)).item()
        if held_out < best:
            best, best_state, patience = held_out, {k: v.clone() for k, v in model.state_dict().items()}, 0
        else:
            patience += 1
            if patience == 2:
                stopped = i
                break
    assert best_state is not None
    model.load_state_dict(best_state)
    return {"best": best, "stopped": stopped, **parameters(model)}


@habit()
def checkpoints_averaged(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    states = []
    for i in range(3):
        step(model, optimizer, i)
        states.append({k: v.clone() for k, v in model.state_dict().items()})
    model.load_state_dict({k: sum(s[k] for s in states) / len(states) for k in states[0]})
    return {"loss": step(model, optimizer, 9), **parameters(model)}


@habit()
def hooks_that_log(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    norms: dict[str, list[float]] = {}

    def watch(name: str, p: Any) -> None:
        p.register_post_accumulate_grad_hook(lambda q: norms.setdefault(name, []).append(q.grad.norm().item()))

    for n, p in model.named_parameters():
        watch(n, p)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    return {f"norms of {n}": v for n, v in sorted(norms.items())}


@habit()
def updates_in_backward(prepared: Prepared) -> dict[str, Any]:
    """An optimizer for each parameter, which steps and drops the gradient once that is there."""
    model = prepared(seeded(Classes))
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

    def update(p: Any) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    losses = []
    for i in range(3):
        loss = F.cross_entropy(model(features(i)), labels(i))
        loss.backward()
        losses.append(loss.item())
    return {"losses": losses, **parameters(model)}
