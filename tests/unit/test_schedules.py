"""Schedules written out: notation, what makes one, bubbles, memory; against torch's own lists where it makes them."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import LayoutError
from autopar.pipeline import Action, Lists, Schedule, Times, filled, load, parse, replay, scheduled, spans, verified
from autopar.pipeline.named import NAMES
from autopar.pipeline.schedule import KINDS


def even(lists: Lists) -> Times:
    """F = I = W, and hops that take nothing."""
    s = lists.stages
    return Times((1.0,) * s, (2.0,) * s, (0.0,) * len(lists.ranks), weight_s=(1.0,) * s)


def fits(name: str, p: int, m: int) -> bool:
    return name != "interleaved" or (m >= p and m % p == 0)


# ---- as data -----------------------------------------------------------------------------------------------------


def test_notation() -> None:
    lists = parse("0F0, 0F1,,0I0,0W0,0B1\n1F0,1B0,1F1,1B1\n")
    assert lists.ranks[0] == (Action(0, "F", 0), Action(0, "F", 1), Action(0, "I", 0), Action(0, "W", 0), Action(0, "B", 1))
    assert str(Action(2, "I", 13)) == "2I13"
    assert lists.text() == "0F0,0F1,0I0,0W0,0B1\n1F0,1B0,1F1,1B1\n"
    assert (lists.stages, lists.micro_batches, lists.where, lists.splits_backward) == (2, 2, (0, 1), True)
    verified(lists)


def test_files_of_torch_that_hold_communication() -> None:
    text = (
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,(0F2;0B0)OVERLAP_F_B,0B1,0B2,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1F1,1B1,1F2,1B2,1RESHARD\n"
    )
    assert verified(parse(text)).text() == "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"


def test_files(tmp_path: Path) -> None:
    lists = scheduled("zbv", 2, 4)
    lists.save(tmp_path / "zbv.csv")
    assert load(tmp_path / "zbv.csv") == lists
    assert scheduled(tmp_path / "zbv.csv", 2, 4) == lists == scheduled(lists, 2, 4)
    with pytest.raises(LayoutError, match="cannot be read"):
        load(tmp_path / "none.csv")


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 12))
def test_the_known_ones_run(name: str, p: int, m: int) -> None:
    """Verified, and read back as written."""
    if fits(name, p, m):
        lists = scheduled(name, p, m)
        assert lists.micro_batches == m and len(lists.ranks) == p
        assert parse(lists.text(), name=lists.name) == lists
        assert replay(lists, even(lists)).in_flight == tuple(
            tuple(Lists((tuple(a for a in actions if a.stage == s),)).in_flight(0) for s in lists.of_rank(r))
            for r, actions in enumerate(lists.ranks)
        )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0X0\n", "'0X0' is no action"), ("0F0,0B0\n0F1,0B1\n", "on ranks 0 and 1"), ("0F0,0B0,0B0\n", "does F B B"), ("0B0,0F0\n", "does B F"), ("0F0,0W0,0I0\n", "does F W I"),
        ("0F0,0B0\n1F0\n", "stage 1 does F of"), ("0F0,0F1,0B0,0B1\n1F0,1B0\n", "stage 1 does nothing of micro-batch 1"),
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", r"wait for each other forever\n.*rank 0, at the backward of micro-batch 0 on stage 0 \(0B0\), which needs stage 1's"),
    ],
)  # fmt: skip
def test_lists_that_are_no_schedule(text: str, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        verified(parse(text))


def test_what_is_no_schedule() -> None:
    for asked, says in (
        (("2f2b", 2, 4), "no pipeline schedule"),
        (("zbv", 2, 4, 1), "2 stages a rank"),
        (("interleaved", 2, 4, 0), "no number of stages"),
    ):
        with pytest.raises(LayoutError, match=says):
            scheduled(*asked)
    with pytest.raises(LayoutError, match="of 2 ranks and 4 micro-batches, the pipeline has 4 and 4"):
        scheduled(scheduled("1f1b", 2, 4), 4, 4)


def test_against_torch() -> None:
    """The same lists, but that torch's ranks may begin with a wait."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    from torch import nn
    from torch.distributed.pipelining.stage import PipelineStage

    class Stage(PipelineStage):
        def __init__(self, index: int, number: int, rank: int, ranks: int) -> None:
            self.stage_index, self.num_stages, self.group_rank, self.group_size, self.group = index, number, rank, ranks, None
            self.has_backward, self.submod = True, nn.Identity()
            self.stage_index_to_group_rank: dict[int, int] = {}

    for name, of_torch in (("zbv", "ZBVZeroBubble"), ("dualpipev", "DualPipeV")):
        for p, m in ((2, 4), (4, 8), (4, 9), (3, 5 if name == "zbv" else 7), (5, 12), (1, 2), (1, 5)):
            lists = scheduled(name, p, m)
            theirs = schedules.get_schedule_class(of_torch)([Stage(s, 2 * p, 0, p) for s in (0, 2 * p - 1)], m, loss_fn=lambda x, y: x)
            for r in range(p):
                order = [one for a in theirs.pipeline_order[r] if a is not None for one in (a.sub_actions or (a,))]
                assert [str(a) for a in order] == [str(a) for a in lists.ranks[r]]


# ---- in time, and in memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m", "rates"), [(4, 8, (0.273, 0.158, 0.059)), (8, 32, (0.179, 0.099, 0.035))])
def test_bubbles(p: int, m: int, rates: tuple[float, ...]) -> None:
    """Of stages that take the same, F = I = W, without communication; as the papers have them."""
    for name, rate in zip(("1f1b", "interleaved", "zbv"), rates, strict=True):
        lists = scheduled(name, p, m)
        assert replay(lists, even(lists)).bubble_rate == pytest.approx(rate, abs=5e-4)
    lists = scheduled("zb-h1", p, m)
    assert replay(lists, even(lists)).total_s == 3 * m + p - 1
    assert scheduled("gpipe", p, m).in_flight(0) == m
    assert [scheduled("1f1b", p, m).in_flight(r) for r in range(p)] == list(range(p, 0, -1))
    assert {lists.in_flight(r) for r in range(p)} == {p} and {scheduled("zbv", p, m).in_flight(r) for r in range(p)} == {2 * p}


@given(st.sampled_from(KINDS), st.integers(1, 5), st.integers(1, 3))
def test_a_list_takes_what_its_schedule_does(kind: str, p: int, groups: int) -> None:
    schedule = Schedule(kind, p, p * groups, 2 if kind == "interleaved" else 1)
    for exposed, hop_s in product((False, True), (0.0, 0.25)):
        times = Times.even(schedule, 1.0, 2.0, hop_s, exposed)
        assert replay(schedule.lists(), times) == replay(schedule, times)


@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 6), st.data())
def test_spans_end_when_the_replay_does(name: str, p: int, m: int, data: st.DataObject) -> None:
    """No two of a rank at a time, none before what it reads is there, and the last ends with the step."""
    if not fits(name, p, m):
        return
    lists = scheduled(name, p, m)
    some = st.integers(1, 16).map(lambda n: n / 8)
    forward, backward = (tuple(data.draw(st.lists(some, min_size=lists.stages, max_size=lists.stages))) for _ in range(2))
    times = Times(forward, backward, tuple(data.draw(st.lists(some, min_size=p, max_size=p))))
    found = spans(lists, times)
    assert max(s.end_s for s in found) == pytest.approx(replay(lists, times).total_s)
    ends = {(s.action.stage, s.action.kind in "BI", s.action.micro_batch): s.end_s for s in found if s.action.kind != "W"}
    for rank in range(p):
        mine = [s for s in found if s.rank == rank]
        assert [s.action for s in mine] == list(lists.ranks[rank])
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in pairwise(mine))
    for s in found:
        a = s.action
        if a.kind == "F" and a.stage:
            assert s.start_s >= ends[a.stage - 1, False, a.micro_batch]
        if a.kind in "BI" and a.stage + 1 < lists.stages:
            assert s.start_s >= ends[a.stage + 1, True, a.micro_batch]


seconds = st.integers(1, 16).map(lambda n: n / 8)


@given(st.integers(1, 4), st.integers(1, 6), st.booleans(), st.data())
def test_filled_is_never_worse_than_the_named_ones_in_their_memory(p: int, m: int, v: bool, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["zbv", "dualpipev"] if v else ["1f1b", "zb-h1", "gpipe"]))
    lists = scheduled(name, p, m)
    s = lists.stages
    weight_s = tuple(data.draw(st.lists(seconds, min_size=s, max_size=s)))
    input_s = tuple(data.draw(st.lists(seconds, min_size=s, max_size=s)))
    forward_s = tuple(data.draw(st.lists(seconds, min_size=s, max_size=s)))
    times = Times(forward_s, tuple(i + w for i, w in zip(input_s, weight_s, strict=True)), (0.125,) * p, weight_s=weight_s)
    most = [lists.in_flight(r) for r in range(p)]
    ours = verified(filled(times, m, lists.where, most))
    assert replay(ours, times).total_s <= replay(lists, times).total_s
    assert all(ours.in_flight(r) <= n for r, n in enumerate(most))


def test_filled_is_better_with_few_micro_batches() -> None:
    """ZB-V is made for 2p - 1 or more."""
    zbv = scheduled("zbv", 4, 4)
    ours = filled(even(zbv), 4, zbv.where, [8] * 4)
    assert replay(ours, even(zbv)).bubble_rate < 0.12 < 0.19 < replay(zbv, even(zbv)).bubble_rate
    with pytest.raises(LayoutError, match="no schedule keeps to"):
        filled(even(zbv), 4, zbv.where, [1, 8, 8, 8])
