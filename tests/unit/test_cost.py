"""Prices: figures worked out by hand, more work never cheaper, where ranks sit counted by brute force, and what fusion leaves to read and write."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.cost import Cost, OpCost
from autopar.cost.fusion import ALONE, Share, Storages, _groups, fused
from autopar.cost.links import members_on_node
from autopar.cost.memory import COPIES, LOOKUPS
from autopar.cost.model import DRAW_BYTES, DRAW_CALLS
from autopar.errors import MeshError
from autopar.graph.graph import Graph, Op, Tensor
from autopar.graph.mesh import Axis, Mesh
from autopar.graph.placement import Placement
from autopar.graph.redistribution import redistribute
from autopar.hardware.cluster import Cluster
from autopar.kernels import random
from autopar.rules import lookup, targets
from autopar.rules.strategy import Strategy, is_legal, placements

H100 = Cluster.of("h100:32x8")
D = H100.device
MEMORY = 0.74 * 3.35e12  # bytes/s that are reached
ONE = Mesh.of({"x": 1})


def tensor(name: str, *shape: int, dtype: str = "bfloat16") -> Tensor:
    return Tensor(name, shape, dtype)


def call(target: str, *args: Any, out: Tensor | tuple[Tensor | None, ...], direction: str = "forward") -> Op:
    outs = out if isinstance(out, tuple) else (out,)
    name = next(o.name for o in outs if o is not None).partition(".")[0]
    return Op(name, target, args, {}, outs, direction)


def price(op: Op, strategy: Strategy | None = None, mesh: Mesh = ONE, cost: Cost | None = None) -> OpCost:
    rule, strategy = lookup(op), strategy or {}
    assert is_legal(rule, strategy, mesh)
    ins, outs = placements(rule, strategy, tuple(t.shape for t in op.inputs), tuple(None if o is None else o.shape for o in op.outputs))
    return (cost or Cost(H100, mesh)).op(op, rule, strategy, ins, outs)


def mm(m: int = 4096, k: int = 1024, n: int = 512, dtype: str = "bfloat16") -> Op:
    return call("aten.mm.default", tensor("a", m, k, dtype=dtype), tensor("b", k, n, dtype=dtype), out=tensor("c", m, n, dtype=dtype))


# ---- products ------------------------------------------------------------------------------------------------------


def test_product_by_hand() -> None:
    c = price(mm())
    assert c.flops == 2 * 4096 * 1024 * 512
    assert c.bytes == 2 * (4096 * 1024 + 1024 * 512 + 4096 * 512)
    assert c.seconds == pytest.approx(3e-6 + c.flops / (0.62 * 989e12) + 0.85 * c.bytes / MEMORY, rel=1e-12)


@pytest.mark.parametrize("letter, size", [("m", 4096), ("k", 1024), ("n", 512)])
def test_a_split_product_does_its_share(letter: str, size: int) -> None:
    mesh = Mesh.of({"t": 8})
    split = {a.name: (letter, size // 2 ** (i + 1)) for i, a in enumerate(mesh.axes)}
    part, whole = price(mm(), split, mesh), price(mm())
    assert part.flops == whole.flops / 8
    # The operand that lacks the letter is whole on every rank.
    without = {"m": 1024 * 512, "k": 4096 * 512, "n": 4096 * 1024}[letter] * 2
    assert part.bytes == without + (whole.bytes - without) / 8


def test_dtype_decides_the_peak() -> None:
    fast, slow = price(mm(dtype="bfloat16")), price(mm(dtype="float32"))
    assert slow.seconds - fast.seconds == pytest.approx(fast.flops / 0.62 * (1 / 67e12 - 1 / 989e12) + 0.85 * fast.bytes / MEMORY)
    assert slow.flops == fast.flops and price(mm(dtype="complex64")).flops == 4 * fast.flops


@pytest.mark.parametrize(
    "op, flops",
    [
        (call("aten.bmm.default", tensor("a", 3, 4, 5), tensor("b", 3, 5, 6), out=tensor("c", 3, 4, 6)), 2 * 3 * 4 * 5 * 6),
        (call("aten.addmm.default", tensor("z", 6), tensor("a", 4, 5), tensor("b", 5, 6), out=tensor("c", 4, 6)), 2 * 4 * 5 * 6),
        (call("aten.linear.default", tensor("x", 2, 4, 5), tensor("w", 6, 5), tensor("b", 6), out=tensor("y", 2, 4, 6)), 2 * 8 * 5 * 6),
    ],
    ids=lambda x: getattr(x, "target", ""),
)
def test_flops_of_products(op: Op, flops: int) -> None:
    assert price(op).flops == flops


def convolution(transposed: bool) -> Op:
    """2 groups of 3 -> 4 channels, a kernel of 3 x 3, stride 2: 8 pixels to 4, or 4 to 8."""
    p, q = (4, 8) if transposed else (8, 4)
    w = tensor("w", 6, 4, 3, 3) if transposed else tensor("w", 8, 3, 3, 3)
    return call(
        "aten.convolution.default",
        tensor("x", 5, 6, p, p),
        w,
        None,
        [2, 2],
        [1, 1],
        [1, 1],
        transposed,
        [0, 0],
        2,
        out=tensor("y", 5, 8, q, q),
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_convolution(transposed: bool) -> None:
    """The kernel is put at 4 x 4 places either way."""
    each = 2 * 5 * (2 * 3 * 4) * 9 * 16
    assert price(convolution(transposed)).flops == each
    x, w = convolution(transposed).inputs
    y = convolution(transposed).out
    for wanted in ([True, True, False], [False, True, False]):
        outs = tuple(tensor(f"d.{i}", *t.shape) if on else None for i, (t, on) in enumerate(zip([x, w, y], wanted, strict=True)))
        back = call("aten.convolution_backward.default", y, x, w, None, [2, 2], [1, 1], [1, 1], transposed, [0, 0], 2, wanted, out=outs)
        assert price(back).flops == each * sum(wanted)


def attention(causal: bool, bias: bool = False, s: int = 128, q: int = 128) -> Op:
    """Batch 2, 8 query heads on 4 key/value heads of 64, values of 32."""
    ins = (tensor("q", 2, 8, q, 64), tensor("k", 2, 4, s, 64), tensor("v", 2, 4, s, 32))
    mask = tensor("bias", 1, 1, q, s) if bias else None
    out = (tensor("o.0", 2, 8, q, 32), tensor("o.1", 2, 8, q, dtype="float32"))
    return call("autopar.attention_v2.default", *ins, mask, causal, 0.125, None, out=out)


def backward_of(op: Op) -> Op:
    q, k, v = op.inputs[:3]
    out, lse = op.outputs
    grads = (*(tensor(f"g.{i}", *x.shape) for i, x in enumerate((q, k, v))), tensor("g.3", 0))
    return call(
        "autopar.attention_backward_v3.default", tensor("go", *op.out.shape), q, k, v, out, lse, op.args[3], op.args[4], 0.125, None, False,
        out=grads, direction="backward",
    )  # fmt: skip


def test_attention() -> None:
    full = 2 * 2 * 8 * 128 * 128 * (64 + 32)
    assert price(attention(False)).flops == full
    assert price(attention(True)).flops == full / 2
    assert price(attention(True, q=32)).flops == full / 4 * 32 / 256  # the first 32 of 128 queries see 16 keys on average
    assert price(attention(True, s=32)).flops == full / 4 * (1 - 32 / 256)
    assert price(backward_of(attention(True))).flops == 2.5 * full / 2
    # A bias brings causality as a mask: nothing is skipped.
    assert price(attention(True, bias=True)).flops == full


def test_attention_seconds() -> None:
    op = attention(True, s=8192, q=8192)
    c, b = price(op), price(backward_of(op))
    assert c.seconds == pytest.approx(3e-6 + c.flops / (0.385 * 989e12))
    assert b.seconds == pytest.approx(3e-6 + 2.5 * c.flops / (0.8 * 0.385 * 989e12))
    # One query reads all keys and values: the memory's time.
    few = price(attention(False, s=8192, q=1))
    assert few.seconds == pytest.approx(3e-6 + few.bytes / MEMORY)


def test_split_attention() -> None:
    mesh = Mesh.of({"t": 2})
    whole = price(attention(True))
    assert price(attention(True), {"t": ("g", 2)}, mesh).flops == whole.flops / 2
    # The second half of the queries sees three quarters of all keys; of queries dealt out in turn every rank's see half, but for one's own key; with a bias nothing is skipped.
    assert price(attention(True), {"t": ("q", 64)}, mesh).flops == whole.flops * 3 / 4
    assert price(attention(True), {"t": ("q", 1)}, mesh).flops == whole.flops / 2 * (64.5 / 64)
    assert price(attention(True, bias=True), {"t": ("q", 64)}, mesh).flops == whole.flops
    assert price(attention(False), {"t": ("q", 64)}, mesh).flops == whole.flops


def test_experts_split_have_their_share_of_the_rows() -> None:
    x, w, offsets = tensor("x", 64, 32), tensor("w", 4, 32, 16), tensor("o", 4, dtype="int32")
    op = call("aten._grouped_mm.default", x, w, offsets, out=tensor("y", 64, 16))
    assert price(op).flops == 2 * 64 * 32 * 16
    assert price(op, {"t": ("e", 2)}, Mesh.of({"t": 2})).flops == 64 * 32 * 16
    grad = call(
        "transformers.grouped_mm_fallback_backward.default", x, w, offsets, tensor("dy", 64, 16),
        out=(tensor("d.0", 64, 32), tensor("d.1", 4, 32, 16)),
    )  # fmt: skip
    assert price(grad).flops == 4 * 64 * 32 * 16


# ---- memory --------------------------------------------------------------------------------------------------------


def test_memory_bound_by_hand() -> None:
    x, y = tensor("x", 4096, 4096), tensor("y", 4096)
    c = price(call("aten.add.Tensor", x, y, out=tensor("z", 4096, 4096)))
    assert (c.flops, c.bytes) == (0, 2 * (4096 * 4096 + 4096 + 4096 * 4096))
    assert c.seconds == pytest.approx(3e-6 + c.bytes / MEMORY, rel=1e-12)
    # The same operand twice is read once.
    assert price(call("aten.mul.Tensor", x, x, out=tensor("z", 4096, 4096))).bytes == 4 * 4096 * 4096
    assert (
        price(call("aten.add.Tensor", x, y, out=tensor("z", 4096, 4096)), {"t": ("d0", 2048)}, Mesh.of({"t": 2})).bytes
        == c.bytes / 2 + 4096
    )


@pytest.mark.parametrize(
    "op, nbytes",
    [
        (call("aten.view.default", tensor("x", 8, 4), [4, 8], out=tensor("y", 4, 8)), 0),
        (call("aten.transpose.int", tensor("x", 8, 4), 0, 1, out=tensor("y", 4, 8)), 0),
        (call("aten.expand.default", tensor("x", 1, 4), [8, 4], out=tensor("y", 8, 4)), 0),
        (call("aten.detach.default", tensor("x", 8, 4), out=tensor("y", 8, 4)), 0),
        (call("aten.split.Tensor", tensor("x", 8, 4), 4, out=(tensor("y.0", 4, 4), tensor("y.1", 4, 4))), 0),
        (call("aten.clone.default", tensor("x", 8, 4), out=tensor("y", 8, 4)), 128),
        (call("aten.cat.default", [tensor("x", 8, 4), tensor("z", 8, 4)], out=tensor("y", 16, 4)), 256),
        (call("aten.zeros_like.default", tensor("x", 8, 4), out=tensor("y", 8, 4)), 64),
        (call("aten.empty.memory_format", [8, 4], out=tensor("y", 8, 4)), 0),
        # 8 rows of a table of 1000: their indices, the rows, the rows again.
        (call("aten.embedding.default", tensor("w", 1000, 4), tensor("i", 8, dtype="int64"), out=tensor("y", 8, 4)), 64 + 64 + 64),
        # More rows asked for than there are: the table is read once.
        (call("aten.embedding.default", tensor("w", 2, 4), tensor("i", 8, dtype="int64"), out=tensor("y", 8, 4)), 64 + 16 + 64),
        (call("aten.native_layer_norm.default", tensor("x", 8, 4), [4], None, None, 1e-5, out=(tensor("y.0", 8, 4), tensor("y.1", 8, 1), None)), 144),
    ],
    ids=lambda x: getattr(x, "target", ""),
)  # fmt: skip
def test_bytes(op: Op, nbytes: int) -> None:
    c = price(op)
    assert (c.bytes, c.flops) == (nbytes, 0)
    assert c.seconds == pytest.approx((3e-6 if nbytes else 0) + nbytes / MEMORY)


def batch_norm(training: bool) -> Op:
    x, stats = tensor("x", 8, 4, 16), [tensor(n, 4) for n in "wbmv"]
    outs = (tensor("y.0", 8, 4, 16), *(tensor(f"y.{i}", 4) for i in (1, 2, 3, 4)))
    return call("aten._native_batch_norm_legit_functional.default", x, *stats, training, 0.1, 1e-5, out=outs)


def test_statistics_of_a_batch_take_a_pass_of_their_own() -> None:
    x, vectors = 2 * 8 * 4 * 16, 8 * 2 * 4
    assert price(batch_norm(False)).bytes == 2 * x + vectors
    assert price(batch_norm(True)).bytes == 3 * x + vectors
    # In a kernel that has read all of its operands: the pass is what is left.
    shared = Cost(H100, ONE, {"y": Share(frozenset(), frozenset(), False)})
    assert price(batch_norm(True), cost=shared).bytes == x
    # A rank of two reads its half of the batch.
    assert price(batch_norm(True), {"t": ("s0", 4)}, Mesh.of({"t": 2})).bytes == pytest.approx(3 * x / 2 + vectors)
    grad, y = tensor("g", 8, 4, 16), tensor("x", 8, 4, 16)
    stats = [tensor(n, 4) for n in "wmvab"]
    backward = call(
        "aten.native_batch_norm_backward.default",
        *(grad, y, *stats, True, 1e-5, [True, True, True]),
        out=(tensor("d.0", 8, 4, 16), tensor("d.1", 4), tensor("d.2", 4)),
        direction="backward",
    )
    assert price(backward).bytes == 5 * x + 7 * 2 * 4


def test_lists_of_ops_name_ops_that_exist() -> None:
    known = {t.split(".")[1] for t in targets()}
    assert known >= COPIES and known >= LOOKUPS and known >= ALONE


@given(m=st.integers(1, 64), k=st.integers(1, 64), n=st.integers(1, 64), grow=st.integers(1, 8))
def test_more_work_is_never_cheaper(m: int, k: int, n: int, grow: int) -> None:
    base = price(mm(m, k, n))
    for larger in (mm(m * grow, k, n), mm(m, k * grow, n), mm(m, k, n * grow)):
        c = price(larger)
        assert c.seconds >= base.seconds and c.flops >= base.flops and c.bytes >= base.bytes


# ---- collectives ---------------------------------------------------------------------------------------------------


def brute_force_members(mesh: Mesh, axes: tuple[str, ...], per_node: int) -> int:
    return min(sum(r // per_node == node for r in g) for g in mesh.groups(axes) for node in {r // per_node for r in g})


MESHES = [
    {"a": 8},
    {"a": 16},
    {"a": 2, "b": 8},
    {"a": 4, "b": 2, "c": 4},
    {"a": 3, "b": 8},
    {"a": 24},
    {"a": 4, "b": 6},
    {"a": 2, "b": 3, "c": 4},
    {"a": 5, "b": 4},
]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 8, 64])
def test_members_on_a_node(sizes: dict[str, int], per_node: int) -> None:
    mesh = Mesh.of(sizes)
    for n in range(1, len(mesh.names) + 1):
        for axes in combinations(mesh.names, n):
            assert members_on_node(mesh, frozenset(axes), per_node) == brute_force_members(mesh, axes, per_node)


def test_axes_of_size_one_split_nothing() -> None:
    mesh = Mesh((Axis("a", 1, "a"), Axis("b", 4, "b"), Axis("c", 1, "c"), Axis("d", 2, "d")))
    for axes in (("a",), ("b", "c"), ("d", "c"), ("b", "d")):
        for per_node in (1, 2, 4, 8):
            assert members_on_node(mesh, frozenset(axes), per_node) == brute_force_members(mesh, axes, per_node)
    c = Cost(H100, mesh).collective("all_gather", ("a", "c"), 0.0)
    assert c.seconds == 0


NVLINK, NIC, V = 0.64 * 450e9, 0.69 * 50e9, 1e9
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def test_collectives_by_hand() -> None:
    """32 nodes of 8; dp is major, so tp = 8 fills a node and dp has one member on each."""
    mesh = Mesh.of({"dp": 32, "tp": 8})
    cost = Cost(H100, mesh)
    tp, dp = mesh.children("tp"), mesh.children("dp")
    for kind in KINDS:
        c = cost.collective(kind, tp, V)
        assert (c.link, c.latency_s) == ("intra", 20e-6) and c.seconds == pytest.approx(20e-6 + V / NVLINK)
        c = cost.collective(kind, dp, V)
        assert (c.link, c.latency_s) == ("inter", 20e-6) and c.seconds == pytest.approx(20e-6 + V / NIC)
    # All 256: eight cards share a ring's crossing, which is then as slow as NVLink's seven passes in eight or slower.
    c = cost.collective("all_gather", (*dp, *tp), V)
    assert c.link == "inter" and c.seconds == pytest.approx(20e-6 + max(V / (8 * NIC), V * 7 / 8 / NVLINK))
    # With four of eight ranks of tp: four cards.
    assert cost.collective("all_reduce", (*dp, *tp[:2]), V).seconds == pytest.approx(20e-6 + V / (4 * NIC))
    # Each rank of an all-to-all sends to each other: 248 of 255 parts leave the node over its own card.
    assert cost.collective("all_to_all", (*dp, *tp), V).seconds == pytest.approx(20e-6 + V * 248 / 255 / NIC)


def test_a_fast_network_leaves_the_node_as_the_bottleneck() -> None:
    fast = H100.model_copy(update={"inter": H100.inter.model_copy(update={"bandwidth_Bps": 450e9})})
    mesh = Mesh.of({"x": 16})
    assert Cost(fast, mesh).collective("all_gather", mesh.names, V).seconds == pytest.approx(20e-6 + V * 7 / 8 / NVLINK)
    assert Cost(fast, mesh).collective("all_to_all", mesh.names, V).seconds == pytest.approx(20e-6 + V * 8 / 15 / (0.69 * 450e9))


def test_slices_and_single_ranks_are_free() -> None:
    cost = Cost(H100, Mesh.of({"a": 2, "b": 1}))
    assert cost.collective("slice", ("a",), 0.0).seconds == 0
    assert cost.collective("all_reduce", ("b",), 0.0).seconds == 0
    assert cost.collective("all_reduce", ("a",), 0.0).seconds == 20e-6


def test_steps_of_a_redistribution_have_prices() -> None:
    """Reduce-scatter and all-gather together cost what an all-reduce does, but for one latency."""
    mesh = Mesh.of({"dp": 4, "tp": 8})
    cost = Cost(H100, mesh)
    whole, part, terms = Placement.of((1 << 20,)), Placement.of((1 << 20,)), Placement.of((1 << 20,))
    left = 1 << 20
    for a in mesh.children("dp"):
        left //= mesh.axis_size(a)
        part, terms = part.with_axis(a, (0, left)), terms.with_axis(a, "sum")
    steps = {name: redistribute(src, dst, mesh) for name, src, dst in [("ar", terms, whole), ("rs", terms, part), ("ag", part, whole)]}
    prices = {n: sum(cost.collective(s.kind, s.axes, s.wire_bytes(mesh, 2)).seconds for s in ss) for n, ss in steps.items()}
    assert [s.kind for ss in steps.values() for s in ss] == ["all_reduce", "reduce_scatter", "all_gather"]
    assert prices["rs"] + prices["ag"] == pytest.approx(prices["ar"] + 20e-6)


@given(v=st.floats(0, 1e12), more=st.floats(1, 10), kind=st.sampled_from(KINDS), sizes=st.sampled_from(MESHES))
def test_collectives_are_monotonous(v: float, more: float, kind: str, sizes: dict[str, int]) -> None:
    """In bytes; and a faster link never makes one slower."""
    mesh = Mesh.of(sizes)
    faster = H100.model_copy(update={"inter": H100.inter.model_copy(update={"bandwidth_Bps": 100e9})})
    for n in range(1, len(mesh.names) + 1):
        axes = mesh.names[:n]
        c = Cost(H100, mesh).collective(kind, axes, v)
        assert c.seconds >= c.latency_s > 0 and c.seconds <= Cost(H100, mesh).collective(kind, axes, v * more).seconds
        assert Cost(faster, mesh).collective(kind, axes, v).seconds <= c.seconds


def test_a_mesh_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(MeshError, match="16"):
        Cost(Cluster.of("h100:8"), Mesh.of({"x": 16}))


# ---- the rest ------------------------------------------------------------------------------------------------------


def test_optimizer_and_host() -> None:
    cost = Cost(H100, ONE)
    psi, ranks = 7e9, 64
    assert cost.optimizer_s(psi / ranks, whole_elements=psi) == pytest.approx(psi * (30 / ranks + 6) / MEMORY)
    assert cost.optimizer_s(1e9, 80) == pytest.approx(80e9 / MEMORY)
    assert cost.host_s(0) == 0 and cost.host_s(64e9 * 0.9) == pytest.approx(1 + 10e-6)


# ---- fusion --------------------------------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Bytes that calls with large results read and write, and how many such calls there are."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self.calls = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        if any(x.numel() > 1 << 15 for x in tree_leaves(out)):
            self.nbytes += sum(x.nbytes for x in tensors)
            self.calls += 1
        return out


def test_dropout_call_by_call() -> None:
    """A counter's words go through memory forty times; in one kernel they do not."""
    n = 1 << 16
    op = call(
        "aten.native_dropout.default",
        tensor("x", n, dtype="float32"),
        0.1,
        True,
        out=(tensor("y.0", n, dtype="float32"), tensor("y.1", n, dtype="bool")),
    )
    with Traffic() as draw:
        index = torch.arange(n // 2)[:, None] * 2 + torch.arange(2)
        random.bits(torch.tensor([3, 1]), 5, index)
    assert (draw.nbytes / n, draw.calls) == (pytest.approx(DRAW_BYTES, rel=0.01), DRAW_CALLS)
    with Traffic() as all_of_it:
        random.dropout(torch.ones(n), 0.1, torch.tensor([3, 1]), 5, torch.arange(n))
    alone = price(op)
    assert alone.bytes == pytest.approx(all_of_it.nbytes, rel=0.05)
    assert alone.seconds == pytest.approx(3e-6 * (1 + DRAW_CALLS) + alone.bytes / MEMORY)
    assert price(op, cost=Cost(H100, ONE, fused(graph([op], ("y.0", "y.1")), {op.name: lookup(op)}))).bytes == 9 * n


def graph(ops: list[Op], outputs: tuple[str, ...], grads: dict[str, str] | None = None) -> Graph:
    return Graph({}, {}, (), (), (), tuple(ops), outputs, grads or {}, {})


def table(g: Graph) -> dict[str, tuple[set[str], set[str]]]:
    return {n: (set(r), set(w)) for n, (r, w, _) in fused(g, {op.name: lookup(op) for op in g.ops}).items()}


X, W = tensor("x", 64, 32), tensor("w", 32, 32)


def add(a: Tensor, b: Tensor, name: str, direction: str = "forward") -> Op:
    return call("aten.add.Tensor", a, b, out=tensor(name, *a.shape), direction=direction)


def unary(f: str, a: Tensor, name: str, direction: str = "forward") -> Op:
    return call(f"aten.{f}.default", a, out=tensor(name, *a.shape), direction=direction)


def dot(a: Tensor, b: Tensor, name: str, direction: str = "forward") -> Op:
    return call("aten.mm.default", a, b, out=tensor(name, a.shape[0], b.shape[1]), direction=direction)


def t(name: str) -> Tensor:
    return tensor(name, 64, 32)


def test_a_chain_reads_its_inputs_once_and_writes_its_end() -> None:
    g = graph([unary("exp", X, "e"), add(t("e"), X, "s"), unary("neg", t("s"), "n")], ("n",))
    assert table(g) == {"e": ({"x"}, set()), "s": (set(), set()), "n": (set(), {"n"})}


def test_residual_does_not_join_the_norm() -> None:
    """x1 = x + r; h = mm(norm(x1)); x2 = x1 + h; a product lies between them. Six bytes an element for each sum."""
    norm = call(
        "aten.native_layer_norm.default", t("x1"), [32], None, None, 1e-5, out=(t("n.0"), tensor("n.1", 64, 1), tensor("n.2", 64, 1))
    )
    g = graph([add(X, t("r"), "x1"), norm, dot(t("n.0"), W, "h"), add(t("x1"), t("h"), "x2")], ("x2",))
    found = table(g)
    assert found["x1"] == ({"x", "r"}, {"x1"}) and found["n"] == (set(), {"n.0"})
    assert found["x2"] == ({"x1", "h"}, {"x2"})
    cost = Cost(H100, ONE, fused(g, {op.name: lookup(op) for op in g.ops}))
    assert price(g.ops[3], cost=cost).bytes == 6 * 64 * 32
    assert price(g.ops[1], cost=cost).bytes == 2 * 64 * 32
    # Products are priced as ever.
    assert price(g.ops[2], cost=cost) == price(g.ops[2])


def test_gated_unit_is_one_kernel_through_views() -> None:
    """silu(gate) * up with both halves of one product: each half is read, the result written."""
    halves = call("aten.split.Tensor", t("h"), 16, 1, out=(tensor("p.0", 64, 16), tensor("p.1", 64, 16)))
    view = call("aten.view.default", tensor("s", 64, 16), [1024], out=tensor("v", 1024))
    flat = call("aten.view.default", tensor("p.1", 64, 16), [1024], out=tensor("u", 1024))
    product = call("aten.mul.Tensor", tensor("v", 1024), tensor("u", 1024), out=tensor("m", 1024))
    g = graph([dot(X, W, "h"), halves, unary("silu", tensor("p.0", 64, 16), "s"), view, flat, product], ("m",))
    found = table(g)
    assert found["s"] == ({"p.0"}, set()) and found["m"] == ({"u"}, {"m"})
    assert "p" not in found and "v" not in found


def test_one_launch_a_kernel() -> None:
    g = graph([unary("exp", X, "e"), unary("neg", t("e"), "n"), unary("abs", t("n"), "a"), dot(t("n"), W, "h")], ("a", "h", "e"))
    shares = fused(g, {op.name: lookup(op) for op in g.ops})
    assert [shares[n].launches for n in "enah"] == [True, False, False, True]
    cost = Cost(H100, ONE, shares)
    total = sum(price(op, cost=cost).seconds for op in g.ops[:3])
    assert total == pytest.approx(3e-6 + 4 * 2 * 64 * 32 / MEMORY)


def test_what_forward_gives_is_worked_on_where_backward_uses_it() -> None:
    """2 x of a square's gradient: at hand from the start, but made in the kernel that multiplies it."""
    ops = [
        unary("exp", X, "e"), dot(t("e"), W, "h"), dot(t("h"), W, "g", "backward"), unary("neg", t("e"), "n", "backward"),
        unary("abs", t("n"), "a", "backward"), add(t("a"), t("g"), "d", "backward"), dot(t("d"), W, "f", "backward"),
    ]  # fmt: skip
    found = table(graph(ops, ("h",), {"p": "f"}))
    assert found["n"] == ({"e"}, set()) and found["a"] == (set(), set()) and found["d"] == ({"g"}, {"d"})
    # Not where a product needs it earlier: then the kernel runs early, and the sum reads its result.
    early = [*ops[:2], *ops[3:5], dot(t("a"), W, "g", "backward"), *ops[5:]]
    found = table(graph(early, ("h",), {"p": "f"}))
    assert found["n"] == ({"e"}, set()) and found["a"] == (set(), {"a"}) and found["d"] == ({"a", "g"}, {"d"})


def test_what_sinks_takes_along_what_it_uses() -> None:
    """n waits for b, which waits for d: all three are one kernel."""
    ops = [
        unary("neg", X, "n"),
        dot(X, W, "h"),
        add(t("n"), t("h"), "b"),
        dot(t("h"), W, "i"),
        dot(t("i"), W, "j"),
        add(t("b"), t("j"), "d"),
    ]
    found = table(graph(ops, ("d",)))
    assert found["n"] == ({"x"}, set()) and found["b"] == ({"h"}, set()) and found["d"] == ({"j"}, {"d"})


def test_directions_do_not_fuse() -> None:
    """What backward reads of forward is written there and read again."""
    ops = [unary("exp", X, "e"), unary("neg", t("e"), "n"), add(t("g"), t("e"), "d", "backward"), unary("exp", t("d"), "f", "backward")]
    found = table(graph(ops, ("n",), {"p": "f"}))
    assert found == {"e": ({"x"}, {"e"}), "n": (set(), {"n"}), "d": ({"g", "e"}, set()), "f": (set(), {"f"})}


def test_products_and_sorts_stand_alone() -> None:
    sort = call("aten.sort.default", t("e"), out=(t("o.0"), tensor("o.1", 64, 32, dtype="int64")))
    found = table(graph([unary("exp", X, "e"), sort, unary("neg", t("o.0"), "n")], ("n",)))
    assert found == {"e": ({"x"}, {"e"}), "o": ({"e"}, {"o.0"}), "n": ({"o.0"}, {"n"})}


def test_an_op_without_a_rule_stands_alone() -> None:
    unknown = call("mine.strange.default", t("e"), out=t("o"))
    found = table(graph([unary("exp", X, "e"), unknown, unary("neg", t("o"), "n")], ("n",)))
    assert found["e"][1] == {"e"} and found["n"][0] == {"o"}


def test_constants_are_made_where_they_are_used() -> None:
    full = call("aten.full.default", [64, 32], 1.0, out=t("c"))
    g = graph([full, dot(X, W, "h"), add(t("h"), t("c"), "s")], ("s",))
    assert table(g)["c"] == (set(), set()) and table(g)["s"] == ({"h"}, {"s"})
    cost = Cost(H100, ONE, fused(g, {op.name: lookup(op) for op in g.ops}))
    assert price(full, cost=cost) == OpCost(0.0, 0.0, 0.0)
    # A product needs it in memory, and so does who called.
    assert table(graph([full, dot(t("c"), W, "h")], ("h",)))["c"] == (set(), {"c"})
    assert table(graph([full, add(X, t("c"), "s")], ("s", "c")))["c"] == (set(), {"c"})


def test_an_expanded_operand_is_read_from_cache() -> None:
    wide = call("aten.expand.default", tensor("y", 1, 32), [64, 32], out=t("z"))
    assert table(graph([wide, add(X, t("z"), "s")], ("s",)))["s"] == ({"x"}, {"s"})


def test_what_is_returned_through_a_view_is_written() -> None:
    view = call("aten.view.default", t("e"), [32, 64], out=tensor("v", 32, 64))
    ops = [unary("exp", X, "e"), view, unary("neg", tensor("v", 32, 64), "n")]
    assert table(graph(ops, ("n",)))["e"] == ({"x"}, set())
    assert table(graph(ops, ("n", "v")))["e"] == ({"x"}, {"e"})


def test_an_unused_output_is_not_written() -> None:
    norm = call("aten.native_layer_norm.default", X, [32], None, None, 1e-5, out=(t("n.0"), tensor("n.1", 64, 1), tensor("n.2", 64, 1)))
    assert table(graph([norm], ("n.0",)))["n"] == ({"x"}, {"n.0"})


@given(st.data())
def test_groups_can_run_one_after_another(data: st.DataObject) -> None:
    """On random graphs: no group needs a result that needs the group, every operand is read or made inside, fusion never adds traffic."""
    names, ops = ["x"], []
    for i in range(data.draw(st.integers(1, 14))):
        one, two = (t(data.draw(st.sampled_from(names))) for _ in range(2))
        d = "backward" if i > 8 else "forward"
        kind = data.draw(st.sampled_from(["add", "add", "mm", "view"]))
        name = f"o{i}"
        if kind == "mm":
            ops.append(dot(one, W, name, d))
        else:
            ops.append(add(one, two, name, d) if kind == "add" else unary("detach", one, name, d))
        names.append(name)
    g = graph(ops, (names[-1],))
    found = table(g)
    by_name = {op.name: op for op in ops}

    def base(x: str) -> str:
        while x in by_name and by_name[x].target == "aten.detach.default":
            x = by_name[x].args[0].name
        return x

    written = {w for _, ws in found.values() for w in ws}
    assert base(names[-1]) in {*written, "x"}
    rules = {op.name: lookup(op) for op in ops}
    group = _groups(g, rules, Storages(g, rules), by_module=False)
    read_by = {(group[n], base(r)) for n, (rs, _) in found.items() for r in rs}
    for op in ops:
        for x in op.inputs if op.name in group else ():
            source = base(x.name)
            inside = source in group and group[source] == group[op.name]
            assert inside != ((group[op.name], source) in read_by)
            assert inside or source in {*written, "x", "w"}, "reads what nobody wrote"
    # Groups contracted to points, the graph has no cycle: take away what needs nothing until nothing is left.
    edges = {(group[base(x.name)], group[op.name]) for op in ops if op.name in group for x in op.inputs if base(x.name) in group}
    edges = {(a, b) for a, b in edges if a != b}
    left = set(group.values())
    while left:
        free = left - {b for a, b in edges if a in left}
        assert free, "a group needs what needs it"
        left -= free
    assert all(len({by_name[x].direction for x in group if group[x] == y}) == 1 for y in group.values())


def test_nothing_is_infinite() -> None:
    for name in ("cpu:4", "a100:8", "h200:2x8", "h800:8"):
        cluster = Cluster.of(name)
        cost = Cost(cluster, Mesh.of({"x": cluster.size}))
        assert all(math.isfinite(cost.collective(k, cost.mesh.names, 1e9).seconds) for k in KINDS)
