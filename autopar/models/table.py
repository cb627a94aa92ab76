"""The fields of public models' config.json that say what is computed (their file names beside them; sizes are facts of the published models).

Each is https://huggingface.co/<repository>/blob/main/config.json of the repository in the comment; what is not given is the default of
transformers' class. Checkpoint matters (dtype, token ids of prompts, versions) are left out.
"""

from __future__ import annotations

from typing import Any


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": width, "n_layer": layers, "n_head": heads,
            "n_positions": 1024, "vocab_size": 50257, "activation_function": "gelu_new",
            "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}  # fmt: skip


def _llama3(width: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width, "intermediate_size": inner,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128256,
            "max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": rope, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
            "bos_token_id": 128000, "eos_token_id": 128001}  # fmt: skip


def _qwen3(width: int, inner: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": width, "intermediate_size": inner,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
            "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
            "attention_bias": False, "tie_word_embeddings": tied, "use_sliding_window": False, "max_window_layers": layers,
            "bos_token_id": 151643, "eos_token_id": 151645}  # fmt: skip


def _mixtral(width: int, inner: int, layers: int, heads: int, positions: int) -> dict[str, Any]:
    return {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": width, "intermediate_size": inner,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
            "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.02, "max_position_embeddings": positions,
            "rope_theta": 1000000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "sliding_window": None, "tie_word_embeddings": False}  # fmt: skip


def _qwen3_moe(width: int, inner: int, expert: int, layers: int, heads: int) -> dict[str, Any]:
    return {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": width, "intermediate_size": inner,
            "moe_intermediate_size": expert, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 4, "head_dim": 128,
            "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "output_router_logits": False, "router_aux_loss_coef": 0.001, "max_position_embeddings": 40960,
            "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
            "use_sliding_window": False, "max_window_layers": layers}  # fmt: skip


TABLE: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(768, 12, 12),  # openai-community/gpt2
    "gpt2-medium": _gpt2(1024, 24, 16),  # openai-community/gpt2-medium
    "gpt2-xl": _gpt2(1600, 48, 25),  # openai-community/gpt2-xl
    # The 3.1 configurations: the sizes of Llama 3, positions for 128k tokens. 405B came with 3.1 only.
    "llama3-8b": _llama3(4096, 14336, 32, 32),  # meta-llama/Llama-3.1-8B
    "llama3-70b": _llama3(8192, 28672, 80, 64),  # meta-llama/Llama-3.1-70B
    "llama3-405b": _llama3(16384, 53248, 126, 128),  # meta-llama/Llama-3.1-405B
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),  # Qwen/Qwen3-0.6B
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),  # Qwen/Qwen3-4B
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),  # Qwen/Qwen3-8B
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, False),  # Qwen/Qwen3-32B
    "mixtral-8x7b": _mixtral(4096, 14336, 32, 32, 32768),  # mistralai/Mixtral-8x7B-v0.1
    "mixtral-8x22b": _mixtral(6144, 16384, 56, 48, 65536),  # mistralai/Mixtral-8x22B-v0.1
    "qwen3-30b-a3b": _qwen3_moe(2048, 6144, 768, 48, 32),  # Qwen/Qwen3-30B-A3B
    "qwen3-235b-a22b": _qwen3_moe(4096, 12288, 1536, 94, 64),  # Qwen/Qwen3-235B-A22B
    "olmoe-1b-7b": {  # allenai/OLMoE-1B-7B-0924
        "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 1024,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": False, "output_router_logits": False, "router_aux_loss_coef": 0.01,
        "max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": False,
    },
    "gpt-oss-120b": {  # openai/gpt-oss-120b; every other layer sees the last 128 tokens
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072, "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096,
        },
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": True, "swiglu_limit": 7.0, "output_router_logits": False,
        "router_aux_loss_coef": 0.9, "tie_word_embeddings": False,
    },
    "deepseek-v3": {  # deepseek-ai/DeepSeek-V3, without its head that predicts a second token; the first three layers are dense
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
        "norm_topk_prob": True, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 163840, "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
    },
    "gemma3-1b": {  # google/gemma-3-1b-pt; every sixth layer sees the whole sequence
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_size": 1152, "intermediate_size": 6912,
        "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
        "max_position_embeddings": 32768, "sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
        "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False, "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": True,
    },
    "bert-base": {  # google-bert/bert-base-uncased
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 768, "intermediate_size": 3072,
        "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "layer_norm_eps": 1e-12,
    },
    "t5-base": {  # google-t5/t5-base
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 768, "d_kv": 64, "d_ff": 3072,
        "num_layers": 12, "num_heads": 12, "vocab_size": 32128, "relative_attention_num_buckets": 32, "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu", "is_encoder_decoder": True, "decoder_start_token_id": 0,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
