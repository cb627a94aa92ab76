"""The models that end-to-end tests run: small Hugging Face models from configs and plain modules, with inputs.

`ZOO[name]` builds (model, call arguments as a function of batch and sequence, keyword arguments of autopar.compile).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Zoo:
    """build(layers, **sizes) -> model; inputs(batch, seq) -> keyword arguments of a call; compile: of autopar.compile."""

    build: Callable[..., nn.Module]
    inputs: Callable[[int, int], dict[str, Any]]
    compile: dict[str, Any] = field(default_factory=dict)


def without_dropout(model: nn.Module) -> nn.Module:
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    return model


def _ids(batch: int, seq: int, vocab: int = 96, seed: int = 1) -> torch.Tensor:
    return torch.randint(4, vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))


def _labels(ids: torch.Tensor) -> torch.Tensor:
    """Ignored positions whose count differs by sample; the second sample is ignored whole."""
    labels = ids.clone()
    for i in range(len(labels)):
        labels[i, : (3 * i) % labels.shape[1]] = -100
    if len(labels) > 1:
        labels[1] = -100
    return labels


def _causal(batch: int, seq: int) -> dict[str, Any]:
    ids = _ids(batch, seq)
    return {"input_ids": ids, "labels": _labels(ids)}


def _llama(layers: int = 2, **kw: Any) -> nn.Module:
    import transformers as T

    sizes = dict(
        vocab_size=96, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, max_position_embeddings=64
    )
    return T.LlamaForCausalLM(T.LlamaConfig(num_hidden_layers=layers, **{**sizes, **kw}))


def _gpt2(layers: int = 2, **kw: Any) -> nn.Module:
    import transformers as T

    sizes = dict(vocab_size=96, n_embd=32, n_head=4, n_positions=64)
    return T.GPT2LMHeadModel(T.GPT2Config(n_layer=layers, **{**sizes, **kw}))


def _qwen3(layers: int = 2, **kw: Any) -> nn.Module:
    import transformers as T

    sizes = dict(vocab_size=96, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=64)
    return T.Qwen3ForCausalLM(T.Qwen3Config(num_hidden_layers=layers, **{**sizes, **kw}))


def _gemma3(layers: int = 3, **kw: Any) -> nn.Module:
    import transformers as T

    sizes = dict(
        vocab_size=96, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=64, sliding_window=6
    )
    types = ["sliding_attention" if (i + 1) % 3 else "full_attention" for i in range(layers)]
    return T.Gemma3ForCausalLM(T.Gemma3TextConfig(num_hidden_layers=layers, layer_types=types, **{**sizes, **kw}))


def _bert(layers: int = 2, **kw: Any) -> nn.Module:
    import transformers as T

    sizes = dict(vocab_size=96, hidden_size=32, num_attention_heads=4, intermediate_size=64, max_position_embeddings=64)
    return T.BertForMaskedLM(T.BertConfig(num_hidden_layers=layers, **{**sizes, **kw}))


def _bert_inputs(batch: int, seq: int) -> dict[str, Any]:
    ids = _ids(batch, seq)
    mask = torch.ones_like(ids)
    for i in range(batch):
        mask[i, seq - (2 * i) % (seq // 2) :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": _labels(ids)}


def _t5(layers: int = 2, **kw: Any) -> nn.Module:
    import transformers as T

    sizes = dict(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_heads=4, decoder_start_token_id=0)
    return T.T5ForConditionalGeneration(T.T5Config(num_layers=layers, num_decoder_layers=layers, **{**sizes, **kw}))


def _t5_inputs(batch: int, seq: int) -> dict[str, Any]:
    return {"input_ids": _ids(batch, seq), "labels": _labels(_ids(batch, seq // 2, seed=2))}


def _vit(layers: int = 2, **kw: Any) -> nn.Module:
    import transformers as T

    sizes = dict(hidden_size=32, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4, num_labels=12)
    return T.ViTForImageClassification(T.ViTConfig(num_hidden_layers=layers, **{**sizes, **kw}))


def _vit_inputs(batch: int, seq: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=g), "labels": torch.randint(0, 12, (batch,), generator=g)}


def _mixtral(layers: int = 2, **kw: Any) -> nn.Module:
    import transformers as T

    sizes = dict(
        vocab_size=96,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return T.MixtralForCausalLM(T.MixtralConfig(num_hidden_layers=layers, experts_implementation="grouped_mm", **{**sizes, **kw}))


class ConvNet(nn.Module):
    """A BatchNorm convnet with a residual block; its loss comes from loss_fn=."""

    def __init__(self, layers: int = 2, width: int = 8, classes: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(layers)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for b in self.blocks:
            x = x + b(x)
        return self.head(F.avg_pool2d(x, 2).mean((2, 3)))


def _conv_inputs(batch: int, seq: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    return {"x": torch.randn(batch, 3, 16, 16, generator=g), "target": torch.randint(0, 12, (batch,), generator=g)}


class ToyOutput(NamedTuple):
    loss: torch.Tensor | None
    logits: torch.Tensor


class ToyLayer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(F.layer_norm(x, x.shape[-1:])).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.dropout, self.training)
        y: torch.Tensor = x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:]))))
        return y


class Toy(nn.Module):
    """A decoder with a language model's parts and dropout, captured in a fraction of the time that a library's takes: for promises that no model is needed to show."""

    def __init__(self, layers: int = 2, vocab: int = 96, width: int = 32, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab, width), nn.Embedding(64, width)
        self.layers = nn.ModuleList(ToyLayer(width, heads, dropout) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> ToyOutput:
        x = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return ToyOutput(loss, logits)


def _lora(layers: int = 2, **kw: Any) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    model = peft.get_peft_model(_llama(layers, **kw), config)
    g = torch.Generator().manual_seed(3)
    for n, p in model.named_parameters():
        if "lora_B" in n:  # zero at birth: every other gradient would be zero too
            p.data.normal_(0, 0.1, generator=g)
    return model


ZOO: dict[str, Zoo] = {
    "gpt2": Zoo(_gpt2, _causal),
    "llama": Zoo(_llama, _causal),
    "qwen3": Zoo(_qwen3, _causal),
    "gemma3": Zoo(_gemma3, _causal),
    "bert": Zoo(_bert, _bert_inputs),
    "t5": Zoo(_t5, _t5_inputs),
    "vit": Zoo(_vit, _vit_inputs),
    "mixtral": Zoo(_mixtral, _causal),
    "convnet": Zoo(ConvNet, _conv_inputs, {"loss_fn": F.cross_entropy}),
    "lora": Zoo(_lora, _causal),
    # Attention dropout takes torch's math path; without it these use the attention op.
    "gpt2-attention": Zoo(functools.partial(_gpt2, attn_pdrop=0.0), _causal),
    "bert-attention": Zoo(functools.partial(_bert, attention_probs_dropout_prob=0.0), _bert_inputs),
    "t5-attention": Zoo(functools.partial(_t5, dropout_rate=0.0), _t5_inputs),
    "toy": Zoo(functools.partial(Toy, dropout=0.0), _causal),
    "toy-dropout": Zoo(Toy, _causal),
}
