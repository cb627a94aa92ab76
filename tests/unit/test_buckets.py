"""How many bytes are worth one collective: by the formula of a link, by brute force over sizes, and which of a row of collectives become one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost import Cost
from autopar.cost.buckets import JOINED, LATENCY, Company, Limit, joined, latencies, limit
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.hardware.parts import CollectiveCurve


def cost(name: str, axes: dict[str, int]) -> Cost:
    return Cost(Cluster.of(name), Mesh.of(axes))


def test_a_full_bucket_is_nine_alpha_by_beta() -> None:
    c = cost("cpu:1x4", {"dp": 4})
    link = c.cluster.intra
    wire = (1 / LATENCY - 1) * link.latency_s * link.bandwidth_Bps * link.efficiency
    assert limit(c, "all_gather", ("dp.0", "dp.1")).full_bytes == pytest.approx(wire * 4 / 3, rel=2e-3)
    assert limit(c, "all_reduce", ("dp.0", "dp.1")).full_bytes == pytest.approx(wire * 2 / 3, rel=2e-3)
    scatter = limit(c, "reduce_scatter", ("dp.0", "dp.1"))
    assert scatter.full_bytes == pytest.approx(wire * 2 / 3, rel=2e-3), "gloo's is an all-reduce"
    ring = Cost(c.cluster.model_copy(update={"scatters_whole": False}), c.mesh)
    assert limit(ring, "reduce_scatter", ("dp.0", "dp.1")).full_bytes == pytest.approx(wire * 4 / 3, rel=2e-3)


@pytest.mark.parametrize(("name", "axes"), [("h100:1x8", {"dp": 8}), ("h100:2x8", {"dp": 16}), ("a100:2x8", {"dp": 4, "tp": 4})])
@pytest.mark.parametrize("kind", JOINED)
def test_limits_against_the_prices_themselves(name: str, axes: dict[str, int], kind: str) -> None:
    c = cost(name, axes)
    over = tuple(a.name for a in c.mesh.axes if a.name.startswith("dp"))
    width = c.mesh.sizes_product(over)
    found = limit(c, kind, over)

    def seconds(nbytes: float) -> float:
        return c.collective(kind, over, nbytes * (width - 1) / width * (2 if kind == "all_reduce" else 1)).seconds

    assert found.alpha_s == seconds(0.0)
    for nbytes in (2.0**k for k in range(10, 34)):
        if nbytes > 1.01 * found.full_bytes:
            assert found.alpha_s <= LATENCY * seconds(nbytes)
        elif nbytes < 0.99 * found.full_bytes:
            assert found.alpha_s > LATENCY * seconds(nbytes)
        copied = c.kernel_s("cheap", "float32", 0.0, 2 * nbytes * (1 + 1 / width if kind == "all_gather" else 1), 1)
        if nbytes > 1.01 * found.alone_bytes:
            assert copied > found.alpha_s
        elif nbytes < 0.99 * found.alone_bytes:
            assert copied <= found.alpha_s


def test_measured_curves_are_asked() -> None:
    c = cost("cpu:1x4", {"dp": 4})
    curve = CollectiveCurve(kind="all_gather", ranks=4, amounts=(1e3, 1e6, 1e8), seconds=(1e-3, 2e-3, 1e-1))
    measured = Cost(c.cluster.model_copy(update={"curves": (curve,)}), c.mesh)
    found = limit(measured, "all_gather", ("dp.0", "dp.1"))
    assert found.alpha_s == 1e-3
    assert curve.at(found.full_bytes * 3 / 4) == pytest.approx(1e-2, rel=2e-3)


def test_no_latency_no_buckets() -> None:
    c = cost("cpu:1x4", {"dp": 4})
    free = Cost(c.cluster.model_copy(update={"intra": c.cluster.intra.model_copy(update={"latency_s": 0.0})}), c.mesh)
    assert joined([1.0, 1.0], limit(free, "all_gather", ("dp.0", "dp.1"))) == [[0], [1]]


def test_by_hand() -> None:
    within = Limit(full_bytes=100.0, alone_bytes=60.0, alpha_s=1.0)
    assert joined([], within) == []
    assert joined([5], within) == [[0]]
    assert joined([50, 50, 50, 50], within) == [[0, 1], [2, 3]]
    assert joined([5, 500, 5, 70, 5], within) == [[1], [3], [0, 2, 4]]  # small ones find each other past large ones
    assert joined([60, 60, 49], within) == [[0, 1, 2]]  # a rest of less than half
    assert joined([60, 60, 51], within) == [[0, 1], [2]]
    assert joined([1, 1], Limit(math.inf, 10.0, 1.0)) == [[0, 1]]


@given(st.lists(st.floats(1, 1000), max_size=30), st.floats(1, 2000), st.floats(1, 1000))
def test_every_collective_is_in_one(sizes: list[float], full: float, alone: float) -> None:
    found = joined(sizes, Limit(full, alone, 1.0))
    assert sorted(i for g in found for i in g) == list(range(len(sizes)))
    for g in found:
        assert g == sorted(g)
        total = sum(sizes[i] for i in g)
        if len(g) > 1:
            assert all(sizes[i] <= alone for i in g) and total < 1.5 * full + alone
    short = [g for g in found if all(sizes[i] <= alone for i in g) and sum(sizes[i] for i in g) < full]
    assert len(short) <= 1, "two buckets that are not full"


@given(st.lists(st.floats(1.0, 200.0), min_size=1, max_size=12))
def test_shares_of_latencies_are_as_many_as_buckets(sizes: list[float]) -> None:
    """What the program counts tensor by tensor, and `predict` by sizes, is what joining them comes to: what is alone pays its own, and takes nothing off the others."""
    within = Limit(full_bytes=600.0, alone_bytes=60.0, alpha_s=1.0)
    paid = sum(Company(n, tuple(sizes)).share(n, within) for n in sizes)
    together = sum(n for n in sizes if n <= within.alone_bytes)
    if together < within.full_bytes:
        assert paid == pytest.approx(len(joined(sizes, within)))
    assert latencies([(n, 1.0) for n in sizes], 1.0, within) == pytest.approx(paid)
    # Where another axis shards all of them, each is a half, of halves.
    halves = [Company(n, tuple(sizes)).share(n / 2, within) for n in sizes]
    assert halves == pytest.approx([Company(n / 2, tuple(m / 2 for m in sizes)).share(n / 2, within) for n in sizes])
