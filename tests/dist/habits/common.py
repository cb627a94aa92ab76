"""Models and batches that habits share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, BATCH, LENGTH = 32, 16, 8, 12


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor
    loss: Tensor | None = None


class Words(nn.Module):
    """A small language model, with its loss inside where labels are given."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up, self.down, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.words(ids)
        x = x + torch.cumsum(x, 1) / LENGTH
        h = self.norm(x + self.down(F.gelu(self.up(x))))
        logits = self.head(h)
        out = {"logits": logits, "hidden": h}
        if labels is not None:
            out = {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), **out}
        return out


class Classes(nn.Module):
    """Features in, scores of classes out."""

    def __init__(self, width: int = WIDTH, classes: int = 4) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(torch.relu(self.b(torch.tanh(self.a(x)))))
        return y


def seeded(build: Any, *args: Any, seed: int = 0, **kw: Any) -> Any:
    torch.manual_seed(seed)
    return build(*args, **kw)


def ids(seed: int, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(0, WORDS, (batch, length), generator=torch.Generator().manual_seed(seed))


def features(seed: int, batch: int = BATCH, width: int = WIDTH) -> Tensor:
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(seed))


def labels(seed: int, batch: int = BATCH, classes: int = 4) -> Tensor:
    return torch.randint(0, classes, (batch,), generator=torch.Generator().manual_seed(seed + 1000))


def parameters(model: Any) -> dict[str, Any]:
    return {f"parameter {n}": p.detach() for n, p in model.named_parameters()}


def gradients(model: Any) -> dict[str, Any]:
    return {f"gradient {n}": p.grad for n, p in model.named_parameters()}
