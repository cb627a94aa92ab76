"""Hidden states, attention weights and router logits of transformers' models, and losses made of them, are eager's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.test_kept import compare_recorded

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.mark.parametrize(
    ("name", "outputs", "asked"),
    [
        ("llama", "all", {"output_hidden_states": True, "output_attentions": True}),
        ("mixtral", "loss", {"output_router_logits": True}),
        ("vit", "all", {"output_hidden_states": True}),
    ],
    ids=["llama", "mixtral", "vit"],
)
def test_recorded(name: str, outputs: str, asked: dict[str, Any]) -> None:
    compare_recorded(name, {"dp": 1}, outputs, asked)
