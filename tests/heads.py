"""Models that end in a linear layer under a cross-entropy, as people write them. `HEADS[name]` builds (model, keyword arguments of a call, loss_fn or None)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import ZOO

WORDS, LARGER = 48, 104  # classes of ordinary modules, and of transformers'; no other size of theirs
Head = tuple[nn.Module, dict[str, Any], Callable[..., Tensor] | None]


def _labels(batch: int, seq: int) -> Tensor:
    y = torch.randint(0, WORDS, (batch, seq), generator=torch.Generator().manual_seed(5))
    y[:, ::3] = -100
    y[1] = -100
    return y


class Output(NamedTuple):
    loss: Tensor


class Plain(nn.Module):
    """What is read and a linear layer; how the loss is made of its result is the subclass's."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 16)
        self.head = nn.Linear(16, WORDS, bias=bias)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        return Output(self.loss(self.head(torch.tanh(self.inner(x))), labels))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Summed(Plain):
    """As transformers does where the number of targets is given."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().view(-1, WORDS), labels.view(-1), reduction="sum") / 11.0


class Smoothed(Plain):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), label_smoothing=0.2)


class SmoothedSum(Plain):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), label_smoothing=0.1, reduction="sum")


class Each(Plain):
    """A weight for every token."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), reduction="none")
        return (losses * torch.arange(losses.shape[0]) / 7).sum()


class Capped(Plain):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = 2.0 * torch.tanh(logits * 0.7 / 2.0)
        return super().loss(logits, labels)


class Shifted(Plain):
    """Logits are shifted, not labels."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].contiguous().view(-1, WORDS), labels[:, 1:].contiguous().view(-1))


class OtherIgnored(Plain):
    """A class that there is, is ignored: the first."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.view(-1, WORDS), labels.clamp(min=0).view(-1), ignore_index=0)


class Frozen(Plain):
    def __init__(self, bias: bool = False) -> None:
        super().__init__(bias)
        self.head.requires_grad_(False)


class Added(Plain):
    """The bias is added by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WORDS))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits + self.bias, labels)


class AddedRow(Added):
    """A bias of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, WORDS))


class Twice(Plain):
    """Two heads of one weight."""

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        h = torch.tanh(self.inner(x))
        return Output(self.loss(self.head(h), labels) + 0.3 * self.loss(self.head(h * h), labels))


class ZLoss(Plain):
    """Scores are held near zero by the square of their log-sum-exp."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) + 1e-2 * torch.logsumexp(logits, dim=-1).square().mean()


class ZLossFirst(Plain):
    """Of tokens that count, before the cross-entropy, which is smoothed; of rows."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        rows, y = logits.float().view(-1, WORDS), labels.view(-1)
        lse = rows.logsumexp(1, keepdim=True).squeeze(1)
        held = (lse.square() * (y != -100)).sum() / 50
        return held + F.cross_entropy(rows, y, label_smoothing=0.1)


class ZLossOfNames(Plain):
    """Of scores that have a second name, which the cross-entropy reads."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        second = torch.ops.aten.alias(logits)
        return super().loss(torch.ops.aten.alias(second), labels) + 1e-2 * torch.logsumexp(second, dim=-1).square().mean()


# ---- whose logits are used otherwise, or are no such thing ---------------------------------------------------------


class AlsoPenalised(Plain):
    """The logits are squared as well."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) + 1e-3 * logits.square().mean()


class Weighted(Plain):
    """Classes have weights."""

    weights: Tensor

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("weights", torch.rand(WORDS) + 0.5)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        labels = labels.clamp(min=self.how.get("ignore_index", -100))  # all others are classes
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), self.weights, **self.how)


class WeightedEach(Weighted):
    """And tokens have others."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), self.weights, reduction="none")
        return (losses * torch.arange(losses.shape[0]) / 7).sum()


class ZLossOfOthers(Plain):
    """The log-sum-exp is that of other scores."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) + 1e-2 * torch.logsumexp(2 * logits, dim=-1).square().mean()


class Squashed(Plain):
    """What is done to the scores is nothing that the operator does."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(torch.sigmoid(logits), labels)


class Masked(Plain):
    """Scores of some classes are taken out."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits.masked_fill(torch.arange(WORDS) > WORDS - 5, -1e4), labels.clamp(max=WORDS - 6))


class Normed(Plain):
    """The scores are those of a norm: no row of the layer by itself."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(F.layer_norm(logits, (WORDS,)), labels)


def plain(kind: type[Plain], **how: Any) -> Callable[[int, int], Head]:
    def build(batch: int, seq: int) -> Head:
        x = torch.randn(batch, seq, 12, generator=torch.Generator().manual_seed(4))
        return kind(**how), {"x": x, "labels": _labels(batch, seq)}, None

    return build


def _by_loss_fn(batch: int, seq: int) -> Head:
    x = torch.randn(batch * seq, 12, generator=torch.Generator().manual_seed(4))
    return (
        nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, WORDS)),
        {"input": x, "target": _labels(batch, seq).flatten()},
        F.cross_entropy,
    )


def _zoo(name: str, **sizes: Any) -> Callable[[int, int], Head]:
    return lambda batch, seq: (ZOO[name].build(vocab_size=LARGER, **sizes), ZOO[name].inputs(batch, seq), None)


def _causal(family: str, **more: Any) -> Callable[[int, int], Head]:
    def build(batch: int, seq: int) -> Head:
        import transformers as T

        sizes = dict(
            vocab_size=LARGER, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, num_hidden_layers=2
        )
        model = getattr(T, f"{family}ForCausalLM")(getattr(T, f"{family}Config")(**{**sizes, **more}))
        return model, ZOO["llama"].inputs(batch, seq), None

    return build


HEADS: dict[str, Callable[[int, int], Head]] = {
    "plain": plain(Plain),
    "bias": plain(Plain, bias=True),
    "sum": plain(Summed),
    "smoothed": plain(Smoothed),
    "smoothed sum": plain(SmoothedSum),
    "each": plain(Each),
    "capped": plain(Capped, bias=True),
    "shifted": plain(Shifted),
    "other ignored": plain(OtherIgnored),
    "frozen": plain(Frozen, bias=True),
    "added": plain(Added),
    "added row": plain(AddedRow),
    "twice": plain(Twice),
    "z-loss": plain(ZLoss, bias=True),
    "z-loss first": plain(ZLossFirst),
    "z-loss of names": plain(ZLossOfNames),
    "weighted": plain(Weighted),
    "weighted sum": plain(Weighted, reduction="sum"),
    "weighted, other ignored": plain(Weighted, ignore_index=0),
    "weighted each": plain(WeightedEach),
    "loss_fn": _by_loss_fn,
    "llama": _zoo("llama"),
    "gpt2": _zoo("gpt2"),
    "gemma2": _causal("Gemma2", head_dim=8, final_logit_softcapping=3.0),
    "granite": _causal("Granite", logits_scaling=4.0),
    "bert": _zoo("bert"),
    "t5": _zoo("t5"),
    "mixtral": _zoo("mixtral"),
    "lora": _zoo("lora"),
}
NO_HEADS: dict[str, Callable[[int, int], Head]] = {
    "also penalised": plain(AlsoPenalised),
    "weighted and smoothed": plain(Weighted, label_smoothing=0.1),
    "squashed": plain(Squashed),
    "z-loss of others": plain(ZLossOfOthers),
    "masked": plain(Masked),
    "normed": plain(Normed),
}
