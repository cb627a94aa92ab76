"""`benchmarks.hand` runs: dense models and those with routed experts, searched and planned, and the layouts that it holds them against."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks import hand
from tests.wide import cases

SIZES = {
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 256,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "mixtral": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2,
        "max_position_embeddings": 64, "tie_word_embeddings": False,
    },
}  # fmt: skip


def asked(monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["hand", *words])
    monkeypatch.setattr(hand, "MICRO_BATCHES", (1,))
    monkeypatch.setattr(hand, "RECOMPUTE", ("none",))
    return hand.parse()


@pytest.mark.parametrize(
    ("kind", "how"),
    cases([("gpt2", "--plan"), ("mixtral", "--plan"), ("gpt2", ""), ("mixtral", "")], [("mixtral", "--plan"), ("gpt2", "")]),
)
def test_a_case_is_priced_both_ways(kind: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SIZES[kind]))
    run = hand.case(str(config), "h100:1x2", 1, 64, asked(monkeypatch, *filter(None, [how])))
    assert run["fit"] and run["tried"] >= run["fit"] and not run["worse"]
    assert run["ratio"] == pytest.approx(run["by hand"]["step_time_s"] / run["plan" if how else "search"]["step_time_s"])


def test_experts_are_shared_by_hand_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch)
    dense, routed = (dict(hand.by_hand(8, 64, True, 1, experts)) for experts in (1, 16))
    assert {layout.ep for layout in dense.values()} == {1} and {layout.ep for layout in routed.values()} == {1, 8, 16}
    assert {*dense.values()} < {*routed.values()} and any(layout.pp > 1 and layout.ep > 1 for layout in routed.values())
    assert {layout.expert_tp for layout in routed.values()} == {None, 1}
