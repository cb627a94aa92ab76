"""Models of transformers from a folder onto a mesh and back, without a whole copy of them anywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autopar
from autopar.errors import CheckpointError
from tests.dist.launch import run
from tests.wide import cases, wide

ROOT = Path(__file__).resolve().parents[2]


def _there_and_back(folder: str, name: str) -> None:
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2)),
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
    }  # fmt: skip
    ids = torch.arange(32).view(4, 8)
    plain, there, back = models[name], Path(folder) / name, Path(folder) / f"{name}-back"
    if dist.get_rank() == 0:
        plain.save_pretrained(there, max_shard_size="4KB")
    dist.barrier()
    plain = type(plain).from_pretrained(there)
    for cls in (type(plain), AutoModelForCausalLM):
        model = autopar.from_pretrained(cls, there, (2,), layout="fsdp", backend="aot_eager")
        assert all(isinstance(p, DTensor) for p in model.parameters())
        for n, p in plain.named_parameters():
            assert torch.equal(model.get_parameter(n).full_tensor(), p), n
    want = plain(input_ids=ids, labels=ids).loss
    assert abs(float(model(input_ids=ids, labels=ids).loss) - float(want)) < 1e-5
    model.save_pretrained(back, max_shard_size=4000)
    assert (back / "config.json").is_file() and (back / "model.safetensors.index.json").is_file()  # on every rank, at once
    for n, p in type(plain).from_pretrained(back).named_parameters():
        assert torch.equal(p, plain.get_parameter(n)), n
    half = autopar.from_pretrained(type(plain), there, (2,), dtype=torch.bfloat16, layout="fsdp", backend="aot_eager")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    with pytest.raises(CheckpointError, match="there is no model's config"):
        autopar.from_pretrained(LlamaForCausalLM, folder, (2,))


@pytest.mark.parametrize("name", cases(["llama", "gpt2"], ["llama"]))
def test_there_and_back(name: str, tmp_path: Path) -> None:
    run(_there_and_back, 2, str(tmp_path), name, timeout=200)


@wide
def test_no_rank_loads_the_whole_model(tmp_path: Path) -> None:
    """A quarter of the model is on each of four; one whole embedding is 0.46 of that."""
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.load_memory", "--processes", "4", "--scale", "4", "--deep", "4", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    found = json.loads(out.read_text())["rows"][0]
    assert found["way"] == "parts" and found["load_of_shards"] < 2, found
