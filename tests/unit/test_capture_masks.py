"""transformers' causal models hand attention "causal", not a mask of sequence x sequence, unless the caller's position ids may say otherwise."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig

from autopar.capture.capture import Call, capture
from autopar.capture.describe import describe
from autopar.graph.graph import Op

ROW = 8
LLAMA = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
GPT2 = GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=ROW, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def attention(config: PreTrainedConfig, **more: torch.Tensor) -> Op:
    ids = torch.zeros(2, ROW, dtype=torch.int64)
    model = AutoModelForCausalLM.from_config(config).train()
    call = Call.of((), {"input_ids": ids, "labels": ids, "use_cache": False, **more})
    graph = describe(capture(model, call, tuple((tuple(t.shape), t.dtype) for t in call.tensors)))
    (found,) = (op for op in graph.ops if op.target.startswith("autopar.attention_v"))
    return found


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_causal_without_a_mask(config: PreTrainedConfig) -> None:
    op = attention(config)
    assert op.arg(3) is None and op.arg(4) is True


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_packed_rows_keep_their_mask(config: PreTrainedConfig) -> None:
    op = attention(config, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * 2))
    assert op.arg(3) is not None and op.arg(4) is False


def test_padding_keeps_its_mask() -> None:
    op = attention(LLAMA, attention_mask=torch.ones(2, ROW, dtype=torch.int64))
    assert op.arg(3) is not None and op.arg(4) is False
