"""The price of attention whose keys go round where a mask bounds what queries see: by hand."""

from __future__ import annotations

import math

import pytest

from autopar.cost.compute import flops, local_sizes
from autopar.cost.links import collective
from autopar.cost.ring import around, hops, merging
from autopar.graph.graph import Op
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.rules import lookup
from autopar.rules.strategy import Strategy
from tests.unit.test_cost import call, tensor

SEQ, MESH = 4096, Mesh.of({"cp": 4})
STRETCHES: Strategy = {"cp.0": ("s", 2048), "cp.1": ("s", 1024)}
KEYS = 4 * 1024 * (64 + 64)  # elements of a rank's keys and values


def attention(before: int, after: int, bias: bool = True) -> Op:
    """8 query heads on 4 key/value heads of 64, in 16 bits."""
    q, k, v = tensor("q", 1, 8, SEQ, 64), tensor("k", 1, 4, SEQ, 64), tensor("v", 1, 4, SEQ, 64)
    mask = tensor("bias", 1, 1, SEQ, SEQ) if bias else None
    out = (tensor("o.0", 1, 8, SEQ, 64), tensor("o.1", 1, 8, SEQ, dtype="float32"))
    return call("autopar.attention_v2.default", q, k, v, mask, False, 0.125, None, before, after, out=out)


def backward(before: int, after: int) -> Op:
    q, k, v, mask = attention(before, after).inputs
    out, lse = attention(before, after).outputs
    grads = (*(tensor(f"g.{i}", *x.shape) for i, x in enumerate((q, k, v))), tensor("g.3", 0))
    return call(
        "autopar.attention_backward_v3.default", tensor("go", 1, 8, SEQ, 64), q, k, v, out, lse, mask, False, 0.125, None, False, before, after,
        out=grads, direction="backward",
    )  # fmt: skip


def sent(op: Op) -> list[tuple[str, float, float]]:
    rule = lookup(op)
    return [(w.kind, w.sent, w.beside) for w in hops(op, rule, STRETCHES, local_sizes(rule, STRETCHES, MESH), MESH)]


def share(op: Op) -> float:
    """Of the rank's queries x all keys, what is computed."""
    return flops(op, lookup(op), STRETCHES, MESH) / (4 * 8 * 1024 * SEQ * 64)


def test_a_window() -> None:
    """Of 256 keys: strips of 512 queries, each of which sees 255 keys more; of the two of a rank the first has them from the rank before, which is the only
    hop."""
    op = attention(255, 0)
    assert share(op) == pytest.approx(767 / SEQ)
    mine = (512 + 767) / (2 * 767)
    assert sent(op) == [("ring", 2 * KEYS, pytest.approx(mine))]
    assert around(op, lookup(op), STRETCHES, MESH).rounds.kernels == 3  # type: ignore[union-attr]
    # Backward: the sums of dk and dv, in 32 bits, go along, and home again, which is as far.
    assert sent(backward(255, 0)) == [("ring", 2 * KEYS + 4 * KEYS, pytest.approx(mine)), ("ring", 4 * KEYS, 0.0)]
    rule = lookup(op)
    whole, bounded = (merging(x, rule, STRETCHES, local_sizes(rule, STRETCHES, MESH), MESH) for x in (attention(-1, -1), op))
    assert bounded[0] < whole[0] / 2 and bounded[1] == 6


def test_a_window_both_ways() -> None:
    """The block behind is one hop back: of four ranks, two on from the one before."""
    assert [k for k, _, _ in sent(attention(255, 255))] == ["ring", "jump"]
    assert [(k, b) for k, b, _ in sent(backward(255, 255))] == [("ring", 6 * KEYS), ("jump", 6 * KEYS), ("ring", 4 * KEYS)]


def test_a_causal_mask() -> None:
    """The last rank computes all, its own square whole; all hops are needed."""
    op = attention(-1, 0)
    assert share(op) == 1.0 and sent(op) == [("ring", 2 * KEYS, 0.25)] * 3
    blocks: Strategy = {"cp.0": ("s", 256), "cp.1": ("s", 128)}  # 8 of them: seven before its last run, ...
    assert flops(op, lookup(op), blocks, MESH) / (4 * 8 * 1024 * SEQ * 64) == pytest.approx(sum(i * 512 for i in range(1, 9)) / 8 / SEQ)


def test_what_is_not_bounded_is_all_computed() -> None:
    assert share(attention(-1, -1)) == 1.0 and len(sent(attention(-1, -1))) == 3
    for split in ({}, {"cp.0": ("q", 2048), "cp.1": ("q", 1024)}):  # no ring: the kernel goes by the mask
        op = attention(255, 0)
        assert flops(op, lookup(op), split, MESH) == 4 * 8 * SEQ * SEQ * 64 / math.prod(MESH.axis_size(a) for a in split)


def test_a_jump_leaves_a_node_from_everywhere() -> None:
    """A hop to the next does from the last of a node alone."""
    mesh, axes, nbytes = Mesh.of({"cp": 16}), ("cp.0", "cp.1", "cp.2", "cp.3"), 1e9
    cluster = Cluster.of("h100:2x8")
    ring_s, jump_s, all_s = (collective(cluster, mesh, kind, axes, nbytes).seconds for kind in ("ring", "jump", "all_to_all"))
    assert ring_s <= jump_s and jump_s == pytest.approx(cluster.inter.latency_s + nbytes / cluster.inter.reached_Bps)
    assert all_s < 2 * jump_s
    inside, mesh, axes = Cluster.of("h100:1x8"), Mesh.of({"cp": 8}), ("cp.0", "cp.1", "cp.2")
    assert collective(inside, mesh, "jump", axes, nbytes) == collective(inside, mesh, "ring", axes, nbytes)


def test_many_ranks_are_quick_to_price() -> None:
    """512 of them, eight blocks; the busiest has as much as one in the middle."""
    axes = Mesh.of({"cp": 512})
    strides, left = {}, 2**20 // 8
    for a in axes.axes:
        left //= a.size
        strides[a.name] = ("s", left)
    q, k, v = tensor("q", 1, 8, 2**20, 64), tensor("k", 1, 4, 2**20, 64), tensor("v", 1, 4, 2**20, 64)
    out = (tensor("o.0", 1, 8, 2**20, 64), tensor("o.1", 1, 8, 2**20, dtype="float32"))
    op = call("autopar.attention_v2.default", q, k, v, tensor("bias", 1, 1, 2**20, 2**20), False, 0.125, None, 1023, 0, out=out)
    found = around(op, lookup(op), strides, axes)
    assert found is not None and [v.hop for v in found.rounds.visits] == [0, 1, 2, 3, 4]  # runs of 256
    assert found.seen == pytest.approx((256 + 1023) / 2**20)
