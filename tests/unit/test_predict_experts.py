"""`predict` of expert parallelism: counts made by hand, a published run, and what cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

import autopar
from autopar import Layout
from autopar.cost.model import Cost
from autopar.errors import LayoutError
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.models import configs as models
from autopar.predict import memory
from autopar.predict.api import micro_batch
from autopar.predict.data import Windows, traffic
from autopar.predict.held import Held
from autopar.predict.pieces import Piece
from autopar.predict.runtime import RUNTIMES
from tests.wide import wide

WIDTH, INNER, LAYERS, EXPERTS, CHOSEN, SEQ = 512, 1024, 4, 8, 2, 256
MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 2048, "num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
    "max_position_embeddings": SEQ, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {"input_ids": (1, SEQ), "labels": (1, SEQ)}
CLUSTER, BY_HAND = "h100:2x8", RUNTIMES["megatron"]


@pytest.fixture(scope="module")
def mixtral() -> nn.Module:
    return models.build(models.made(dict(MIXTRAL), "test"))


def layer(model: nn.Module, ep: int) -> Piece:
    found = micro_batch(model, SHAPES, Cluster.of(CLUSTER), Layout(ep=ep, zero=1), BY_HAND)
    (mine,) = (p for p in found if p.layers)
    return mine


@wide
def test_what_a_rank_has_and_sends(mixtral: nn.Module) -> None:
    alone, shared = layer(mixtral, 1), layer(mixtral, 4)
    routed = EXPERTS * 3 * WIDTH * INNER
    assert (alone.routed, shared.routed) == (routed, routed / 4)
    assert alone.params - alone.routed == shared.params - shared.routed == 4 * WIDTH**2 + EXPERTS * WIDTH + 2 * WIDTH
    assert shared.forward.flops == pytest.approx(alone.forward.flops) and shared.backward.flops == pytest.approx(alone.backward.flops)
    for half, times in (
        (shared.forward, 2),
        (shared.backward, 3),
    ):  # rows there and back; backward sends x and the gradient, and has dx back
        sent = {t.wire_bytes: n for t, n in half.transfers.items() if t.kind == "all_to_all"}
        assert sent == {SEQ * CHOSEN * WIDTH * 2 * 3 / 4: times}
        assert {t.axes for t in half.transfers} == {("ep",)}
    assert not alone.forward.transfers


def test_gradients_are_summed_over_those_that_have_the_same() -> None:
    cost = Cost(Cluster.of(CLUSTER), Mesh.of({"pp": 1, "dp": 4, "ep": 4, "cp": 1, "tp": 1}))

    def seconds(held: Held, **sizes: int) -> float:
        return traffic(held, Layout(dp=16, **sizes), BY_HAND, cost, 16, 1, Windows()).seconds  # type: ignore[arg-type]

    assert seconds(Held(1e9, 0.0), ep=4) == seconds(Held(1e9), ep=1)
    alone = cost.collective("all_reduce", tuple(cost.mesh.children("dp")), 2 * BY_HAND.reduce_bytes * 1e9 * 3 / 4).seconds
    assert seconds(Held(0.0, 1e9), ep=4) == pytest.approx(alone)
    assert seconds(Held(1e9, 1e9), ep=4) == pytest.approx(seconds(Held(1e9), ep=4) + alone)
    assert traffic(Held(0.0, 1e9), Layout(dp=16, ep=16), BY_HAND, cost, 16, 1, Windows()).seconds == 0.0


def test_state_is_sharded_over_those_that_have_the_same() -> None:
    held, whole = Held(3e8, 1e8), Layout(zero=1, ep=4)
    both = memory.state_bytes(held, whole, BY_HAND, 16)
    apart = memory.state_bytes(Held(3e8), Layout(zero=1), BY_HAND, 16) + memory.state_bytes(Held(1e8), Layout(zero=1), BY_HAND, 4)
    assert both == pytest.approx(apart)


def test_published_run() -> None:
    """Mixtral-8x7B on 64 H100, pipelines of 4 with 8 chunks, EP 8, micro-batches of one sequence: 468 TFLOP/s of 989 (Megatron Core 0.9, forced balance)."""
    model = models.build(models.config("mixtral-8x7b"))
    shapes = {"input_ids": (1, 4096), "labels": (1, 4096)}
    found = autopar.predict(
        model, shapes, "h100:8x8", Layout(pp=4, virtual=8, ep=8, zero=1), global_batch=256, runtime="megatron"
    )  # fmt: skip
    assert found.mfu("square") == pytest.approx(468 / 989, rel=0.05)
    assert found.fits


def test_refusals(mixtral: nn.Module) -> None:
    def refused(layout: Layout, match: str) -> None:
        with pytest.raises(LayoutError, match=match):
            autopar.predict(mixtral, SHAPES, CLUSTER, layout, global_batch=64)

    refused(Layout(ep=3), "experts over 3 ranks, of 16 that have data")
    refused(Layout(ep=16), "over 16 devices, but there are 8")
    refused(replace(Layout(zero=1, ep=8), shard_ways=4), "shards over 4 ranks, experts over 8")
    with pytest.raises(LayoutError, match="three roles"):
        Layout(tp=2, cp=2, ep=2)
