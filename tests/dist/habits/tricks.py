"""More of what training scripts do: tricks with gradients, inputs and weights, several models and heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.dist.habits import Prepared, habit
from tests.dist.habits.common import BATCH, WORDS, Classes, Words, features, gradients, ids, labels, parameters, seeded
from tests.dist.habits.customs import step


@habit(1e-3)
def penalty_on_input_gradients(prepared: Prepared) -> dict[str, Any]:
    """By finite differences, as where gradients of gradients are not to be had."""
    model = prepared(seeded(Classes, classes=1))
    x = features(1)
    d = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    slope = (model(x + 1e-2 * d) - model(x)) / 1e-2
    loss = ((slope.squeeze(-1) / d.norm(dim=1) - 1) ** 2).mean()
    loss.backward()
    return {"loss": loss, **gradients(model)}


@habit()
def adversarial_inputs(prepared: Prepared) -> dict[str, Any]:
    """FGSM: the gradient of the input makes the next input."""
    model = prepared(seeded(Classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for i in range(2):
        x = features(i).requires_grad_(True)
        (g,) = torch.autograd.grad(F.cross_entropy(model(x), labels(i)), x)
        losses.append(step_on(model, optimizer, (x + 0.1 * g.sign()).detach(), i))
    return {"losses": losses, **parameters(model)}


def step_on(model: Any, optimizer: Any, x: torch.Tensor, i: int) -> float:
    loss = F.cross_entropy(model(x), labels(i))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@habit()
def sharpness_aware(prepared: Prepared) -> dict[str, Any]:
    """SAM: up along the gradient, the gradient there, back, a step."""
    model = prepared(seeded(Classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for i in range(3):
        loss = F.cross_entropy(model(features(i)), labels(i))
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moved = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
            for p, e in zip(model.parameters(), moved, strict=True):
                p.add_(e)
        optimizer.zero_grad()
        F.cross_entropy(model(features(i)), labels(i)).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), moved, strict=True):
                p.sub_(e)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, **parameters(model)}


@habit()
def looks_ahead(prepared: Prepared) -> dict[str, Any]:
    """Lookahead: slow weights in the optimizer's state."""
    model = prepared(seeded(Classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    slow = {p: p.detach().clone() for p in model.parameters()}
    for i in range(4):
        step(model, optimizer, i)
        if i % 2:
            with torch.no_grad():
                for p, s in slow.items():
                    s.add_(p - s, alpha=0.5)
                    p.copy_(s)
    return parameters(model)


@habit()
def decay_by_kind_and_layer(prepared: Prepared) -> dict[str, Any]:
    """No decay for biases; rates that fall with depth."""
    model = prepared(seeded(Classes))
    groups = []
    for depth, layer in enumerate((model.a, model.b, model.c)):
        for decay, those in ((0.1, [p for p in layer.parameters() if p.ndim > 1]), (0.0, [p for p in layer.parameters() if p.ndim <= 1])):
            groups.append({"params": those, "weight_decay": decay, "lr": 1e-2 * 0.8 ** (2 - depth)})
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)],
        [2],
    )
    losses = []
    for i in range(5):
        losses.append(step(model, optimizer, i))
        schedule.step()
    return {"losses": losses, "rates": schedule.get_last_lr(), **parameters(model)}


@habit()
def noise_on_gradients(prepared: Prepared) -> dict[str, Any]:
    """Differential privacy's form: clipped, and noise that every rank draws alike."""
    model = prepared(seeded(Classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(4)
    for i in range(2):
        F.cross_entropy(model(features(i)), labels(i)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for p in model.parameters():
            p.grad += 0.01 * torch.randn(p.shape, generator=g)
        optimizer.step()
        optimizer.zero_grad()
    return parameters(model)


@habit()
def gradient_surgery(prepared: Prepared) -> dict[str, Any]:
    """PCGrad: of two losses' gradients, what of one goes against the other is taken out."""
    model = prepared(seeded(Classes))
    ps = list(model.parameters())
    out = model(features(0))
    one = torch.autograd.grad(F.cross_entropy(out, labels(0)), ps, retain_graph=True)
    two = torch.autograd.grad(F.cross_entropy(out, labels(5)), ps)
    dot = torch.stack([(a * b).sum() for a, b in zip(one, two, strict=True)]).sum()
    square = sum((b * b).sum() for b in two)
    for p, a, b in zip(ps, one, two, strict=True):
        p.grad = a + b - torch.clamp(dot / square, max=0.0) * b
    torch.optim.SGD(ps, lr=0.1).step()
    return parameters(model)


@habit()
def losses_weighed_by_uncertainty(prepared: Prepared) -> dict[str, Any]:
    """Weights of losses are parameters of the loop's own, beside the model's."""
    model = prepared(seeded(Classes))
    s = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([{"params": model.parameters()}, {"params": [s], "lr": 0.1}], lr=1e-2)
    for i in range(3):
        out = model(features(i))
        both = torch.stack([F.cross_entropy(out, labels(i)), out.pow(2).mean()])
        (torch.exp(-s) * both + s).sum().backward()
        torch.nn.utils.clip_grad_norm_([*model.parameters(), s], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {"s": s.detach(), **parameters(model)}


class LowRank(nn.Module):
    """LoRA by hand, around a frozen layer."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.of = of
        for p in of.parameters():
            p.requires_grad_(False)
        self.down, self.up = nn.Linear(of.in_features, 2, bias=False), nn.Linear(2, of.out_features, bias=False)
        nn.init.constant_(self.up.weight, 0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.of(x) + self.up(self.down(x))
        return y


@habit()
def low_rank_merged(prepared: Prepared) -> dict[str, Any]:
    inner = seeded(Classes)
    inner.a, inner.b = LowRank(inner.a), LowRank(inner.b)
    model = prepared(inner)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for i in range(2):
        step(model, optimizer, i)
    with torch.no_grad():
        before = model(features(7))
        for layer in (model.a, model.b):
            layer.of.weight += layer.up.weight @ layer.down.weight
            layer.up.weight.zero_()
        after = model(features(7))
    return {"before": before, "after": after, **parameters(model)}


@habit()
def pruned_by_magnitude(prepared: Prepared) -> dict[str, Any]:
    """The smallest half of all weights is zero, and stays so."""
    model = prepared(seeded(Classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, 0)
    with torch.no_grad():
        every = torch.cat([p.abs().flatten() for p in model.parameters() if p.ndim > 1])
        threshold = every.kthvalue(every.numel() // 2).values.item()
        masks = {n: (p.abs() > threshold).float() for n, p in model.named_parameters() if p.ndim > 1}
    for i in range(2):
        step(model, optimizer, i + 1)
        with torch.no_grad():
            for n, p in model.named_parameters():
                if n in masks:
                    p.mul_(masks[n])
    return {"zeros": sum(int((p == 0).sum()) for p in model.parameters()), **parameters(model)}


@habit()
def targets_of_a_pretext(prepared: Prepared) -> dict[str, Any]:
    """Masked words: which are hidden is drawn by the loop."""
    model = prepared(seeded(Words))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    g, losses = torch.Generator().manual_seed(6), []
    for i in range(3):
        x = ids(i)
        hidden = torch.rand(x.shape, generator=g) < 0.3
        logits = model(x.masked_fill(hidden, WORDS - 1))["logits"]
        loss = F.cross_entropy(logits[hidden], x[hidden])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, **parameters(model)}


@habit(1e-4)
def per_sample_losses_resampled(prepared: Prepared) -> dict[str, Any]:
    """The hardest half of a batch trains."""
    model = prepared(seeded(Classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(2):
        with torch.no_grad():
            hard = F.cross_entropy(model(features(i)), labels(i), reduction="none").topk(BATCH // 2).indices.sort().values
        F.cross_entropy(model(features(i)[hard]), labels(i)[hard]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters(model)


@habit(1e-4)
def recurrent_over_time(prepared: Prepared) -> dict[str, Any]:
    """A cell called in a Python loop, and truncated backpropagation."""
    cell = prepared(seeded(Classes, width=24, classes=8))
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
    h, losses = torch.zeros(BATCH, 8), []
    for chunk in range(2):
        loss = torch.zeros(())
        for t in range(3):
            h = torch.tanh(cell(torch.cat([features(10 * chunk + t), h], 1)))
            loss = loss + h.pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        h = h.detach()
        losses.append(loss.item())
    return {"losses": losses, **parameters(cell)}


@habit()
def ensemble(prepared: Prepared) -> dict[str, Any]:
    models = [prepared(seeded(Classes, seed=s)) for s in range(3)]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    losses = []
    for i in range(2):
        loss = F.nll_loss(torch.stack([m(features(i)).softmax(-1) for m in models]).mean(0).log(), labels(i))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, **{f"{i} {k}": v for i, m in enumerate(models) for k, v in parameters(m).items()}}


@habit()
def several_workers_of_a_dict(prepared: Prepared) -> dict[str, Any]:
    """A ModuleDict of heads on one trunk, one at a time."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.heads = Classes(classes=16), nn.ModuleDict({"x": nn.Linear(16, 4), "y": nn.Linear(16, 4)})

        def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
            y: torch.Tensor = self.heads[task](torch.relu(self.trunk(x)))
            return y

    model = prepared(seeded(Heads))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for i, task in enumerate("xyx"):
        loss = F.cross_entropy(model(features(i), task=task), labels(i))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **parameters(model)}
