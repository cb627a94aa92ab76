"""Collectives: what algorithms, cards, switches and measured curves add to latency and bandwidth, by hand; and that more is never cheaper."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.links import KINDS, collective, crossings
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.hardware.parts import CollectiveCurve, Tree

GROUPED = tuple(k for k in KINDS if k not in ("slice", "send"))
NVLINK, NIC, V = 0.64 * 450e9, 0.69 * 50e9, 1e9


def h100(nodes: int, **inter: Any) -> Cluster:
    c = Cluster.of(f"h100:{nodes}x8")
    return c.model_copy(update={"inter": c.inter.model_copy(update=inter)})


def seconds(c: Cluster, sizes: dict[str, int], kind: str, parents: tuple[str, ...], nbytes: float = V) -> float:
    mesh = Mesh.of(sizes)
    return collective(c, mesh, kind, tuple(a for p in parents for a in mesh.children(p)), nbytes).seconds


def stepping(c: Cluster, near_s: float, far_s: float) -> Cluster:
    links = {"intra": c.intra.model_copy(update={"step_s": near_s}), "inter": c.inter.model_copy(update={"step_s": far_s})}
    return c.model_copy(update=links)


# ---- algorithms ----------------------------------------------------------------------------------------------------


def test_steps_by_hand() -> None:
    c = stepping(h100(4), 1e-6, 5e-6)
    near, far = {"dp": 4, "tp": 8}, ("dp",)
    # Inside a node: seven passes; across four nodes with one member on each: three.
    assert seconds(c, near, "all_gather", ("tp",)) == pytest.approx(20e-6 + 7e-6 + V / NVLINK)
    assert seconds(c, near, "all_gather", far) == pytest.approx(20e-6 + 3 * 5e-6 + V / NIC)
    # All 32 in a ring: three of 31 passes leave a node. All-to-all: 24 of 31 partners are elsewhere.
    assert seconds(c, near, "reduce_scatter", ("dp", "tp"), 0.0) == pytest.approx(20e-6 + 3 * 5e-6 + 28e-6)
    assert seconds(c, near, "all_to_all", ("dp", "tp"), 0.0) == pytest.approx(20e-6 + 24 * 5e-6 + 7e-6)


def test_little_is_reduced_by_trees_and_much_by_rings() -> None:
    c = stepping(h100(4), 1e-6, 5e-6)
    all_of_it = ("dp", "tp")
    assert seconds(c, {"dp": 4, "tp": 8}, "all_reduce", all_of_it, 0.0) == pytest.approx(20e-6 + 2 * (3 * 1e-6 + 2 * 5e-6))
    ring_s = 20e-6 + 2 * (3 * 5e-6 + 28e-6) + max(V / (8 * NIC), V * 7 / 8 / NVLINK)
    assert seconds(c, {"dp": 4, "tp": 8}, "all_reduce", all_of_it) == pytest.approx(ring_s)


def test_without_steps_rings_reduce() -> None:
    """Trees send more, so that with no cost of a step they are never better, and prices are latency and bandwidth alone."""
    assert seconds(h100(4), {"dp": 4, "tp": 8}, "all_reduce", ("dp",), 1.0) == pytest.approx(20e-6 + 1 / NIC)


# ---- cards and switches ----------------------------------------------------------------------------------------------


def test_shared_cards() -> None:
    """Four cards for eight devices: half of everything, as all of a node's devices send."""
    half = h100(4, bandwidth_Bps=25e9, nics_per_device=0.5)
    sizes = {"dp": 4, "tp": 8}
    for kind in GROUPED:
        mine, whole = (seconds(c, sizes, kind, ("dp",)) - 20e-6 for c in (half, h100(4)))
        assert mine == pytest.approx(2 * whole)


def test_send_by_hand() -> None:
    # Stages of a node each: every device sends over its card. Stages inside a node: NVLink.
    assert seconds(h100(4), {"pp": 4, "tp": 8}, "send", ("pp",)) == pytest.approx(20e-6 + V / NIC)
    assert seconds(h100(1), {"pp": 2, "tp": 4}, "send", ("pp",)) == pytest.approx(20e-6 + V / NVLINK)
    # Stages of half a node: four of eight devices send outwards, and have a card each even where there are only four.
    half = h100(2, bandwidth_Bps=25e9, nics_per_device=0.5)
    assert seconds(half, {"pp": 4, "tp": 4}, "send", ("pp",)) == pytest.approx(20e-6 + V / NIC)
    assert seconds(half, {"pp": 2, "tp": 8}, "send", ("pp",)) == pytest.approx(20e-6 + 2 * V / NIC)
    # Neighbours in a minor axis are near.
    assert seconds(h100(4), {"dp": 16, "pp": 2}, "send", ("pp",)) == pytest.approx(20e-6 + V / NVLINK)
    # Refined axes count on: the second of four stages sends to the third, over a carry.
    assert seconds(h100(2), {"dp": 2, "pp": 4, "tp": 2}, "send", ("pp",)) == pytest.approx(20e-6 + V / NVLINK)
    assert seconds(h100(2), {"pp": 4, "tp": 4}, "send", ("pp",)) == pytest.approx(20e-6 + V / NIC)


def brute_force_crossings(mesh: Mesh, axes: tuple[str, ...], leaf: int) -> tuple[int, float]:
    rings, parts = [0], [0.0]
    for here in range(-(-mesh.size // leaf)):
        inside = [[r for r in g if r // leaf == here] for g in mesh.groups(axes)]
        rings.append(sum(0 < len(i) < len(g) for i, g in zip(inside, mesh.groups(axes), strict=True)))
        pairs = sum(a != b and b // leaf != here for g, i in zip(mesh.groups(axes), inside, strict=True) for a in i for b in g)
        parts.append(pairs / (mesh.sizes_product(axes) - 1))
    return max(rings), max(parts)


@pytest.mark.parametrize("sizes", [{"a": 16}, {"a": 4, "b": 4}, {"a": 3, "b": 8}, {"a": 2, "b": 2, "c": 6}], ids=str)
@pytest.mark.parametrize("leaf", [2, 4, 6, 8, 64])
def test_what_leaves_a_leaf(sizes: dict[str, int], leaf: int) -> None:
    mesh = Mesh.of(sizes)
    for n in range(1, len(mesh.names) + 1):
        for axes in (mesh.names[:n], mesh.names[-n:]):
            assert crossings(mesh, frozenset(axes), leaf) == pytest.approx(brute_force_crossings(mesh, axes, leaf))


def test_narrow_uplinks() -> None:
    """Leaves of two nodes whose uplinks carry a quarter of what their cards bring."""
    narrow = h100(4, tree=Tree(leaf_nodes=2, oversubscription=4.0))
    sizes = {"dp": 4, "tp": 8}
    # Eight rings cross a leaf's boundary, each as wide as a card: half of what 16 cards bring, and a quarter is there.
    assert seconds(narrow, sizes, "all_gather", ("dp",)) == pytest.approx(20e-6 + 2 * V / NIC)
    # All-to-all: two of three partners of every rank are in the other leaf.
    assert seconds(narrow, sizes, "all_to_all", ("dp",)) == pytest.approx(20e-6 + V * 2 / 3 * 4 / NIC)
    # Inside a leaf uplinks are not used, and as wide as the cards they change nothing.
    assert seconds(narrow, {"dp": 2, "tp": 8}, "all_gather", ("dp",)) == pytest.approx(20e-6 + V / NIC)
    assert seconds(narrow, {"a": 2, "dp": 2, "tp": 8}, "all_gather", ("dp",)) == pytest.approx(20e-6 + V / NIC)
    even = h100(4, tree=Tree(leaf_nodes=2, oversubscription=1.0))
    for kind in GROUPED:
        assert seconds(even, sizes, kind, ("dp", "tp")) == seconds(h100(4), sizes, kind, ("dp", "tp"))


# ---- measured --------------------------------------------------------------------------------------------------------


def curve(kind: str, ranks: int, *points: tuple[float, float], nodes: int = 1) -> CollectiveCurve:
    return CollectiveCurve(kind=kind, ranks=ranks, nodes=nodes, amounts=tuple(a for a, _ in points), seconds=tuple(s for _, s in points))


def test_curves_are_the_price_of_their_kind() -> None:
    two, eight = curve("all_gather", 2, (1e3, 1e-4), (1e6, 1e-2)), curve("all_gather", 8, (1e3, 4e-4), (1e6, 4e-2))
    c = Cluster.of("cpu:16").model_copy(update={"curves": (eight, two)})
    assert seconds(c, {"x": 2}, "all_gather", ("x",), 1e6) == 1e-2
    assert seconds(c, {"x": 8}, "all_gather", ("x",), 1e6) == 4e-2
    # Between them, of the same tensor, of which one of two ranks sends 2/3 and one of eight 7/6 of what one of four does.
    line = 1e-4 + (1e6 * 2 / 3 - 1e3) * 9.9e-3 / 0.999e6, 4e-4 + (1e6 * 7 / 6 - 1e3) * 39.6e-3 / 0.999e6
    assert seconds(c, {"x": 4}, "all_gather", ("x",), 1e6) == pytest.approx(math.sqrt(line[0] * line[1]))
    assert seconds(c, {"x": 16}, "all_gather", ("x",), 1e6) == 4e-2
    slow = c.intra.model_copy(update={"step_s": 1e-3})
    assert seconds(c.model_copy(update={"intra": slow}), {"x": 16}, "all_gather", ("x",), 1e6) == pytest.approx(4e-2 + 8e-3)
    # Other kinds, and groups across nodes, are priced as before.
    plain = Cluster.of("cpu:16")
    assert seconds(c, {"x": 4}, "all_reduce", ("x",)) == seconds(plain, {"x": 4}, "all_reduce", ("x",))
    nodes = Cluster.of("cpu:4x4")
    far = nodes.model_copy(update={"curves": (two, eight)})
    assert seconds(far, {"x": 16}, "all_gather", ("x",)) == seconds(nodes, {"x": 16}, "all_gather", ("x",))
    measured = nodes.model_copy(update={"curves": (curve("all_gather", 16, (1e3, 1.0), nodes=4),)})
    assert seconds(measured, {"x": 16}, "all_gather", ("x",), 1e3) == 1.0
    assert seconds(measured, {"x": 8, "y": 2}, "all_gather", ("x",), 1e3) == seconds(nodes, {"x": 8, "y": 2}, "all_gather", ("x",), 1e3)


def test_more_ranks_may_send_the_same_bytes_sooner() -> None:
    """Of the same tensor they are never quicker; sending as much each, they have a larger tensor, and what was measured of them is their price."""
    two, four = curve("all_gather", 2, (1e3, 1e-4), (1e6, 1e-2)), curve("all_gather", 4, (1e3, 2e-4), (1e6, 0.8e-2))
    c = Cluster.of("cpu:16").model_copy(update={"curves": (two, four)})
    assert seconds(c, {"x": 4}, "all_gather", ("x",), 1e6) == 0.8e-2
    noisy = c.model_copy(update={"curves": (two, curve("all_gather", 4, (1e3, 2e-5), (1e6, 1e-3)))})
    same = seconds(noisy, {"x": 2}, "all_gather", ("x",), 0.5e6)
    assert seconds(noisy, {"x": 4}, "all_gather", ("x",), 0.75e6) == pytest.approx(same)


# ---- more is never cheaper -------------------------------------------------------------------------------------------

POINTS = st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 10)), min_size=1, max_size=5, unique_by=lambda p: p[0])


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    c = Cluster.of("h100:1x8").model_copy(update={"nodes": 64})
    tree = draw(st.none() | st.builds(Tree, leaf_nodes=st.integers(1, 8), oversubscription=st.floats(1, 8)))
    cards = draw(st.sampled_from((0.125, 0.5, 1.0, 2.0)))
    c = c.model_copy(update={"inter": c.inter.model_copy(update={"tree": tree, "nics_per_device": cards, "bandwidth_Bps": 5e10 * cards})})
    curves = []
    for kind, ranks in draw(st.sets(st.tuples(st.sampled_from(GROUPED), st.sampled_from((2, 4, 8))), max_size=4)):
        amounts, times = zip(*draw(POINTS), strict=True)
        curves.append(curve(kind, ranks, *zip(sorted(amounts), sorted(times), strict=True)))
    steps = st.floats(0, 1e-4)
    return stepping(c, draw(steps), draw(steps)).model_copy(update={"curves": tuple(curves)})


def wire(kind: str, w: int, nbytes: float) -> float:
    """What a rank of `w` sends of a tensor of `nbytes`."""
    return nbytes if kind == "send" else nbytes * (w - 1) / w * (2 if kind == "all_reduce" else 1)


@settings(deadline=None, max_examples=200)
@given(
    clusters(),
    st.sampled_from((*GROUPED, "send")),
    st.sampled_from(list(product((1, 2, 3, 8), (1, 2, 8)))),
    st.floats(0, 1e11),
    st.floats(1, 10),
)
def test_monotone_in_bytes(c: Cluster, kind: str, sizes: tuple[int, int], nbytes: float, more: float) -> None:
    mesh = Mesh.of({"a": sizes[0], "b": sizes[1]})
    for parents in (("a",), ("b",), ("a", "b")):
        axes = tuple(x for p in parents for x in mesh.children(p))
        less = collective(c, mesh, kind, axes, nbytes)
        assert less.seconds >= less.latency_s >= 0
        assert less.seconds <= collective(c, mesh, kind, axes, nbytes * more).seconds * (1 + 1e-12)


@settings(deadline=None, max_examples=200)
@given(
    clusters(),
    st.sampled_from(GROUPED),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from(((1, 2), (2, 3), (3, 6), (4, 64))),
    st.floats(0, 1e10),
)
def test_monotone_in_ranks_at_fixed_members_on_a_node(c: Cluster, kind: str, members: int, nodes: tuple[int, int], nbytes: float) -> None:
    """Of a tensor of the same size; groups of the major axis, with `members` on every node: 1 node is inside."""
    times = [
        seconds(c, {"n": n, "rest": 8 // members, "m": members}, kind, ("n", "m"), wire(kind, n * members, nbytes))
        for n in nodes
        if n > 1 or members == 1
    ]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(times))


@settings(deadline=None, max_examples=100)
@given(clusters(), st.sampled_from(GROUPED), st.floats(0, 1e10))
def test_monotone_in_ranks_inside_a_node(c: Cluster, kind: str, nbytes: float) -> None:
    times = [seconds(c, {"x": w}, kind, ("x",), wire(kind, w, nbytes)) for w in (1, 2, 3, 4, 5, 6, 8)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(times))


def test_a_reduce_scatter_that_is_an_all_reduce_inside() -> None:
    """Twice the bytes of a ring's, twice its steps; of nothing else, and not where it was measured."""
    ring = stepping(h100(4), 1e-6, 5e-6)
    whole = ring.model_copy(update={"scatters_whole": True})
    for parents in (("tp",), ("dp",), ("dp", "tp")):
        sizes = {"dp": 4, "tp": 8}
        assert seconds(whole, sizes, "reduce_scatter", parents) == seconds(ring, sizes, "all_reduce", parents, 2 * V)
        for kind in ("all_gather", "all_reduce", "all_to_all"):
            assert seconds(whole, sizes, kind, parents) == seconds(ring, sizes, kind, parents)
    curve = CollectiveCurve(kind="reduce_scatter", ranks=8, amounts=(1e3, 1e9), seconds=(1e-3, 1.0))
    measured = whole.model_copy(update={"curves": (curve,)})
    assert seconds(measured, {"tp": 8}, "reduce_scatter", ("tp",), 1e9) == 1.0
    assert Cluster.of("cpu:1x2").scatters_whole and not ring.scatters_whole
