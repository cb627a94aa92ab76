"""What plans do with a sequence as it grows: samples, heads or queries are split, as is cheapest. Layers of Qwen3-0.6B: 16 query heads on 8 key/value heads."""

from __future__ import annotations

from unittest import mock

import pytest
import transformers

import autopar
from autopar.models import configs as models
from autopar.plan.plan import Plan
from autopar.planner.formulation import causal_balance, clusters
from benchmarks.context import ways
from tests.wide import wide


def planned(cluster: str, batch: int, tokens: int, mesh: str) -> Plan:
    config = models.config("qwen3-0.6b")
    config.num_hidden_layers = 3
    config.vocab_size = 4096
    config.layer_types = config.layer_types[:3]
    assert isinstance(config, transformers.Qwen3Config)
    model, inputs = models.build(config), models.inputs(config, batch, tokens)
    return autopar.plan(model, inputs, cluster, mesh, precision="bf16", options={"seconds": 60})


def test_short_ones_are_whole() -> None:
    assert ways(planned("h100:1x8", 8, 2048, "8"), 2048) == ["8 x samples"]


def test_heads_by_all_to_all_where_they_suffice() -> None:
    """One sequence that no device holds: split along it, but for attention, which has heads enough."""
    assert ways(planned("h100:1x8", 1, 65536, "8"), 65536) == ["8 x heads, all-to-all"]


def test_queries_between_nodes() -> None:
    """More devices than heads: queries too, in blocks, since the last of them see all keys. In stretches the step takes longer."""
    plan = planned("h100:8x8", 1, 262144, "8x8")
    split = ways(plan, 262144)
    assert len(split) == 2 and any(s.startswith("8 x heads") for s in split), split
    assert any("queries in" in s and s.startswith("8 x") for s in split), split


def test_keys_go_round_between_nodes() -> None:
    """Where that hides behind attention, and gathering them does not: keys and values of eight heads' queries, from node to node."""
    with mock.patch.object(clusters, "in_rings", lambda *_: {}):
        gathered = planned("h100:4x8", 1, 65536, "4x8")
    ring = planned("h100:4x8", 1, 65536, "4x8")
    assert "4 x queries in 4 blocks, keys going round" in ways(ring, 65536), ways(ring, 65536)
    assert "4 x queries in 4 blocks, keys gathered" in ways(gathered, 65536), ways(gathered, 65536)
    for figure in ("step_time_s", "exposed_s", "peak_memory_bytes"):
        assert ring.predicted[figure] < gathered.predicted[figure]


@wide
def test_blocks_are_faster_than_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = planned("h100:8x8", 1, 262144, "8x8")
    monkeypatch.setattr(causal_balance, "SHARE", 2.0)
    stretches = planned("h100:8x8", 1, 262144, "8x8")
    assert blocks.predicted["step_time_s"] < 0.95 * stretches.predicted["step_time_s"]
