"""Groups of several sizes: the best combination against all combinations, coverage against all sums."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from autopar.elastic.plans.combine import best, even, fillable, frobenius
from autopar.errors import AutoparError


def fillings(sizes, units):
    """All multisets of sizes with a sum of at most `units`."""
    for n in range(units // min(sizes) + 1):
        for ks in itertools.combinations_with_replacement(sizes, n):
            if sum(ks) <= units:
                yield ks


def dealings(n, batch):
    """All ways to deal `batch` parts to n groups, at least one each."""
    for cuts in itertools.combinations(range(1, batch), n - 1):
        yield [b - a for a, b in zip((0, *cuts), (*cuts, batch), strict=True)]


def by_hand(speeds, places, batch, sync):
    found = math.inf
    for each in itertools.product(*[list(fillings(sorted(speeds), u)) for u in places]):
        ks = [k for place in each for k in place]
        if not ks or len(ks) > batch:
            continue
        took = min(max(speeds[k](x) for k, x in zip(ks, xs, strict=True)) for xs in dealings(len(ks), batch))
        found = min(found, took + sync(len(ks), min(ks)))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_the_best_combination_is_that_of_all_of_them(seed):
    r = random.Random(seed)
    sizes = r.sample(range(1, 6), r.randint(1, 3))
    places = [r.randint(0, 5) for _ in range(r.randint(1, 2))] if seed % 2 else [r.randint(1, 8)]
    batch = r.randint(1, 7)
    tables = {
        k: list(itertools.accumulate([r.choice([0.0, r.random(), 1.0 / k]) for _ in range(batch)], initial=r.random()))[1:] for k in sizes
    }
    speeds = {k: lambda x, k=k: tables[k][x - 1] for k in sizes}
    weight = r.choice([0.0, 0.1, 1.0])

    def sync(n, small):
        return weight * (n - 1) / n / small

    got, want = best(speeds, places, batch, sync), by_hand(speeds, places, batch, sync)
    if got is None:
        assert math.isinf(want)
        return
    assert got.step_s == pytest.approx(want, rel=1e-12)
    assert sum(x for _, x in got.groups) == batch and all(x > 0 for _, x in got.groups)
    assert got.seconds == max(speeds[k](x) for k, x in got.groups)
    assert got.idle == sum(places) - sum(k for k, _ in got.groups) >= 0


def test_where_idling_saves_nothing_nobody_idles():
    got = best({2: lambda x: float(x), 3: lambda x: float(x)}, [7], 3, lambda n, k: 0.0)
    assert got.idle == 0 and got.step_s == 1.0
    got = best({2: lambda x: x / 2, 3: lambda x: x / 3}, [7], 12, lambda n, k: 0.0)
    assert got.idle == 0 and got.counts == {3: 1, 2: 2}


@pytest.mark.parametrize("sizes", [(2, 3), (3, 5, 7), (4, 6, 9), (5, 6, 7, 8), (1, 4), (6, 9, 20)])
def test_the_largest_number_that_is_not_filled(sizes):
    can = fillable(sizes, 200)
    reached = {sum(c) for n in range(0, 15) for c in itertools.combinations_with_replacement(sizes, n)}
    assert all(can[n] == (n in reached) for n in range(15 * min(sizes)))
    assert frobenius(sizes) == max((n for n in range(201) if not can[n]), default=-1)
    two = sorted(sizes)[:2]
    if math.gcd(*two) == 1 and len(sizes) == 2:
        assert frobenius(sizes) == two[0] * two[1] - sum(two)  # Sylvester


def test_without_a_common_measure_of_one_there_is_no_largest():
    assert frobenius((4, 6)) is None and frobenius(()) is None


@pytest.mark.parametrize("seed", range(20))
def test_even_shares_against_all_fillings(seed):
    r = random.Random(seed)
    sizes = r.sample(range(2, 6), 2)
    units, batch = r.randint(max(sizes), 12), r.randint(1, 9)
    speeds = {k: lambda x, k=k: 0.1 + x / k for k in sizes}

    def sync(n, small):
        return 0.05 * (n - 1) / small

    got = even(speeds, [units], batch, sync)
    full = [ks for ks in fillings(sorted(sizes), units) if sum(ks) == units] or [ks for ks in fillings(sorted(sizes), units) if ks]
    want = min(max(speeds[k](-(-batch // len(ks))) for k in ks) + sync(len(ks), min(ks)) for ks in full)
    assert got.step_s == pytest.approx(want, rel=1e-12) and {x for _, x in got.groups} == {-(-batch // len(got.groups))}


def test_what_is_no_number_of_parts_is_said():
    with pytest.raises(AutoparError, match="parts of a batch"):
        best({1: lambda x: 1.0}, [1], 0, lambda n, k: 0.0)
