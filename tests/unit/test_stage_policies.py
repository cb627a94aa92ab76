"""Policies of a pipeline's stages: dealt as well as by enumeration, within the memory of each rank; a plan that has them is faster than one whose stages are alike, or fits where that does not."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import autopar
from autopar.pipeline import Lists, Times, replay, scheduled
from autopar.plan import schema
from autopar.planner import stage_policies
from autopar.planner.dealing import Dealing, Dealt, Policy, hull
from tests.models import ZOO


def policies(units: int, draw: random.Random, number: int = 3) -> list[Policy]:
    """On a convex curve: what keeps more is faster."""
    found = []
    for k in range(number):
        backward = tuple(2.0 + (number - 1 - k) ** 2 * 0.3 + draw.uniform(0, 0.1) for _ in range(units))
        found.append(Policy((1.0,) * units, backward, (1.0 + 2 * k,) * units, (draw.uniform(0.1, 0.5),) * units))
    return found


def dealing(units: int, lists: Lists, budget: float, seed: int) -> Dealing:
    draw = random.Random(seed)
    hops = (0.0,) * len(lists.ranks)

    def price(dealt: Sequence[Dealt]) -> float:
        return replay(lists, Times(tuple(d.forward_s for d in dealt), tuple(d.backward_s for d in dealt), hops)).total_s

    state = [draw.uniform(0.5, 1.0) for _ in range(units)]
    return Dealing(policies(units, draw), state, lists, budget, price)


@pytest.mark.parametrize("seed", range(12))
def test_as_good_as_all_cuts(seed: int) -> None:
    """Of every cut, each rank as fast as its memory allows: no slower than the best by more than two per cent, and with one stage a rank the slowest stage that is begun with is as fast as can be."""
    draw = random.Random(seed)
    ranks, units = draw.choice([2, 3]), draw.choice([6, 7, 8])
    lists = scheduled(draw.choice(["1f1b", "interleaved"]), ranks, 2 * ranks, None)
    d = dealing(units, lists, draw.uniform(12.0, 40.0), seed)
    inner = itertools.combinations(range(1, units), lists.stages - 1)
    every = [made for cut in inner if (made := d.at((*cut, units))) is not None]
    found = d.best()
    if lists.stages == ranks:
        assert (found is None) == (not every)
    if found is None:
        return
    assert d.price(found) <= 1.02 * min(map(d.price, every))
    first = d._first()
    if lists.stages == ranks:
        assert first is not None and max(x.seconds for x in first) == pytest.approx(min(max(x.seconds for x in e) for e in every), rel=1e-6)
    assert found[-1].end == units
    for rank in range(ranks):
        assert held(d, found, rank) <= d.budget_bytes * (1 + 1e-9)


def held(d: Dealing, dealt: Sequence[Dealt], rank: int) -> float:
    """By the schedule's actions, one after the other."""
    ranges = {s: (dealt[s - 1].end if s else 0, dealt[s].end) for s in d.lists.of_rank(rank)}
    keeps, transient = {}, 0.0
    for s, (i, j) in ranges.items():
        of = [d.policies[dealt[s].first if u < i + dealt[s].light else dealt[s].rest] for u in range(i, j)]
        keeps[s] = sum(p.kept_bytes[u] for u, p in zip(range(i, j), of, strict=True))
        transient = max(transient, *(p.transient_bytes[u] for u, p in zip(range(i, j), of, strict=True)))
    now = most = 0.0
    for a in d.lists.ranks[rank]:
        now += keeps[a.stage] * {"F": 1, "B": -1, "W": -1}.get(a.kind, 0)
        most = max(most, now)
    return most + transient + sum(d.state[j] - d.state[i] for i, j in ranges.values())


def test_the_hull() -> None:
    points = [(1.0, 5.0), (2.0, 4.9), (3.0, 2.0), (4.0, 2.5), (5.0, 1.0), (3.0, 3.0)]
    assert hull(points) == [0, 2, 4]
    assert hull([]) == [] and hull([(1.0, 1.0), (2.0, 1.0)]) == [0]


def planned(**how: Any) -> autopar.Plan:
    torch.manual_seed(0)
    model, batch = ZOO["llama"].build(8).train(), ZOO["llama"].inputs(16, 64)
    more = {"micro_batches": 8, "schedule": "1f1b", "options": {"seconds": 60}, "precision": "bf16"}
    return autopar.plan(model, batch, "h100:1x4", {"pp": 4, "dp": 1}, **{**more, **how})


@functools.cache
def roomy_plan() -> autopar.Plan:
    return planned()


def test_first_stages_keep_less(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = roomy_plan()
    assert roomy.pipeline is not None and max(roomy.pipeline.peak_bytes) == roomy.predicted["peak_memory_bytes"]
    budget = 0.8 * roomy.predicted["peak_memory_bytes"]
    plan = planned(memory=budget)
    p = plan.pipeline
    assert p is not None and plan.segments and max(p.peak_bytes) <= budget
    assert "memory by rank:" in plan.text()
    assert autopar.Plan.loads(schema.dumps(plan)).pipeline == p
    monkeypatch.setattr(stage_policies.StagePolicies, "find", lambda *args: None)
    alike = planned(memory=budget)
    assert alike.pipeline is not None and max(alike.pipeline.peak_bytes) <= budget
    assert plan.predicted["step_time_s"] <= alike.predicted["step_time_s"] * (1 + 1e-9)
    # Where stages are alike, the last ranks leave more memory empty.
    assert p.peak_bytes[-1] >= alike.pipeline.peak_bytes[-1]


def test_what_no_rank_has_room_for() -> None:
    roomy = roomy_plan()
    with pytest.raises(autopar.AutoparError, match="No plan fits"):
        planned(memory=0.2 * roomy.predicted["peak_memory_bytes"])
