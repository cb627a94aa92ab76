"""A model of transformers from a configuration whose sizes are small, with the inputs of its head.

Sizes are set by their names, in all parts of a configuration that there are. What then does not fit together is not looked at further: eager refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.names import bools, ints, randn

VOCABULARY, BATCH, LENGTH, PIXELS, SAMPLES = 96, 4, 16, 32, 800
FIRST = 10  # token that means nothing else

NARROW, WIDE, HEADS, HEAD, LAYERS = 32, 64, 4, 8, 2
DEPTHS = (
    "num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "n_layers", "depth", "num_decoder_layers", "num_encoder_layers",
    "encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_blocks", "num_adapter_layers", "resampler_depth", "conformer_num_layers",
    "num_hidden_layers_per_stage",
)  # fmt: skip
SIZES: dict[str, int] = {
    **dict.fromkeys(
        (
            "hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "word_embed_proj_dim", "projection_dim", "emb_dim", "dim", "hidden_dim", "embedding_dim",
            "decoder_hidden_size", "encoder_hidden_size", "text_hidden_size", "out_hidden_size", "output_hidden_size", "fusion_hidden_size", "projector_hidden_size",
            "pooler_output_size", "encoder_hidden_dim", "linear_units", "output_dim", "classifier_proj_size", "hidden_size_per_layer_input", "lru_width", "query_dim",
        ),
        NARROW,
    ),
    **dict.fromkeys(
        (
            "intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "n_inner", "mlp_dim", "moe_intermediate_size", "ffn_hidden_size",
            "shared_expert_intermediate_size", "decoder_intermediate_size", "hidden_dim_ff", "dense_intermediate_size", "intermediate_size_mlp", "mlp_hidden_size",
            "shared_intermediate_size", "intermediate_dim", "expert_ffn_hidden_size", "encoder_intermediate_size", "linear_ffn_dim",
        ),
        WIDE,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads", "n_heads", "attention_heads",
            "decoder_num_attention_heads", "encoder_num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads",
            "index_n_heads", "heads", "num_head", "swa_num_attention_heads", "linear_num_heads", "mamba_num_heads",
        ),
        HEADS,
    ),
    **dict.fromkeys(
        (
            "head_dim", "d_kv", "attention_head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "q_lora_rank", "index_head_dim", "dim_head",
            "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_d_head", "mamba_head_dim", "attention_head_size", "global_head_dim",
        ),
        HEAD,
    ),
    "qk_head_dim": 2 * HEAD, "rotary_dim": HEAD, "mamba_d_state": 8, "state_size": 8, "mamba_d_conv": 4, "ssm_state_size": 8, "mamba_n_groups": 1,
    "expand": 1, "mamba_expand": 1, "num_kv_shared_layers": 0, "d_latents": NARROW, "num_latents": 16, "num_self_attends_per_block": LAYERS,
    **dict.fromkeys(DEPTHS, LAYERS),
    **dict.fromkeys(("vocab_size", "encoder_vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "entity_vocab_size", "codebook_size"), VOCABULARY),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "block_size", "context_length", "max_seq_len", "num_position_embeddings"), 64
    ),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_local_experts_per_layer"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k", "num_selected_experts", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1), "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    "image_size": PIXELS, "patch_size": 8, "num_mel_bins": 16, "sliding_window": 6, "window_size": 4, "attention_window": 4, "max_window_layers": 1,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "index_topk": 4, "num_queries": 4, "chunk_size": 8, "mamba_chunk_size": 8,
    "bucket_size": 8, "num_buckets": 8, "relative_attention_num_buckets": 8, "position_buckets": 8, "num_labels": 5, "temporal_patch_size": 2,
}  # fmt: skip
LISTS: dict[str, list[int]] = {
    "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "conv_dim": [16] * 3, "conv_stride": [5, 2, 2], "conv_kernel": [10, 3, 3], "tdnn_dim": [16] * 3,
    "embed_dims": [8, 16, 24, 32], "patch_sizes": [7, 3, 3, 3], "strides": [4, 2, 2, 2], "sr_ratios": [8, 4, 2, 1], "num_attention_heads": [1, 2, 2, 4],
}  # fmt: skip
TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "unk_token_id": 3,
    "mask_token_id": 4,
    "sep_token_id": 5,
}

# head -> the table of transformers that says which model has it.
HEADS_OF = {
    "causal": "CAUSAL_LM", "masked": "MASKED_LM", "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM", "image": "IMAGE_CLASSIFICATION", "segmentation": "SEMANTIC_SEGMENTATION",
    "sequence": "SEQUENCE_CLASSIFICATION", "token": "TOKEN_CLASSIFICATION", "question": "QUESTION_ANSWERING", "choice": "MULTIPLE_CHOICE", "ctc": "CTC",
    "audio": "AUDIO_CLASSIFICATION", "contrastive": "ZERO_SHOT_IMAGE_CLASSIFICATION", "vision_text": "IMAGE_TEXT_TO_TEXT", "depth": "DEPTH_ESTIMATION",
    "masked_image": "MASKED_IMAGE_MODELING", "speech": "SPEECH_SEQ_2_SEQ", "video": "VIDEO_CLASSIFICATION",
}  # fmt: skip


def classes(head: str) -> dict[str, str]:
    """Model type -> class, of `head`."""
    from transformers.models.auto import modeling_auto

    table = getattr(modeling_auto, f"MODEL_FOR_{HEADS_OF[head]}_MAPPING_NAMES")
    return {t: c if isinstance(c, str) else c[0] for t, c in table.items()}


def deep(layers: int) -> None:
    """From now on models have so many layers, where they are counted."""
    SIZES.update(dict.fromkeys(DEPTHS, layers))


def _kinds(v: Sequence[Any]) -> list[Any]:
    """Of layers, one of each kind first."""
    layers = SIZES["num_hidden_layers"]
    if len(set(map(str, v))) == 1:
        return list(v)[:layers]
    some = list(dict.fromkeys(v))
    return (some + list(v)[len(some) :])[:layers]


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """What to say instead of what is in `config`."""
    out: dict[str, Any] = {}
    for k, v in config.items():
        if isinstance(v, dict) and "model_type" in v:
            out[k] = {**shrunk(v), "model_type": v["model_type"]}
        elif k in TOKENS and isinstance(v, (int, list)) and v is not None:
            out[k] = TOKENS[k]
        elif isinstance(v, bool) or v is None:
            continue
        elif k.endswith(("token_id", "token_index")) and isinstance(v, int):
            out[k] = FIRST - 1
        elif isinstance(v, int) and k in SIZES:
            out[k] = min(v, SIZES[k]) if v > 0 else v
        elif isinstance(v, (list, tuple)) and k in LISTS and len(v) and isinstance(v[0], int):
            out[k] = LISTS[k][: len(v)]
        elif k in ("layer_types", "layers_block_type", "mlp_layer_types", "attention_types", "layers_types") and isinstance(
            v, (list, tuple)
        ):
            out[k] = _kinds(v)
    return out


def config_of(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    made = kind(**shrunk(kind().to_dict()))
    for part in (made, made.get_text_config()):
        part.use_cache = False
    for k, v in TOKENS.items():  # heads of sequences want them
        if getattr(made, k, None) is None:
            setattr(made, k, v)
    return made


def model(head: str, model_type: str, dtype: torch.dtype) -> nn.Module:
    import transformers

    c = config_of(model_type)
    if dtype == torch.float64:
        c._experts_implementation = "batched_mm"  # grouped products have no double precision
    made: nn.Module = getattr(transformers, classes(head)[model_type])(c)
    made = made.to(dtype)
    with torch.no_grad():  # float32's numbers, whatever the precision
        for p in made.parameters():
            p.copy_(p.float().to(dtype))
    return made


def _labels(*shape: int) -> Tensor:
    labels = ints(2, VOCABULARY - FIRST, *shape) + FIRST
    for i in range(1, shape[0]):
        labels[i, : i % shape[1]] = -100
    return labels


def _ids(*shape: int) -> Tensor:
    return ints(1, VOCABULARY - FIRST, *shape) + FIRST


def _pixels(c: Any, dtype: torch.dtype) -> Tensor:
    size = next((s for s in (getattr(x, "image_size", None) for x in (c, getattr(c, "vision_config", None))) if s), PIXELS)
    channels = next((n for n in (getattr(x, "num_channels", None) for x in (c, getattr(c, "vision_config", None))) if n), 3)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return randn(3, BATCH, channels, height, width, dtype=dtype)


def _padded() -> dict[str, Tensor]:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, LENGTH - 3 :] = 0
    return {"input_ids": _ids(BATCH, LENGTH), "attention_mask": mask}


def _speech(c: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    if hasattr(c, "num_mel_bins") and hasattr(c, "max_source_positions"):
        return {"input_features": randn(3, BATCH, c.num_mel_bins, 2 * c.max_source_positions, dtype=dtype), "labels": _labels(BATCH, 8)}
    return {"input_values": randn(3, BATCH, SAMPLES, dtype=dtype), "labels": _labels(BATCH, 8)}


INPUTS: dict[str, Callable[[Any, torch.dtype], dict[str, Any]]] = {
    "causal": lambda c, d: {"input_ids": _ids(BATCH, LENGTH), "labels": _labels(BATCH, LENGTH)},
    "masked": lambda c, d: {**_padded(), "labels": _labels(BATCH, LENGTH)},
    "seq2seq": lambda c, d: {**_padded(), "labels": _labels(BATCH, LENGTH // 2)},
    "image": lambda c, d: {"pixel_values": _pixels(c, d), "labels": ints(2, 2, BATCH)},
    "segmentation": lambda c, d: {"pixel_values": _pixels(c, d), "labels": ints(2, 2, BATCH, PIXELS, PIXELS)},
    "sequence": lambda c, d: {**_padded(), "labels": ints(2, 2, BATCH)},
    "token": lambda c, d: {**_padded(), "labels": ints(2, 2, BATCH, LENGTH)},
    "question": lambda c, d: {**_padded(), "start_positions": ints(2, LENGTH, BATCH), "end_positions": ints(4, LENGTH, BATCH)},
    "choice": lambda c, d: {"input_ids": _ids(BATCH, 2, LENGTH), "labels": ints(2, 2, BATCH)},
    "ctc": lambda c, d: {"input_values": randn(3, BATCH, SAMPLES, dtype=d), "labels": ints(2, 16, BATCH, 4) + FIRST},
    "audio": lambda c, d: {"input_values": randn(3, BATCH, SAMPLES, dtype=d), "labels": ints(2, 2, BATCH)},
    "contrastive": lambda c, d: {"input_ids": _ids(BATCH, LENGTH), "pixel_values": _pixels(c, d), "return_loss": True},
    "vision_text": lambda c, d: {"input_ids": _ids(BATCH, LENGTH), "labels": _labels(BATCH, LENGTH)},
    "depth": lambda c, d: {"pixel_values": _pixels(c, d)},
    "masked_image": lambda c, d: {"pixel_values": _pixels(c, d), "bool_masked_pos": bools(4, BATCH, (PIXELS // 8) ** 2)},
    "speech": _speech,
    "video": lambda c, d: {"pixel_values": randn(3, BATCH, c.num_frames, 3, PIXELS, PIXELS, dtype=d), "labels": ints(2, 2, BATCH)},
}


def inputs(head: str, model_type: str, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    c = config_of(model_type)
    cached = (
        {"use_cache": False} if head in ("causal", "seq2seq", "vision_text", "speech") and hasattr(c.get_text_config(), "use_cache") else {}
    )
    return (), {**INPUTS[head](c, dtype), **cached}


def program(head: str, model_type: str) -> str:
    """The program's text, for `tests.fuzz.check.check`."""
    return "\n".join(
        (
            "from tests.fuzz.names import *", "from tests.sweep import small", "", "D = torch.float32", "", "", "def M():",
            f'    return small.model("{head}", "{model_type}", D)', "", "", "def make_inputs():", f'    return small.inputs("{head}", "{model_type}", D)', "",
        )
    )  # fmt: skip
