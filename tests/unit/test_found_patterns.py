"""`python -m benchmarks.patterns`: what is found in captured models is what is in them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import patterns

NOTHING = {"losses over classes": 0, "loss head": 0, "attention": 0, "softmax": 0, "experts": 0, "gates of a known form": 0, "random": 0}
# Two layers each. GPT-2 has dropout in attention, on its embeddings, and twice in a layer; routers of experts have a softmax.
FOUND: dict[str, dict[str, int]] = {
    "causal:gpt2": {"losses over classes": 1, "loss head": 1, "softmax": 2, "random": 7},
    "causal:qwen3_moe": {"losses over classes": 1, "loss head": 1, "attention": 2, "softmax": 2, "experts": 2, "gates of a known form": 2},
}


@pytest.mark.parametrize("model", FOUND)
def test_found(model: str) -> None:
    row: dict[str, Any] = patterns.row(model, "float32")
    assert row["found"] == {**NOTHING, **FOUND[model]}


def test_what_is_not_captured_is_said() -> None:
    assert "KeyError" in patterns.row("causal:no_such_model", "float32")["error"]
