"""What loops do with what a model returns."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.dist.habits import Prepared, habit
from tests.dist.habits.common import WORDS, Classes, Words, features, gradients, ids, labels, parameters, seeded


def trained(model: Any, loss_of: Any, steps: int = 3, lr: float = 0.1) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for i in range(steps):
        loss = loss_of(model, i)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **parameters(model)}


@habit()
def cross_entropy_of_logits(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words))
    return trained(model, lambda m, i: F.cross_entropy(m(ids(i))["logits"].view(-1, WORDS), ids(i + 9).view(-1)))


@habit()
def shifted_labels_with_padding(prepared: Prepared) -> dict[str, Any]:
    """The causal loss by hand, positions that differ by sample ignored."""
    model = prepared(seeded(Words))

    def loss(m: Any, i: int) -> Any:
        x = ids(i)
        y = x.clone()
        for j in range(len(y)):
            y[j, 3 + j :] = -100
        logits = m(x)["logits"][:, :-1].contiguous()
        return F.cross_entropy(logits.view(-1, WORDS), y[:, 1:].reshape(-1), ignore_index=-100, label_smoothing=0.1)

    return trained(model, loss)


@habit()
def criterion_module(prepared: Prepared) -> dict[str, Any]:
    model, criterion = prepared(seeded(Classes)), torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.5]))
    return trained(model, lambda m, i: criterion(m(features(i)), labels(i)))


@habit()
def mean_square_error(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    return trained(model, lambda m, i: F.mse_loss(m(features(i)), features(i + 5, width=4)))


@habit()
def binary_cross_entropy(prepared: Prepared) -> dict[str, Any]:
    model, pos = prepared(seeded(Classes)), torch.tensor([1.0, 3.0, 0.5, 2.0])
    return trained(
        model, lambda m, i: F.binary_cross_entropy_with_logits(m(features(i)), (features(i + 5, width=4) > 0).float(), pos_weight=pos)
    )


@habit()
def losses_added_by_hand(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words))

    def loss(m: Any, i: int) -> Any:
        out = m(ids(i), labels=ids(i + 3))
        return out["loss"] + 0.1 * out["hidden"].pow(2).mean() + 0.01 * torch.logsumexp(out["logits"], -1).square().mean()

    return trained(model, loss)


@habit()
def weight_decay_by_hand(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))

    def loss(m: Any, i: int) -> Any:
        return F.cross_entropy(m(features(i)), labels(i)) + 1e-2 * sum(p.pow(2).sum() for p in m.parameters())

    return trained(model, loss)


@habit()
def lasso_of_norms(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words))

    def loss(m: Any, i: int) -> Any:
        return m(ids(i), labels=ids(i + 3))["loss"] + 1e-2 * sum(p.norm() for p in m.parameters()) + 1e-3 * m.head.weight.abs().sum()

    return trained(model, loss)


@habit()
def penalties_through_weights(prepared: Prepared) -> dict[str, Any]:
    """Terms that compute with parameters, plain tensors beside them: a clustering loss of embeddings, a smoothness, an orthogonality."""
    model = prepared(seeded(Words))

    def loss(m: Any, i: int) -> Any:
        words, up = m.words.weight, m.up.weight
        clusters = F.cross_entropy(words, torch.where(torch.arange(WORDS) % 3 == 0, -100, torch.arange(WORDS) % 16))
        smooth = F.conv1d(up.unsqueeze(1), torch.tensor([[[-1.0, 2.0, -1.0]]])).square().mean()
        orthogonal = (up.t() @ up - torch.eye(up.shape[1])).square().mean()
        chosen = words[torch.tensor([1, 5, 31])].norm(dim=-1).mean() + up[up > 0].mean()
        return m(ids(i), labels=ids(i + 3))["loss"] + 0.1 * (clusters + smooth + orthogonal + chosen)

    return trained(model, loss)


@habit()
def samples_weighed(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    weights = torch.linspace(0.1, 2.0, 8)
    return trained(model, lambda m, i: (F.cross_entropy(m(features(i)), labels(i), reduction="none") * weights).sum() / weights.sum())


@habit()
def masked_mean(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words))

    def loss(m: Any, i: int) -> Any:
        mask = torch.arange(12)[None] < torch.arange(4, 12)[:, None]
        each = F.cross_entropy(m(ids(i))["logits"].transpose(1, 2), ids(i + 3), reduction="none")
        return (each * mask).sum() / mask.sum()

    return trained(model, loss)


@habit()
def hard_negatives(prepared: Prepared) -> dict[str, Any]:
    """Only the samples with the largest losses count."""
    model = prepared(seeded(Classes))
    return trained(model, lambda m, i: F.cross_entropy(m(features(i)), labels(i), reduction="none").topk(3).values.mean())


@habit()
def contrastive(prepared: Prepared) -> dict[str, Any]:
    """Every sample against all others of the batch, from two calls of one model."""
    model = prepared(seeded(Classes))

    def loss(m: Any, i: int) -> Any:
        a, b = F.normalize(m(features(i)), dim=-1), F.normalize(m(features(i + 7)), dim=-1)
        scores = a @ b.T / 0.1
        target = torch.arange(len(a))
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2

    return trained(model, loss)


@habit()
def triplets(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    return trained(model, lambda m, i: torch.nn.TripletMarginLoss()(m(features(i)), m(features(i) + 0.1), m(features(i + 3))))


@habit()
def policy_gradient(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))

    def loss(m: Any, i: int) -> Any:
        d = torch.distributions.Categorical(logits=m(features(i)))
        return -(d.log_prob(labels(i)) * features(i, width=1)[:, 0]).mean() - 0.01 * d.entropy().mean()

    return trained(model, loss)


@habit()
def clipped_ratio(prepared: Prepared) -> dict[str, Any]:
    """PPO: log-probabilities of before, as plain tensors, against those of now."""
    model = prepared(seeded(Classes))
    with torch.no_grad():
        old = [torch.log_softmax(model(features(i)), -1).gather(-1, labels(i)[:, None]) for i in range(3)]

    def loss(m: Any, i: int) -> Any:
        new = torch.log_softmax(m(features(i)), -1).gather(-1, labels(i)[:, None])
        ratio, advantage = (new - old[i]).exp(), features(i, width=1)
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    return trained(model, loss)


@habit()
def accuracy_and_numpy(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    out = model(features(1))
    right = (out.argmax(-1) == labels(1)).float().mean().item()
    seen = {"accuracy": right, "numpy": torch.from_numpy(out.detach().cpu().numpy()), "text": len(str(out)) > 20, "rows": out.tolist()[0]}
    correct = sum(int(p == y) for p, y in zip(out.argmax(1), labels(1), strict=True))
    return {
        **seen,
        "correct": correct,
        "length": len(out),
        "shape": tuple(out.shape),
        "top": torch.topk(out, 2).indices,
        "list": [float(x) for x in out[0]],
    }


@habit()
def metrics_of_evaluation(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    model.eval()
    every, targets = [], []
    with torch.no_grad():
        for i, n in enumerate((8, 8, 5)):  # the last batch is smaller
            every.append(model(features(i, n)).softmax(-1))
            targets.append(labels(i, n))
    p, y = torch.cat(every), torch.cat(targets)
    confusion = torch.zeros(4, 4, dtype=torch.long)
    for a, b in zip(y, p.argmax(-1), strict=True):
        confusion[a, b] += 1
    return {"probabilities": p, "confusion": confusion, "bins": torch.histc(p.max(-1).values, 4, 0, 1), "roc": torch.sort(p[:, 0]).values}


@habit()
def losses_kept(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words))
    losses = [model(ids(i), labels=ids(i + 1))["loss"] for i in range(3)]
    total = torch.stack(losses).mean()
    total.backward()
    running = 0.0
    for x in losses:
        running = 0.9 * running + 0.1 * x.detach().cpu().item()
    return {"total": float(total), "running": running, "text": f"{losses[0]:.4f}", "nan": bool(torch.isnan(total)), **gradients(model)}


@habit()
def two_forwards_one_backward(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    a, b = model(features(1)), model(features(2))
    (F.cross_entropy(a, labels(1)) + F.mse_loss(a, b)).backward()
    return gradients(model)


@habit()
def output_changed_in_place(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    out = model(features(1))
    out = out.masked_fill(torch.tensor([False, True, False, False]), -1e4)
    out[:, 0] = out[:, 0] * 0.5
    out /= 2.0
    F.cross_entropy(out, labels(1).clamp(min=2)).backward()
    return gradients(model)


@habit()
def gradient_of_an_output(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Classes))
    x = features(1).requires_grad_()
    out = model(x)
    out.retain_grad()
    (g,) = torch.autograd.grad(out.square().sum(), [x], retain_graph=True)
    out.backward(torch.ones(8, 4))
    return {"input": g, "output": out.grad, **gradients(model)}
