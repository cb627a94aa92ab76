"""`predict` of expert parallelism: counts made by hand, a published run, and what cannot be."""

from __future__ import annotations

import math
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
from autopar.predict.step import cost_of, halves_of
from tests.wide import cases, wide

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


def layer(model: nn.Module, ep: int, **sizes: int) -> Piece:
    found = micro_batch(model, SHAPES, Cluster.of(CLUSTER), Layout(ep=ep, zero=1, **sizes), BY_HAND)
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


NOW = [(2, 1, {"ep", "tp_ep"}, 4, 2), (1, 2, {"ep"}, 8, 8)]


@pytest.mark.parametrize(
    ("tp", "expert_tp", "names", "routed", "sequences"),
    cases([*NOW, (4, 1, {"tp_ep"}, 4, 1), (1, 1, {"ep"}, 4, 4), (2, 2, {"ep"}, 8, 4)], NOW),
)
def test_folded_experts(mixtral: nn.Module, tp: int, expert_tp: int, names: set[str], routed: int, sequences: int) -> None:
    """Over 4 ranks in the order of ranks: rows of a rank's tokens go to them, but for a quarter; features over `expert_tp` of them bring all their tokens together."""
    mine = layer(mixtral, 4, tp=tp, expert_tp=expert_tp)
    assert mine.routed == EXPERTS * 3 * WIDTH * INNER / routed
    tokens = SEQ * sequences / (4 * expert_tp)
    sent = {t.wire_bytes: n for t, n in mine.forward.transfers.items() if t.kind == "all_to_all" and set(t.axes) == names}
    assert sent == {tokens * expert_tp * CHOSEN * WIDTH * 2 * 3 / 4: 2}
    gathered = sum(n * t.wire_bytes for t, n in mine.forward.transfers.items() if t.kind == "all_gather" and set(t.axes) <= {"etp"})
    products = sum(n * t.flops for t, n in mine.forward.tasks.items() if t.load == 1.0 and t.kind == "matmul" and not t.square_flops)
    assert products == pytest.approx(
        sum(n * t.flops for t, n in layer(mixtral, 1).forward.tasks.items() if t.kind == "matmul" and not t.square_flops) / tp
    )
    assert (gathered > 0) == (expert_tp > tp)


def test_not_said_is_tensor_parallel_as_all_else(mixtral: nn.Module) -> None:
    """Megatron's default, where no context parallelism stands between."""
    told, default = (autopar.predict(mixtral, SHAPES, CLUSTER, Layout(tp=2, ep=4, zero=1, expert_tp=n), global_batch=16) for n in (2, None))
    assert told.parts_s == default.parts_s and told.memory_bytes == default.memory_bytes
    assert "expert-tp 2" in str(told.layout) and "expert-tp" not in str(default.layout)


def test_others_keep_what_experts_receive(mixtral: nn.Module) -> None:
    """Megatron's backward has x and h of forward: two exchanges, and twice the FLOPs of forward, for rows and both products' inputs in memory."""
    mine, ours = layer(mixtral, 4), replace(BY_HAND, keeps_rows=False)
    rows = SEQ * CHOSEN
    assert mine.rows_bytes == rows * (WIDTH + 3 * INNER) * 2
    remade = sum(n * t.remade_flops for t, n in mine.backward.tasks.items())
    assert remade == 2 * rows * WIDTH * 2 * INNER and not any(t.remade_flops for t in mine.forward.tasks)
    where, layout = Cluster.of(CLUSTER), Layout(ep=4, zero=1)
    (_, a), (_, b) = (halves_of(mine, layout, how, cost_of(layout, 16, how, where)) for how in (BY_HAND, ours))
    assert a.exposed_s == pytest.approx(b.exposed_s * 2 / 3) and a.compute_s < b.compute_s
    assert memory.kept_bytes(mine, layout, BY_HAND) - memory.kept_bytes(mine, layout, ours) == mine.rows_bytes
    full = replace(layout, recompute="full")
    assert memory.kept_bytes(mine, full, BY_HAND) == memory.kept_bytes(mine, full, ours)
    # What is made again is not the model's: its FLOPs are three times forward's, and causality hides half of attention's.
    forward = sum(n * t.flops for t, n in mine.forward.tasks.items() if not t.square_flops)
    backward = sum(n * (t.flops - t.remade_flops) for t, n in mine.backward.tasks.items() if not t.square_flops and t.kind == "matmul")
    assert backward == pytest.approx(2 * forward)


def test_gradients_are_summed_over_those_that_have_the_same() -> None:
    where = Cluster.of(CLUSTER)

    def seconds(held: Held, **sizes: int) -> float:
        layout = Layout(**sizes)
        dp = layout.replicas(where.size)
        return traffic(held, layout, BY_HAND, cost_of(layout, dp, BY_HAND, where), dp, 1, Windows()).seconds

    def summed(axes: dict[str, int], *over: str) -> float:
        """A thousand million gradients over `over`, of which each of n ranks sends 2 (n - 1) / n."""
        mesh = Mesh.of(axes)
        ways = math.prod(axes[a] for a in over)
        nbytes = 2 * BY_HAND.reduce_bytes * 1e9 * (ways - 1) / ways
        return Cost(where, mesh).collective("all_reduce", tuple(c for a in over for c in mesh.children(a)), nbytes).seconds

    assert seconds(Held(1e9, 0.0), ep=4) == seconds(Held(1e9), ep=1)
    alone = summed({"dp": 4, "ep": 4}, "dp")
    assert seconds(Held(0.0, 1e9), ep=4) == pytest.approx(alone)
    assert seconds(Held(1e9, 1e9), ep=4) == pytest.approx(seconds(Held(1e9), ep=4) + alone)
    assert seconds(Held(0.0, 1e9), ep=16) == 0.0
    # Folded: of 16 ranks in pipelines of pp, 16 / (ep x expert_tp x pp) have the same, whatever tp is.
    assert seconds(Held(0.0, 1e9), tp=2, ep=4, expert_tp=1) == pytest.approx(summed({"edp": 4, "ep": 4}, "edp"))
    assert seconds(Held(0.0, 1e9), tp=2, ep=4, expert_tp=2) == pytest.approx(summed({"edp": 2, "ep": 8}, "edp"))
    assert seconds(Held(0.0, 1e9), tp=8, ep=2, expert_tp=1, pp=2) == pytest.approx(summed({"pp": 2, "edp": 4, "ep": 2}, "edp"))
    assert seconds(Held(0.0, 1e9), tp=4, expert_tp=1) == pytest.approx(summed({"edp": 16}, "edp"))
    assert seconds(Held(1e9), tp=4, ep=8, expert_tp=1) == pytest.approx(summed({"dp": 4, "tp": 4}, "dp"))


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
    refused(Layout(ep=8, expert_tp=4), "ep x expert_tp makes 32, which does not divide tp x cp x dp, 16 ranks")
    with pytest.raises(LayoutError, match="three roles"):
        Layout(tp=2, cp=2, ep=2)
    with pytest.raises(LayoutError, match="do not lie whole in tp x cp"):
        Layout(tp=2, ep=4, expert_tp=3)
    with pytest.raises(LayoutError, match="expert_tp is 0"):
        Layout(ep=4, expert_tp=0)
    small = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": SEQ, "vocab_size": 256}
    dense = models.build(models.made({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **small}, "test"))
    with pytest.raises(LayoutError, match="no routed experts"):
        autopar.predict(dense, SHAPES, CLUSTER, Layout(tp=2, expert_tp=1), global_batch=64)
