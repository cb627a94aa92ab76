"""Models by name are the published ones: their parameter counts, depths and parts; files and unknown names are told about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.models import configs as models
from autopar.models.configs import ModelError
from autopar.models.table import TABLE
from tests.spmd.simulate import prepare

# As on the models' pages; on the meta device even the largest is built in a tenth of a second.
PUBLISHED = {
    "gpt2": (12, 124e6), "gpt2-medium": (24, 355e6), "gpt2-xl": (48, 1.558e9),
    "llama3-8b": (32, 8.03e9), "llama3-70b": (80, 70.6e9), "llama3-405b": (126, 405.9e9),
    "qwen3-0.6b": (28, 0.596e9), "qwen3-4b": (36, 4.02e9), "qwen3-8b": (36, 8.19e9), "qwen3-32b": (64, 32.8e9),
    "mixtral-8x7b": (32, 46.7e9), "mixtral-8x22b": (56, 140.6e9), "qwen3-30b-a3b": (48, 30.5e9), "qwen3-235b-a22b": (94, 235e9),
    "olmoe-1b-7b": (16, 6.92e9), "gpt-oss-120b": (36, 117e9), "deepseek-v3": (61, 671e9), "gemma3-1b": (26, 1.00e9), "bert-base": (12, 110e6), "t5-base": (12, 223e6),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_published_sizes(name: str) -> None:
    layers, count = PUBLISHED[name]
    config = models.config(name)
    model = models.build(config)
    assert models.depth(config) == layers
    assert abs(sum(p.numel() for p in model.parameters()) / count - 1) < 0.01
    assert {str(p.dtype) for p in model.parameters()} == {"torch.float32"} and all(p.is_meta for p in model.parameters())
    assert model.training


@pytest.mark.parametrize("name", [n for n in TABLE if "first_k_dense_replace" not in TABLE[n]])
def test_fewer_layers(name: str) -> None:
    """k layers take the same parameters from each further layer, and the config the caller has stays whole."""
    config = models.config(name)
    before = config.to_dict()
    counts = [sum(p.numel() for p in models.build(config, k).parameters()) for k in (1, 2, 3)]
    assert counts[2] - counts[1] == counts[1] - counts[0] > 0
    assert config.to_dict() == before
    whole = sum(p.numel() for p in models.build(config).parameters())
    assert counts[0] + (counts[1] - counts[0]) * (models.depth(config) - 1) == whole


def test_layer_types_are_cut_too() -> None:
    config = models.config("gemma3-1b")
    assert config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2
    assert models.build(config, 7).config.layer_types == config.layer_types[:7]
    cut: Any = models.build(models.config("qwen3-0.6b"), 3).config
    assert cut.max_window_layers == 3 and len(cut.layer_types) == 3
    t5: Any = models.build(models.config("t5-base"), 2)
    assert len(t5.encoder.block) == len(t5.decoder.block) == 2
    for k in (0, -1, 29):
        with pytest.raises(ModelError, match="28 layers"):
            models.build(models.config("qwen3-0.6b"), k)


def test_parts_are_the_ones_that_plan_well() -> None:
    """Experts as one grouped product, attention as one op (but gpt-oss's, whose sinks transformers gives to no kernel of torch's), no cache."""
    mixtral: Any = models.build(models.config("mixtral-8x7b"), 1)
    assert mixtral.config._experts_implementation == "grouped_mm"
    for name in TABLE:
        model: Any = models.build(models.config(name), 1)
        assert model.config._attn_implementation == ("eager" if name.startswith("gpt-oss") else "sdpa") and not model.config.use_cache
    assert models.config("gemma3-1b").rope_parameters["sliding_attention"]["rope_theta"] == 10000.0
    assert models.config("llama3-8b").rope_parameters["rope_type"] == "llama3"


def test_inputs() -> None:
    assert models.inputs(models.config("llama3-8b"), 4, 8192) == {"input_ids": (4, 8192), "labels": (4, 8192)}
    with pytest.raises(ModelError, match="1024 tokens, not 8192"):
        models.inputs(models.config("gpt2"), 4, 8192)
    with pytest.raises(ModelError):
        models.inputs(models.config("gpt2"), 0, 8)


@pytest.mark.parametrize("name", ["bert-base", "t5-base", "gemma3-1b"])
def test_inputs_are_what_the_model_takes(name: str) -> None:
    """Captured from the meta device with these shapes, the loss is a scalar, and every parameter has a gradient (BERT's pooler is left out)."""
    import torch

    config = models.config(name)
    kwargs = {k: torch.zeros(s, dtype=torch.int64) for k, s in models.inputs(config, 2, 8).items()}
    graph = prepare(models.build(config, 1), kwargs).graph
    assert [t.shape for t in graph.inputs] == [(2, 8), (2, 8)] and graph.tensors[graph.outputs[0]].shape == ()
    assert graph.params and set(graph.grads) == set(graph.params)


@pytest.mark.parametrize(("name", "meant"), [("llama-8b", "llama3-8b"), ("GPT3", "gpt2"), ("qwen3-7b", "qwen3-8b"), ("t5", "t5-base")])
def test_unknown_names(name: str, meant: str) -> None:
    with pytest.raises(ModelError, match="did you mean") as e:
        models.config(name)
    assert meant in e.value.fix.partition("?")[0] and "config.json" in e.value.fix


def test_far_names_list_all() -> None:
    with pytest.raises(ModelError) as e:
        models.config("zzzzzz")
    assert "did you mean" not in e.value.fix and "mixtral-8x7b" in e.value.fix
    assert models.depth(models.config(" Llama3-8B ")) == 32


def test_a_config_file(tmp_path: Path) -> None:
    """As a Hub repository has it: the dtype of its weights is not the dtype it is trained in, and its code is not run."""
    values = {
        **TABLE["qwen3-0.6b"],
        "num_hidden_layers": 2,
        "max_window_layers": 2,
        "torch_dtype": "bfloat16",
        "auto_map": {"AutoConfig": "x.Y"},
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    for path in (file, tmp_path):
        config = models.config(str(path))
        model = models.build(config)
        assert models.depth(config) == 2 and type(model).__name__ == "Qwen3ForCausalLM"
        assert {str(p.dtype) for p in model.parameters()} == {"torch.float32"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "ends in the middle"),
        ("[]", "not a JSON object"),
        ("{}", "model_type"),
        ('{"model_type": "lama"}', "lama"),
        ('{"model_type": ["llama"]}', "model_type"),
        ('{"model_type": "llama", "hidden_size": "big"}', "not valid"),
        ('{"model_type": "llama", "hidden_size": 1, "hidden_size": 2}', "twice"),
        ("[" * 100000, "deeply"),
    ],
)
def test_bad_config_files(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelError, match=said) as e:
        models.config(str(file))
    assert str(e.value.where) == str(file) and e.value.fix


def test_what_is_no_language_model(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "vit"}')
    with pytest.raises(ModelError, match="no language model"):
        models.build(models.config(str(file)))
    for path in ("none/config.json", "none.json", str(tmp_path / "none")):
        with pytest.raises(ModelError, match="cannot be read"):
            models.config(path)
