"""When units fail, and how often to write checkpoints: against what was published, against a minimum that is searched for, and against statistics."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.elastic.plans.checkpoints import best_s, best_steps, daly_s, expected_s, young_s
from autopar.elastic.plans.failures import Failure, most_away, poisson, read
from autopar.errors import AutoparError
from autopar.text.times import parse_time


def least(write_s: float, mtbf_s: float) -> float:
    """Where `expected_s` is least, by golden sections of the logarithm: nothing of a formula for it."""
    low, high, ratio = math.log(1e-9 * mtbf_s), math.log(10 * mtbf_s), (math.sqrt(5) - 1) / 2
    for _ in range(120):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        if expected_s(math.exp(a), write_s, mtbf_s, 60.0) <= expected_s(math.exp(b), write_s, mtbf_s, 60.0):
            high = b
        else:
            low = a
    return math.exp((low + high) / 2)


@given(st.floats(1e-3, 3e3), st.floats(100.0, 1e7))
@settings(deadline=None)
def test_the_best_interval_is_where_the_expected_time_is_least(write_s: float, mtbf_s: float) -> None:
    best = best_s(write_s, mtbf_s)
    assert best == pytest.approx(least(write_s, mtbf_s), rel=1e-3)
    here = expected_s(best, write_s, mtbf_s, 60.0)
    assert all(here <= expected_s(best * x, write_s, mtbf_s, 60.0) * (1 + 1e-12) for x in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0))
    assert 0 < best < mtbf_s and best <= young_s(write_s, mtbf_s)


@pytest.mark.parametrize(("mtbf_min", "said_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_dalys_own_examples(mtbf_min: float, said_min: float) -> None:
    """Figures 3 to 5 of his paper: dumps of five minutes."""
    assert daly_s(5 * 60, mtbf_min * 60) / 60 == pytest.approx(said_min, abs=0.05 if said_min < 10 else 0.5)


@given(st.floats(1.0, 1e4), st.floats(1.1, 1e5))
@settings(deadline=None)
def test_dalys_formula_is_near_the_best_and_youngs_is_its_first_order(write_s: float, times: float) -> None:
    mtbf_s = write_s * times
    best = best_s(write_s, mtbf_s)
    assert abs(daly_s(write_s, mtbf_s) - best) <= abs(young_s(write_s, mtbf_s) - best) + 1e-6 * best
    assert expected_s(daly_s(write_s, mtbf_s), write_s, mtbf_s, 0.0) <= expected_s(best, write_s, mtbf_s, 0.0) * 1.01
    assert young_s(1.0, 1e10) == pytest.approx(best_s(1.0, 1e10), rel=1e-4)


def test_where_failures_are_as_frequent_as_writes() -> None:
    assert daly_s(3.0, 1.0) == 1.0 and best_s(1e6, 1.0) == pytest.approx(1.0)
    assert expected_s(1.0, 1e6, 1.0, 0.0) == math.inf and best_steps(5.0, 0.0, 100.0) == 1


@given(st.floats(0.5, 100.0), st.floats(0.1, 100.0), st.floats(1e3, 1e6))
@settings(deadline=None)
def test_the_best_number_of_steps(step_s: float, write_s: float, mtbf_s: float) -> None:
    n = best_steps(step_s, write_s, mtbf_s)
    cost = [expected_s(k * step_s, write_s, mtbf_s, 0.0) for k in (max(1, n - 1), n, n + 1)]
    assert cost[1] <= min(cost) * (1 + 1e-12)


# ---- failures --------------------------------------------------------------------------------------------------------


def test_drawn_failures_have_the_rate_and_hit_every_place() -> None:
    found = poisson(100, 1000.0, 5.0, 40_000.0, seed=1)
    assert found == poisson(100, 1000.0, 5.0, 40_000.0, seed=1) != poisson(100, 1000.0, 5.0, 40_000.0, seed=2)
    assert list(found) == sorted(found, key=lambda f: f.time_s) and all(0 < f.time_s < 40_000 for f in found)
    assert abs(len(found) - 4000) < 4 * math.sqrt(4000), "as many as 100 x 40000 / 1000"
    gaps = [b.time_s - a.time_s for a, b in itertools.pairwise(found)]
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.1), "exponential"
    hits = [sum(f.unit == u for f in found) for u in range(100)]
    assert sum((h - 40) ** 2 / 40 for h in hits) < 99 + 5 * math.sqrt(2 * 99), "chi-square"


@pytest.mark.parametrize(
    ("units", "mtbf_s", "repair_s", "end_s"),
    [(4, 0.0, 1.0, 1.0), (4, -3.0, 1.0, 1.0), (4, math.inf, 1.0, 1.0), (4, math.nan, 1.0, 1.0), (4, 1.0, 0.0, 1.0), (4, 1.0, 1.0, 0.0), (0, 1.0, 1.0, 1.0), (4, 1e-3, 1.0, 1e6)],
)  # fmt: skip
def test_failures_that_cannot_be_drawn(units: int, mtbf_s: float, repair_s: float, end_s: float) -> None:
    with pytest.raises(AutoparError):
        poisson(units, mtbf_s, repair_s, end_s, 0)


def test_a_trace_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("hours,node\n0.5,3\n\n0.5,0\n2,3\n")
    assert read(file, 4, "node", 60.0) == (Failure(1800.0, 3, 60.0), Failure(1800.0, 0, 60.0), Failure(7200.0, 3, 60.0))
    file.write_text("hours,device,repair_hours\n1,7,0.5\n2,6,inf\n")
    assert read(file, 8, "device", 60.0) == (Failure(3600.0, 7, 1800.0), Failure(7200.0, 6, math.inf))


@pytest.mark.parametrize(
    ("text", "said", "where"),
    [
        ("hours,node\n1,4\n", "there is no node 4", "line 2"), ("hours,node\n1,-1\n", "there is no node -1", "line 2"), ("hours,node\n2,1\n1,0\n", "goes back", "line 3"),
        ("1,2\n", "another header", ""), ("hours,device\n1,2\n", "another header", ""), ("", "another header", ""), ("hours,node\n1,2,3\n", "no failure", "line 2"),
        ("hours,node\nnan,1\n", "no failure", "line 2"), ("hours,node\n-1,1\n", "no failure", "line 2"), ("hours,node\n1,x\n", "no failure", "line 2"),
        ("hours,node\ninf,1\n", "no failure", "line 2"), ("hours,node,repair_hours\n1,1,0\n", "no failure", "line 2"), ("hours,node,repair_hours\n1,1\n", "no failure", "line 2"),
        ("hours,node\n1," + "1" * 5000 + "\n", "", "line 2"), ('hours,node\n"1,1\n', "no failure", "line 2"),
    ],
)  # fmt: skip
def test_traces_that_are_wrong(text: str, said: str, where: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(AutoparError, match=said) as e:
        read(file, 4, "node", 60.0)
    assert where in e.value.where and e.value.fix


def test_a_trace_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hours,node\n\xff\xfe,1\n")
    for path in (tmp_path / "x", tmp_path / "none", tmp_path):
        with pytest.raises(AutoparError, match="cannot be read"):
            read(path, 4, "node", 60.0)


def test_how_many_are_away_at_once() -> None:
    hits = (
        Failure(0.0, 0, 10.0),
        Failure(1.0, 1, 10.0),
        Failure(2.0, 1, 10.0),
        Failure(11.0, 2, 10.0),
        Failure(12.0, 0, 10.0),
        Failure(99.0, 3, 1.0),
    )
    assert most_away(hits, 50.0) == 2 and most_away(hits, 0.5) == 1 and most_away((), 9.0) == 0
    assert most_away(tuple(Failure(float(i), i, math.inf) for i in range(5)), 50.0) == 5


def test_lengths_of_time() -> None:
    assert [parse_time(t) for t in ("90s", "1.5 h", "2min", "3D", "250ms", "never")] == [90.0, 5400.0, 120.0, 259_200.0, 0.25, math.inf]
    for text in ("3", "", "h", "-1h", "1e999s", "3 weeks", "nan h", "inf"):
        with pytest.raises(AutoparError, match="no length of time"):
            parse_time(text, "--mtbf")
