"""Several models at a time, models inside of others, generation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.dist.habits import Prepared, habit
from tests.dist.habits.common import WORDS, Classes, Words, features, gradients, ids, labels, parameters, seeded


@habit()
def teacher_and_student(prepared: Prepared) -> dict[str, Any]:
    teacher, student = prepared(seeded(Words, seed=3)).eval(), prepared(seeded(Words))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    losses = []
    for i in range(3):
        with torch.no_grad():
            wanted = F.softmax(teacher(ids(i))["logits"] / 2, -1)
        loss = F.kl_div(F.log_softmax(student(ids(i))["logits"] / 2, -1), wanted, reduction="batchmean") * 4
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, **parameters(student)}


def _log_probabilities(model: Any, x: torch.Tensor) -> torch.Tensor:
    logits = model(x)["logits"][:, :-1]
    each: torch.Tensor = logits.log_softmax(-1).gather(-1, x[:, 1:].unsqueeze(-1)).squeeze(-1)
    return each.sum(-1)


@habit(1e-4)
def direct_preference(prepared: Prepared) -> dict[str, Any]:
    """DPO, its reference frozen."""
    reference, policy = prepared(seeded(Words)).eval(), prepared(seeded(Words))
    for p in reference.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    losses = []
    for i in range(3):
        chosen, rejected = ids(i), ids(i + 50)
        with torch.no_grad():
            of_reference = _log_probabilities(reference, chosen) - _log_probabilities(reference, rejected)
        of_policy = _log_probabilities(policy, chosen) - _log_probabilities(policy, rejected)
        loss = -F.logsigmoid(0.1 * (of_policy - of_reference)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, **parameters(policy)}


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.tanh(self.b(F.leaky_relu(self.a(z), 0.2)))
        return out


@habit(1e-4)
def two_adversaries(prepared: Prepared) -> dict[str, Any]:
    """A GAN: gradients flow through one model into the other."""
    g, d = prepared(seeded(Generator)), prepared(seeded(Classes, classes=1))
    og, od = torch.optim.Adam(g.parameters(), lr=1e-2), torch.optim.Adam(d.parameters(), lr=1e-2)
    losses = []
    for i in range(3):
        real, noise = features(i), features(i + 100, width=8)
        fake = g(noise)
        loss_d = F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
        od.zero_grad()
        loss_d.backward()
        od.step()
        loss_g = F.softplus(-d(g(noise))).mean()
        og.zero_grad()
        loss_g.backward()
        og.step()
        losses += [loss_d.item(), loss_g.item()]
    return {"losses": losses, **{f"g {k}": v for k, v in parameters(g).items()}, **{f"d {k}": v for k, v in parameters(d).items()}}


@habit()
def one_model_feeds_another(prepared: Prepared) -> dict[str, Any]:
    encoder, head = prepared(seeded(Classes, classes=16)), prepared(seeded(Classes, seed=2))
    loss = F.cross_entropy(head(torch.relu(encoder(features(1)))), labels(1))
    loss.backward()
    return {
        "loss": loss,
        **{f"encoder {k}": v for k, v in gradients(encoder).items()},
        **{f"head {k}": v for k, v in gradients(head).items()},
    }


@habit()
def a_plain_head_on_top(prepared: Prepared) -> dict[str, Any]:
    """A module that is not compiled, with parameters on every rank."""
    encoder, head = prepared(seeded(Classes, classes=16)), seeded(nn.Linear, 16, 4, seed=4)
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
    for i in range(2):
        optimizer.zero_grad()
        F.cross_entropy(head(encoder(features(i))), labels(i)).backward()
        optimizer.step()
    return {**parameters(encoder), "weight": head.weight.detach(), "bias": head.bias.grad}


@habit()
def greedy_by_hand(prepared: Prepared) -> dict[str, Any]:
    """Token after token, in evaluation, after a step."""
    model = prepared(seeded(Words))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(ids(1), labels=ids(2))["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    x = ids(3, length=4)
    with torch.no_grad():
        for _ in range(3):
            x = torch.cat([x, model(x)["logits"][:, -1].argmax(-1, keepdim=True)], 1)
    model.train()
    model(ids(4), labels=ids(5))["loss"].backward()
    return {"ids": x, **gradients(model)}


@habit()
def sampled_by_hand(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(Words)).eval()
    with torch.no_grad():
        logits = model(ids(3))["logits"][:, -1]
        v, _ = torch.topk(logits, 5)
        logits[logits < v[:, [-1]]] = -float("inf")
        p = F.softmax(logits, -1)
        torch.manual_seed(5)
        drawn = torch.multinomial(p, 1)
    return {"p": p, "drawn": drawn, "words": WORDS}


def _llama() -> Any:
    import transformers

    c = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    return transformers.LlamaForCausalLM(c)


@habit(1e-4)
def generate(prepared: Prepared) -> dict[str, Any]:
    """transformers' own, with its cache, between two steps."""
    model = prepared(seeded(_llama))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for i in range(2):
        model(input_ids=ids(i), labels=ids(i)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        made = model.generate(ids(3, length=4), max_new_tokens=4, do_sample=False, pad_token_id=0)
    return {"made": made, **parameters(model)}


@habit(1e-4)
def logits_of_transformers(prepared: Prepared) -> dict[str, Any]:
    model = prepared(seeded(_llama))
    out = model(input_ids=ids(1))
    loss = F.cross_entropy(out.logits[:, :-1].reshape(-1, WORDS), ids(1)[:, 1:].reshape(-1))
    loss.backward()
    return {"loss": loss, **gradients(model)}
