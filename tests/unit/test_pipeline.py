"""Pipelines priced: orders, their replay against hand-made timelines, closed forms against the replay, and how layers are dealt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import LayoutError
from autopar.pipeline import (
    Schedule,
    Times,
    Work,
    bubble_fraction,
    deal,
    explicit,
    in_flight,
    lower_bound_s,
    peak_by_chunk,
    peak_held,
    replay,
    stage_times,
    step_time_s,
)
from autopar.pipeline.closed import _turns


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    p, kind = draw(st.integers(1, 6)), draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    if kind != "interleaved":
        return Schedule(kind, p, draw(st.integers(1, 20)))
    group = draw(st.integers(p, 2 * p))
    left = draw(st.sampled_from([0, *range(p, group)]))
    return Schedule(kind, p, group * draw(st.integers(1, 3)) + left, draw(st.integers(2, 4)), group)


@st.composite
def priced(draw: st.DrawFn, hops: bool = True) -> tuple[Schedule, Times]:
    schedule = draw(schedules())
    seconds = st.integers(0, 30).map(lambda n: n / 8)  # dyadic: sums are exact

    def some(n: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(seconds, min_size=n, max_size=n)))

    hop_s = some(schedule.ranks) if hops else (0.0,) * schedule.ranks
    return schedule, Times(some(schedule.stages), some(schedule.stages), hop_s, draw(st.booleans()))


def words(text: str) -> tuple[Work, ...]:
    """ "F02" is the forward of chunk 0, micro-batch 2."""
    return tuple(Work(w[0], int(w[1]), int(w[2])) for w in text.split())


# Orders


def test_orders_by_hand() -> None:
    assert Schedule("gpipe", 2, 3).works(0) == words("F00 F01 F02 B00 B01 B02")
    assert Schedule("1f1b", 2, 3).works(0) == words("F00 F01 B00 F02 B01 B02")
    assert Schedule("1f1b", 2, 3).works(1) == words("F00 B00 F01 B01 F02 B02")
    assert Schedule("interleaved", 2, 4, 2).works(0) == words("F00 F01 F10 F11 F02 B10 F03 B11 F12 B00 F13 B01 B12 B13 B02 B03")
    assert Schedule("interleaved", 2, 4, 2).works(1) == words("F00 F01 F10 B10 F11 B11 F02 B00 F03 B01 F12 B12 F13 B13 B02 B03")


def test_groups_as_megatron_tabulates_them() -> None:
    """The table in the comments of Megatron-Core's interleaved schedule: two ranks, groups of three, five micro-batches, two chunks."""
    forwards = [w for w in Schedule("interleaved", 2, 5, 2, 3).works(0) if w.phase == "F"]
    assert [w.micro_batch for w in forwards] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [w.chunk for w in forwards] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


@given(schedules())
def test_every_work_once_and_forward_first(schedule: Schedule) -> None:
    everything = set(product("FB", range(schedule.chunks), range(schedule.micro_batches)))
    for rank in range(schedule.ranks):
        works = schedule.works(rank)
        assert len(works) == len(everything) and set(works) == everything
        at = {w: k for k, w in enumerate(works)}
        assert all(at[Work("F", c, i)] < at[Work("B", c, i)] for _, c, i in everything)


# Replay


def test_timelines_by_hand() -> None:
    """Two ranks, two micro-batches. Rank 0: F0 F1 B0 B1, rank 1: F0 B0 F1 B1; see the ends in the comments."""
    schedule = Schedule("1f1b", 2, 2)
    times = Times(forward_s=(1, 3), backward_s=(2, 4), hop_s=(0, 0))
    free = replay(schedule, times)  # rank 0: 1 2 10 17, rank 1: 4 8 11 15
    assert (free.total_s, free.busy_s, free.idle_s, free.p2p_s) == (17, (6, 14), (11, 3), (0, 0))
    assert free.last_backward_s == ((17,), (15,)) and free.first_forward_s == ((1,), (4,)) and free.in_flight == ((2,), (1,))
    beside = replay(schedule, replace(times, hop_s=(1, 0)))  # rank 0: 1 2 12 19, rank 1: 5 9 12 16
    assert (beside.total_s, beside.idle_s, beside.p2p_s) == (19, (13, 5), (0, 0))
    # Rank 0 sends F0, then F1 while it receives B0, and receives B1; rank 1 receives F0, then F1 while it sends B0, and sends B1.
    exposed = replay(schedule, replace(times, hop_s=(1, 0), exposed=True))  # rank 0: 1 3 12 20, rank 1: 5 9 13 17
    assert (exposed.total_s, exposed.p2p_s, exposed.idle_s) == (20, (3, 3), (11, 3))
    assert exposed.last_backward_s == ((20,), (17,))


def test_the_hop_from_the_last_rank_back_to_the_first() -> None:
    """One micro-batch a rank, two chunks: the path crosses hop 0 four times (twice each way), hop 1 (rank 1 to rank 0) twice."""
    schedule = Schedule("interleaved", 2, 2, 2)
    assert Times.even(schedule, 1, 2, 5).lags_s == (0, 5, 5, 5, 0, 5, 5, 5)
    assert Times((1, 1, 1), (1, 1, 1), (2, 3, 7)).lags_s == (0, 2, 3, 0, 3, 2)
    alone = Schedule("interleaved", 1, 1, 2)
    assert replay(alone, Times.even(alone, 1, 2, hop_s=9)).total_s == 6
    for hop_s, longer in [((100, 0), 400), ((0, 100), 200)]:
        quick = replay(schedule, Times.even(schedule, 1, 2)).total_s
        slow = replay(schedule, replace(Times.even(schedule, 1, 2), hop_s=hop_s)).total_s
        assert longer <= slow <= longer + quick


@given(priced())
def test_seconds_add_up(case: tuple[Schedule, Times]) -> None:
    schedule, times = case
    got = replay(schedule, times)
    assert all(b + x + i == got.total_s for b, x, i in zip(got.busy_s, got.p2p_s, got.idle_s, strict=True))
    assert min(got.idle_s) >= 0
    assert sum(got.busy_s) == schedule.micro_batches * sum(times.rows_s)
    if not times.exposed:
        assert max(got.last_backward_s[0]) == got.total_s  # the path ends on rank 0


@given(priced(), st.data())
def test_no_time_that_grows_makes_a_step_shorter(case: tuple[Schedule, Times], data: st.DataObject) -> None:
    schedule, times = case
    parts = [times.forward_s, times.backward_s, times.hop_s]
    which = data.draw(st.integers(0, 2))
    i = data.draw(st.integers(0, len(parts[which]) - 1))
    parts[which] = tuple(t + (k == i) for k, t in enumerate(parts[which]))
    longer = Times(parts[0], parts[1], parts[2], times.exposed)
    assert replay(schedule, longer).total_s >= replay(schedule, times).total_s
    assert lower_bound_s(schedule, longer) >= lower_bound_s(schedule, times)
    assert replay(schedule, replace(times, exposed=True)).total_s >= replay(schedule, replace(times, exposed=False)).total_s


# Closed forms


@given(schedules(), st.integers(1, 20), st.integers(1, 20))
def test_even_stages_take_what_the_formula_says(schedule: Schedule, forward_s: int, backward_s: int) -> None:
    times = Times.even(schedule, forward_s, backward_s)
    got = replay(schedule, times)
    p, m, v = schedule.ranks, schedule.micro_batches, schedule.chunks
    assert got.total_s == (m * v + p - 1) * (forward_s + backward_s)
    assert step_time_s(schedule, times) == got.total_s == lower_bound_s(schedule, times)
    assert got.bubble == pytest.approx(bubble_fraction(schedule), rel=1e-12)


@given(priced())
def test_the_bound_is_never_above_the_replay(case: tuple[Schedule, Times]) -> None:
    schedule, times = case
    exact, bound = replay(schedule, times).total_s, lower_bound_s(schedule, times)
    assert bound <= exact
    if schedule.kind == "gpipe" and not times.exposed:
        assert bound == exact
    # It is worth more than the slowest rank's work and a micro-batch's path.
    assert bound >= max(schedule.micro_batches * max(times.rank_s(r) for r in range(schedule.ranks)), sum(times.rows_s) + sum(times.lags_s))


@given(schedules())
def test_counting_forwards_by_chunk(schedule: Schedule) -> None:
    chunks = [w.chunk for w in schedule.works(0) if w.phase == "F"]
    for n in range(len(chunks) + 1):
        assert _turns(schedule, n) == [chunks[:n].count(c) for c in range(schedule.chunks)]


@given(priced())
def test_the_bound_is_what_its_docstring_says(case: tuple[Schedule, Times]) -> None:
    """The same from the written-out orders."""
    schedule, times = case
    p, s = schedule.ranks, schedule.stages
    hop_s = times.lags_s
    path_s = sum(times.rows_s) + sum(hop_s)
    bounds = [path_s]
    for rank in range(p):

        def row(work: Work, rank: int = rank) -> int:
            stage = work.chunk * p + rank
            return stage if work.phase == "F" else 2 * s - 1 - stage

        def takes(works: tuple[Work, ...]) -> float:
            return sum(times.rows_s[row(w)] + (hop_s[row(w)] if times.exposed else 0) for w in works)

        def before(work: Work) -> float:
            """The path up to what counts as the work itself: with its hop when that holds up the rank."""
            return sum(times.rows_s[: row(work)]) + sum(hop_s[: row(work) + (not times.exposed)])

        def after(work: Work) -> float:
            return path_s - before(work) - takes((work,))

        works = schedule.works(rank)
        phases = [w.phase for w in works]
        first, last = phases.index("B"), len(works) - 1 - phases[::-1].index("F")
        ends = before(works[0]) + takes(works) + after(works[-1])
        gain_1 = max(0, before(works[first]) - before(works[0]) - takes(works[:first]))
        gain_2 = max(0, after(works[last]) - after(works[-1]) - takes(works[last + 1 :]))
        bounds.append(ends + (gain_1 + gain_2 if first < last else max(gain_1, gain_2)))
    if schedule.kind == "gpipe":
        rows_s = [t + (h if times.exposed else 0) for t, h in zip(times.rows_s, hop_s, strict=True)]
        bounds.append(path_s + (schedule.micro_batches - 1) * (max(rows_s[:s]) + max(rows_s[s:])))
    assert lower_bound_s(schedule, times) == max(bounds)


def test_the_bound_is_near_where_it_is_used() -> None:
    """Even layers, an embedding, a head worth a layer or two, hops: within 5% of the replay, for all kinds."""
    for kind, p, m, v in [("1f1b", 8, 32, 1), ("1f1b", 4, 4, 1), ("gpipe", 4, 16, 1), ("interleaved", 8, 32, 4), ("interleaved", 4, 4, 2)]:
        for head, hop_s, exposed in product((1, 2), (0.0, 0.1), (False, True)):
            schedule = Schedule(kind, p, m, v)
            counts = deal(5 * p * v, p, v)
            times = Times(stage_times(counts, 1, 0.1, head), stage_times(counts, 2, 0.2, 2 * head), (hop_s,) * p, exposed)
            got = replay(schedule, times).total_s
            assert 0.95 * got <= lower_bound_s(schedule, times) <= got * (1 + 1e-12)


@given(schedules())
def test_what_is_in_flight(schedule: Schedule) -> None:
    for rank in range(schedule.ranks):
        assert peak_held(schedule, rank, [1] * schedule.chunks) == in_flight(schedule, rank)
        by_chunk = peak_by_chunk(schedule, rank)
        assert max(by_chunk) <= in_flight(schedule, rank) <= sum(by_chunk)
        if schedule.kind != "interleaved":
            assert by_chunk == (min(schedule.micro_batches, schedule.ranks - rank if schedule.kind == "1f1b" else schedule.micro_batches),)


def test_chunks_peak_at_different_times() -> None:
    """Rank 1 of two (its order is above): F02 makes it three of chunk 0, but none of chunk 1 is there then; at F10 it is two and one."""
    schedule = Schedule("interleaved", 2, 4, 2)
    assert peak_by_chunk(schedule, 1) == (3, 1)
    assert peak_held(schedule, 1, [1, 10]) == 12
    assert peak_held(schedule, 1, [10, 1]) == 30


# Orders that are wrong


@dataclass(frozen=True)
class Shifted(Schedule):
    """A schedule whose warm-up is wrong by so much."""

    shift: int = 0

    def warmup(self, rank: int) -> int:
        return min(max(super().warmup(rank) + self.shift, 0), self.micro_batches * self.chunks)


@pytest.mark.parametrize(("kind", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_another_warmup_is_worse(kind: str, chunks: int) -> None:
    """One forward more holds more; one fewer is slower, and interleaved, where the last rank has none to spare, ranks wait forever."""
    right, more, fewer = (Shifted(kind, 4, 12, chunks, shift=k) for k in (0, 1, -1))
    times = Times.even(right, 1, 2)
    assert replay(right, times) == replay(Schedule(kind, 4, 12, chunks), times)
    held = [peak_held(s, 0, [1] * chunks) for s in (fewer, right, more)]
    assert held[0] < held[1] < held[2]
    if kind == "1f1b":
        assert replay(fewer, times).total_s > replay(right, times).total_s
    else:
        with pytest.raises(LayoutError, match="wait for each other"):
            replay(fewer, times)


# What cannot be


def test_micro_batches_that_do_not_divide() -> None:
    with pytest.raises(LayoutError, match=r"leave 3 at the end.*\n.*\n.*4 or 8 micro-batches .*group=7"):
        Schedule("interleaved", 4, 7, 2)
    schedule = Schedule("interleaved", 4, 7, 2, 7)
    assert replay(schedule, Times.even(schedule, 1, 2)).total_s == (7 * 2 + 3) * 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("2f2b", 4, 8), "no pipeline schedule"), (("1f1b", 0, 8), "0 ranks"), (("gpipe", 2, 0), "0 micro_batches"), (("1f1b", 4, 8, 2), "one chunk"),
        (("gpipe", 4, 8, 1, 4), "no groups"), (("interleaved", 4, 8, 1), "two chunks"), (("interleaved", 8, 4, 2), "cannot fill"),
        (("interleaved", 4, 8, 2, 3), "group of 3"), (("interleaved", 4, 8, 2, 9), "group of 9"),
    ],
)  # fmt: skip
def test_schedules_that_cannot_be(arguments: tuple[str, int, int, int, int | None], says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        Schedule(*arguments)


def test_times_that_cannot_be() -> None:
    for forward_s, backward_s, hop_s in [((1,), (1, 1), (0,)), ((1, 1, 1), (1, 1, 1), (0, 0)), ((), (), (0,)), ((1,), (1,), ())]:
        with pytest.raises(LayoutError, match="stages with a forward"):
            Times(forward_s, backward_s, hop_s)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(LayoutError, match=r"backward_s\[1\]"):
            Times((1, 1), (1, wrong), (0, 0))
    for price in (replay, step_time_s, lower_bound_s):
        with pytest.raises(LayoutError, match="Times of 2 stages"):
            price(Schedule("1f1b", 4, 8), Times((1, 1), (1, 1), (0, 0)))


# Layers


def test_layers_that_do_not_divide_leave_the_ends_short() -> None:
    assert deal(8, 4) == (2, 2, 2, 2)
    assert deal(7, 4) == (2, 2, 2, 1)
    assert deal(6, 4) == (1, 2, 2, 1)
    assert deal(126, 16) == (7, *[8] * 14, 7)
    assert deal(126, 16, 8) == (0, *[1] * 126, 0)  # Llama 3 405B: embedding and head have stages to themselves
    assert deal(9, 2, 2) == (2, 2, 3, 2)
    assert deal(10, 2, 2, last_s=3) == (3, 3, 4, 0)  # a head worth three layers: by rank 7 and 6, and rank 1 has it alone in its last chunk


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 40))
def test_dealing_evenly(p: int, v: int, extra: int) -> None:
    layers = p * v + extra
    counts = deal(layers, p, v)
    assert sum(counts) == layers and max(counts) - min(counts) <= 1
    by_rank = [sum(counts[r::p]) for r in range(p)]
    assert max(by_rank) - min(by_rank) <= 1


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 12), st.integers(0, 12), st.lists(st.integers(0, 6), min_size=4, max_size=4))
def test_the_slowest_rank_is_as_fast_as_can_be(p: int, layers: int, first: int, last: int, most: list[int]) -> None:
    """Against all ways to deal, with the ends worth quarters of layers and limits of memory."""
    most = most[:p]

    def slowest(counts: tuple[int, ...]) -> float:
        return max(stage_times(counts, 1.0, first / 4, last / 4))

    every = [n for n in product(*(range(k + 1) for k in most)) if sum(n) == layers and all(n[1:-1])]
    if layers < p - 2 or not every:
        with pytest.raises(LayoutError):
            deal(layers, p, first_s=first / 4, last_s=last / 4, most=most)
        return
    counts = deal(layers, p, first_s=first / 4, last_s=last / 4, most=most)
    assert counts in every and slowest(counts) == min(map(slowest, every))


@given(st.integers(1, 4), st.integers(2, 3), st.integers(0, 20), st.integers(0, 16))
def test_chunks_of_a_rank_share_its_layers(p: int, v: int, extra: int, last: int) -> None:
    """The head's rank takes fewer layers, and its last chunk the fewest."""
    counts = deal(p * v + extra, p, v, last_s=last / 4)
    assert sum(counts) == p * v + extra and all(counts[1:-1])
    ends = counts[p - 1 :: p]
    assert ends[-1] == min(ends)
    assert sum(ends) <= min(sum(counts[r::p]) for r in range(p))


def test_dealing_by_hand() -> None:
    assert explicit([0, 3, 3, 2], 8, 4) == (0, 3, 3, 2)
    assert stage_times([0, 3], 2.0, 0.5, 1.5) == (0.5, 7.5)
    for counts in ([2, 2, 2], [2, 2, 2, 3], [3, 3, 3, -1]):
        with pytest.raises(LayoutError, match="does not deal 8 layers"):
            explicit(counts, 8, 4)


def test_layers_that_cannot_be_dealt() -> None:
    with pytest.raises(LayoutError, match="leave some of 8 stages empty"):
        deal(5, 4, 2)
    with pytest.raises(LayoutError, match="memory for 7 layers"):
        deal(8, 4, most=[1, 2, 2, 2])
    with pytest.raises(LayoutError, match="the tightest for 0"):
        deal(8, 4, most=[4, 0, 4, 4])
    with pytest.raises(LayoutError, match="3 limits for 4 ranks"):
        deal(8, 4, most=[8, 8, 8])
    with pytest.raises(LayoutError, match="takes time"):
        deal(8, 4, layer_s=0)
    with pytest.raises(LayoutError, match="Both start at 1"):
        deal(8, 0)
