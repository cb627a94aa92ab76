"""Public model configurations by name, without network or weights: enough to plan for a model nobody has downloaded.

config("llama3-70b")            a transformers config;  config("my/config.json") reads a file
build(config("llama3-70b"), 2)  the model on the meta device, of that depth
inputs(config("gpt2"), 8, 1024) the shapes of a training batch
"""

from __future__ import annotations

import copy
import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError
from autopar.models.table import TABLE
from autopar.text.strict_json import JsonError, parse, read_bytes, short

if TYPE_CHECKING:
    from torch import nn

Config = Any  # transformers' PretrainedConfig, which is imported late: it takes seconds
_HOW = f"use one of {', '.join(TABLE)}, or the path of a Hugging Face config.json"


class ModelError(AutoparError):
    """A model's name is unknown, or its configuration is not one that can be planned for."""


def config(name: str) -> Config:
    """The configuration of a public model, or of a config.json (or a folder that has one)."""
    key = name.strip().lower()
    if key in TABLE:
        return made(dict(TABLE[key]), key)
    path = Path(name)
    if _exists(path) or name.endswith(".json") or os.sep in name:
        return _read(path)
    begin = [n for n in TABLE if key and n.startswith(key)]
    close = begin or difflib.get_close_matches(key, TABLE, n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(close)}? Else " if close else ""
    raise ModelError(f"No model is called {short(name)!r}", where="MODEL", fix=meant + _HOW)


def depth(config: Config) -> int:
    """How many layers: of the encoder, for a model that has a decoder too."""
    return int(config.num_hidden_layers)


def build(config: Config, layers: int | None = None) -> nn.Module:
    """The model in float32 on the meta device, with its language-modelling head: no memory is used. layers: only so many of them."""
    import torch

    transformers = _transformers()
    config = copy.deepcopy(config) if layers is None else _cut(config, layers)
    config.use_cache = False  # training has no use for it, and it would be captured
    auto = getattr(transformers, f"AutoModelFor{_head(config)}")
    with torch.device("meta"):
        # float32 whatever the checkpoint's dtype: parameters are the optimizer's master copy, precision= says what is computed in.
        model: nn.Module = auto.from_config(config, dtype=torch.float32)
    return model.train()


def inputs(config: Config, batch: int, sequence: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the token ids (and labels) of one batch. An encoder-decoder's labels are as long as its input; its decoder's ids follow from them."""
    if batch < 1 or sequence < 1:
        raise ModelError(f"A batch of {batch} sequences of {sequence} tokens has nothing to learn from", fix="give positive sizes")
    longest = getattr(config, "max_position_embeddings", None)
    # A learned table of positions ends; rotary and relative positions do not. On fake tensors the lookup behind its end would go unnoticed.
    if longest is not None and sequence > longest and getattr(config, "rope_parameters", None) is None:
        raise ModelError(
            f"{config.model_type} has positions for {longest} tokens, not {sequence}",
            where="sequence length",
            fix=f"use at most {longest}, or a config.json with more positions",
        )
    return {"input_ids": (batch, sequence), "labels": (batch, sequence)}


# ---- parts -------------------------------------------------------------------------------------------------------


def made(values: dict[str, Any], where: str) -> Config:
    transformers = _transformers()
    kind = values.get("model_type")
    known = transformers.CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in known:
        close = difflib.get_close_matches(str(kind), list(known.keys()), n=3)
        meant = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ModelError(
            f"transformers knows no model_type {short(str(kind))!r}", where=where, fix="give the config.json a known model_type" + meant
        )
    values = {k: v for k, v in values.items() if k not in ("auto_map", "quantization_config")}  # code and weights: not ours to run or read
    try:
        made = known[kind].from_dict(values)
        int(made.num_hidden_layers)
    except Exception as e:  # whatever a config class makes of a stranger's values
        raise ModelError(f"The configuration is not valid: {short(str(e), 200)}", where=where, fix="correct the config.json") from None
    return made


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ModelError("transformers is not installed", where="models by name", fix='pip install "autopar[hf]"') from None
    return transformers


def _read(path: Path) -> Config:
    where = short(str(path), 200)
    try:
        values = parse(read_bytes(path / "config.json" if path.is_dir() else path))
    except JsonError as e:
        raise ModelError(f"The configuration cannot be read: {e}", where=where, fix="give a Hugging Face config.json") from None
    except (OSError, ValueError) as e:
        reason = (e.strerror if isinstance(e, OSError) else None) or type(e).__name__
        raise ModelError(f"The configuration cannot be read: {reason}", where=where, fix=_HOW) from None
    if not isinstance(values, dict):
        raise ModelError("The configuration is not a JSON object", where=where, fix="give a Hugging Face config.json")
    return made(values, where)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long a name, a zero byte
        return False


def _cut(config: Config, layers: int) -> Config:
    """The same model with `layers` layers: also of the decoder, and of every list that has an entry a layer."""
    whole = depth(config)
    if not 1 <= layers <= whole:
        raise ModelError(f"The model has {whole} layers, not {layers}", where="layers", fix=f"give 1 to {whole}")
    config = copy.deepcopy(config)
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == whole and "layer" in name:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers
    for name in ("num_decoder_layers", "decoder_layers", "encoder_layers", "max_window_layers"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(layers, getattr(config, name)))
    return config


def _head(config: Config) -> str:
    """Which of transformers' automatic classes trains this model on token ids and labels."""
    from transformers.models.auto import modeling_auto as auto

    named = " ".join(config.architectures or [])
    heads = {
        "Seq2SeqLM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "MaskedLM": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "CausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    fitting = [h for h, names in heads.items() if config.model_type in names and (h == "Seq2SeqLM") == bool(config.is_encoder_decoder)]
    # BERT has a causal head too: what the config names comes first, then what such models were trained with.
    for h in fitting:
        if heads[h][config.model_type] in named.split():
            return h
    if not fitting:
        fix = "give a language model's config.json: for one that sees images too, its text_config"
        raise ModelError(
            f"{config.model_type} is no language model that transformers can build from token ids", where="model_type", fix=fix
        )
    return fitting[0]
