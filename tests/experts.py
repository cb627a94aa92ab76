"""Mixtures of experts of transformers, small: each with what is its own (gates, biases, order of weights, routers, shared experts, dense layers first).

`FAMILIES[name]()` makes one; `skewed(model, how)` makes its routers prefer some experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, use_cache=False,
)  # fmt: skip


def _mixtral(**kw: Any) -> nn.Module:
    import transformers as T

    model: nn.Module = T.MixtralForCausalLM(T.MixtralConfig(**{**SIZES, "num_local_experts": 4, "output_router_logits": True, **kw}))
    return model


def _qwen3_moe(**kw: Any) -> nn.Module:
    import transformers as T

    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    model: nn.Module = T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(**{**SIZES, **sizes, **kw}))
    return model


def _gpt_oss(**kw: Any) -> nn.Module:
    import transformers as T

    sizes = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    model: nn.Module = T.GptOssForCausalLM(T.GptOssConfig(**{**SIZES, **sizes, **kw}))
    return model


def _deepseek_v3(**kw: Any) -> nn.Module:
    import transformers as T

    sizes = {
        "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1,
    }  # fmt: skip
    model: nn.Module = T.DeepseekV3ForCausalLM(T.DeepseekV3Config(**{**SIZES, **sizes, **kw}))
    return model


def _olmoe(**kw: Any) -> nn.Module:
    import transformers as T

    model: nn.Module = T.OlmoeForCausalLM(T.OlmoeConfig(**{**SIZES, "num_experts": 8, "num_experts_per_tok": 3, **kw}))
    return model


FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "mixtral": _mixtral, "qwen3_moe": _qwen3_moe, "gpt_oss": _gpt_oss, "deepseek_v3": _deepseek_v3, "olmoe": _olmoe,
}  # fmt: skip
LAYERS = {"deepseek_v3": 1}  # with experts; else 2


def build(name: str, implementation: str = "grouped_mm", **kw: Any) -> nn.Module:
    """implementation: the model's own; grouped products have no double precision."""
    torch.manual_seed(0)
    model = FAMILIES[name](**kw).train()
    model.set_experts_implementation(implementation)  # type: ignore[operator]
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model


def skewed(model: nn.Module, how: str) -> None:
    """how: "one": all tokens go to the first experts; "none": none goes to them. By the biases of routers, so of models that have some (gpt-oss)."""
    biases = [p for n, p in model.named_parameters() if n.endswith("router.bias")]
    assert biases, "its routers have no bias"
    with torch.no_grad():
        for bias in biases:
            bias[:2] = 1e3 if how == "one" else -1e3


def inputs(batch: int, seq: int, seed: int = 1) -> dict[str, Tensor]:
    ids = torch.randint(0, SIZES["vocab_size"], (batch, seq), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}
