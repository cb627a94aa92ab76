"""Ways to live with failures, replayed: against closed forms, cases that are counted by hand, and against each other. Every second is in one account."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.elastic.plans import goodput
from autopar.elastic.plans.checkpoints import best_steps, expected_s
from autopar.elastic.plans.failures import Failure, poisson
from autopar.elastic.plans.goodput import Setting, modes, simulate
from autopar.elastic.plans.policies import Checkpointed, Elastic, Mode, Policy
from autopar.elastic.plans.table import Size, Templates
from autopar.errors import AutoparError

RESULTS = Path(goodput.__file__).parents[3] / "benchmarks" / "results"


def checkpointed(
    units: int = 4, step_s: float = 1.0, every: int = 10, stalls_s: float = 2.0, restart_s: float = 5.0, spares: float = math.inf, written_s: float = 0.0
) -> Checkpointed:  # fmt: skip
    return Checkpointed("", units, Mode(step_s), every, stalls_s, written_s, restart_s, spares)


def elastic(
    of: Mapping[int, Mode], beside: int | None = 1, fills_s: float = 3.0, save_s: float = 1e9, write_s: float = 0.0, restart_s: float = 50.0, spares: float = 0
) -> Elastic:  # fmt: skip
    return Elastic("", max(of), of[max(of)].step_s, of, beside, fills_s, save_s, write_s, restart_s, spares)


def replayed(policy: Policy, failures: Sequence[Failure], end_s: float) -> Policy:
    policy.replay(failures, end_s)
    spent = policy.ledger.spent
    assert spent.total == pytest.approx(end_s, rel=1e-9), "every second is somewhere, once"
    assert all(x >= -1e-6 for x in spent.named().values()), spent
    assert policy.ledger.steps * policy.full_step_s <= spent.useful * (1 + 1e-9) + 1e-6
    return policy


def hits(*at: tuple[float, int], repair_s: float = math.inf) -> list[Failure]:
    return [Failure(t, unit, repair_s) for t, unit in at]


def goodputs(made: Callable[[], Policy], drawn: Callable[[int], Sequence[Failure]], end_s: float, seeds: int = 40) -> tuple[float, float]:
    """Mean and its standard error over seeds."""
    found = [replayed(made(), drawn(seed), end_s).ledger.spent.useful / end_s for seed in range(seeds)]
    return statistics.mean(found), statistics.stdev(found) / math.sqrt(seeds)


# ---- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "stalls_s", "restart_s", "mtbf_s"), [(20, 3.0, 10.0, 200.0), (5, 1.0, 0.0, 30.0), (60, 8.0, 40.0, 100.0)]
)
def test_checkpoints_are_as_dalys_model_expects(every: int, stalls_s: float, restart_s: float, mtbf_s: float) -> None:
    end_s = 1000 * mtbf_s
    mean, error = goodputs(
        lambda: checkpointed(8, 1.0, every, stalls_s, restart_s), lambda seed: poisson(8, 8 * mtbf_s, 1.0, end_s, seed), end_s
    )
    assert abs(mean - 1 / expected_s(every, stalls_s, mtbf_s, restart_s)) < 4 * error, (mean, error)
    assert error < 0.01 * mean


def test_the_best_interval_is_better_than_others() -> None:
    """On the same failures, not only by the formula."""
    mtbf_s, end_s = 300.0, 300.0 * 3000
    best = best_steps(1.0, 4.0, mtbf_s)
    drawn = poisson(8, 8 * mtbf_s, 1.0, end_s, 3)
    found = {n: replayed(checkpointed(8, 1.0, n, 4.0, 9.0), drawn, end_s).ledger.spent.useful for n in (best // 3, best, best * 3)}
    assert max(found, key=lambda n: found[n]) == best


@pytest.mark.parametrize(("recovery_s", "mtbf_s"), [(0.5, 10.0), (3.0, 5.0)])
def test_elastic_runs_lose_the_step_and_the_recovery(recovery_s: float, mtbf_s: float) -> None:
    """A step is a segment of Daly's model whose restart is the recovery. Each failure hits another unit, none comes back, and fewer are as fast."""
    end_s, step, copies = 1000 * mtbf_s, 1.0, 0.1
    of = dict.fromkeys(range(1, 2001), Mode(step, copies, 0.0, recovery_s, 0.0, replicas=10**9))

    def drawn(seed: int) -> list[Failure]:
        return [replace(f, unit=i) for i, f in enumerate(poisson(1, mtbf_s, math.inf, end_s, seed))]

    mean, error = goodputs(lambda: elastic(of), drawn, end_s, 30)
    assert abs(mean - 1 / expected_s(step, copies, mtbf_s, recovery_s)) < 4 * error, (mean, error)


def test_nothing_fails() -> None:
    p = replayed(checkpointed(every=10, stalls_s=2.0), [], 1200.0)
    assert p.ledger.spent.useful == pytest.approx(1000.0) and p.ledger.spent.writing == pytest.approx(200.0) and p.ledger.steps == 1000
    e = replayed(elastic({4: Mode(1.0, 0.25, devices=8)}), [], 1000.0)
    assert e.ledger.spent.useful == pytest.approx(800.0) and e.ledger.spent.copies == pytest.approx(200.0)
    assert e.ledger.used == pytest.approx(8 * 1000.0) and e.ledger.steps == 800


def test_no_repair_and_no_spare() -> None:
    """Checkpoints wait for ever; templates train on."""
    failed = hits((100.5, 2))
    p = replayed(checkpointed(spares=0), failed, 1000.0)
    assert p.ledger.steps == 80 and p.ledger.spent.waiting == pytest.approx(899.5), "8 cycles of 12 s, the rest is lost"
    assert p.ledger.spent.lost == pytest.approx(4.5) and p.restarts == 1 and p.undone == 4
    e = replayed(elastic({4: Mode(1.0), 3: Mode(2.0, recovery_s=0.5)}), failed, 1000.0)
    assert (
        e.ledger.steps == 100 + int(899 / 2)
        and e.ledger.spent.lost == pytest.approx(0.5)
        and e.ledger.spent.recovering == pytest.approx(0.5)
    )
    assert e.ledger.spent.slower == pytest.approx(899 / 2) and not e.restarts


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_spares_are_used_up_and_come_back() -> None:
    """Two losses on one spare: the second waits for the first unit's repair, at 110."""
    p = replayed(checkpointed(spares=1, restart_s=5.0, every=10, stalls_s=0.0), hits((10.0, 0), (50.0, 1), repair_s=100.0), 200.0)
    assert p.ledger.spent.waiting == pytest.approx(60.0) and p.ledger.spent.recovering == pytest.approx(10.0)
    assert p.ledger.spent.useful == pytest.approx(10 + 30 + 85) and p.ledger.spent.lost == pytest.approx(5.0) and p.losses == 2


def test_a_checkpoint_counts_once_it_is_whole() -> None:
    """Written beside training in 7 s: at 26 s the one of 10 s is whole (17), the one of 20 s is not (27)."""
    p = replayed(checkpointed(every=10, stalls_s=0.0, written_s=7.0, restart_s=0.0), hits((26.0, 0)), 27.0)
    assert p.ledger.steps == 11 and p.undone == 16
    q = replayed(checkpointed(every=10, stalls_s=0.0, written_s=7.0, restart_s=0.0), hits((27.0, 0)), 28.0)
    assert q.ledger.steps == 21 and q.undone == 7
    waits = replayed(checkpointed(every=10, stalls_s=2.0, restart_s=0.0), hits((11.9, 0)), 12.0)
    assert waits.ledger.steps == 0 and waits.undone == 10 and waits.ledger.spent.writing == pytest.approx(1.9)


def test_a_failure_in_a_restart_begins_it_again() -> None:
    p = replayed(checkpointed(every=100, restart_s=5.0), hits((10.0, 0), (13.0, 1)), 30.0)
    assert p.ledger.spent.recovering == pytest.approx(8.0) and p.ledger.steps == 12 and p.restarts == 1 and p.losses == 2


FOUR = {4: Mode(1.0, 0.0, 0.25, 0.5, 0.75), 3: Mode(1.5, 0.0, 0.25, 0.5, 0.75), 2: Mode(2.0, 0.0, 0.25, 0.5, 0.75)}


def test_a_unit_that_is_repaired_joins_between_two_steps() -> None:
    """Lost at 10.5, on at 11 with 3; ready at 20.5 + 3 = 23.5, the step ends at 24.5, on at 25.25 with all."""
    p = replayed(elastic(FOUR), hits((10.5, 1), repair_s=10.0), 30.25)
    assert p.ledger.steps == 10 + 9 + 5 and p.interrupted == 1
    assert p.ledger.spent.recovering == pytest.approx(0.5 + 0.75) and p.ledger.spent.lost == pytest.approx(0.5)


def test_a_spare_joins_and_two_at_once() -> None:
    """The spare is ready 3 s after the loss; both others are repaired at once, and stand the run once."""
    p = replayed(elastic(FOUR, spares=1), hits((10.5, 1), repair_s=100.0), 50.0)
    assert p.ledger.steps == 10 + 2 + int(50 - 14.75) and len(p.live) == 4
    q = replayed(elastic(FOUR), hits((10.5, 1), (20.5, 3), repair_s=100.0), 200.0)
    assert len(q.live) == 4 and q.ledger.spent.recovering == pytest.approx(2 * 0.5 + 2 * 0.75)
    r = replayed(elastic(FOUR), [Failure(10.5, 1, 100.0), Failure(20.5, 3, 90.0)], 200.0)
    assert len(r.live) == 4 and r.ledger.spent.recovering == pytest.approx(2 * 0.5 + 0.75)


def test_the_step_before_goes_too_where_its_copies_were_on_the_way() -> None:
    p = replayed(elastic(FOUR), hits((10.125, 1)), 11.0)
    assert p.ledger.steps == 9 and p.undone == 1 and p.ledger.spent.lost == pytest.approx(1.125)
    assert replayed(elastic(FOUR), hits((0.125, 1)), 1.0).undone == 0, "nothing was done yet"


@pytest.mark.parametrize(
    ("at", "restarts"),
    [
        (((10.5, 0), (10.7, 1)), 1), (((10.5, 1), (10.7, 0)), 1), (((10.5, 3), (10.5, 0)), 1),  # partners, also round the ring
        (((10.5, 0), (10.7, 2)), 0), (((10.5, 0), (11.5, 1)), 0),  # not partners; copies whole again
        (((10.5, 0), (12.5, 2), (14.5, 1)), 1), (((10.5, 0), (10.5, 1), (10.5, 2)), 1),  # more than planned for
    ],
)  # fmt: skip
def test_losses_at_once(at: tuple[tuple[float, int], ...], restarts: int) -> None:
    """Copies are with the next: 0 and 1 at once lose what 0 had, or what 3 had, or 1."""
    p = replayed(elastic(FOUR, save_s=4.0), hits(*at), 100.0)
    assert p.restarts == restarts and bool(p.undone) == bool(restarts)
    if len(at) == 3:
        assert math.isinf(p.since) and p.ledger.spent.waiting > 0, "until one is repaired: never"
    elif restarts:
        assert p.undone == 2, "the checkpoint of 8 s, of the 10 steps"


def test_partners_are_on_another_node() -> None:
    of = {8: Mode(1.0, recovery_s=0.5), 7: Mode(1.0, recovery_s=0.5), 6: Mode(1.0, recovery_s=0.5)}
    assert not replayed(elastic(of, beside=4), hits((1.5, 0), (1.6, 1)), 9.0).restarts
    assert replayed(elastic(of, beside=4), hits((1.5, 0), (1.6, 4)), 9.0).restarts


def test_groups_that_have_it_all() -> None:
    """As many losses as groups, before state is whole again, are one too many; without groups or copies one is."""
    of = {n: Mode(1.0, recovery_s=0.5, replicas=3) for n in (9, 8, 7, 6)}
    assert not replayed(elastic(of, None), hits((1.5, 0), (1.6, 1)), 9.0).restarts
    assert replayed(elastic(of, None), hits((1.5, 0), (1.6, 1), (1.7, 2)), 9.0).restarts == 1
    assert not replayed(elastic(of, None), hits((1.5, 0), (1.6, 1), (4.7, 2)), 9.0).restarts
    assert replayed(elastic({4: Mode(1.0), 3: Mode(1.0)}, None), hits((1.5, 0)), 9.0).restarts == 1


def test_too_few_wait_and_start_from_a_checkpoint() -> None:
    """Three of four at 10.5; the checkpoint of 8 s; the first back at 30.5 + 3 makes two: a restart of 50 s."""
    failed = [Failure(10.5, 0, 20.0), Failure(10.5, 1, 900.0), Failure(10.5, 2, 900.0)]
    p = replayed(elastic(FOUR, save_s=4.0), failed, 100.0)
    assert p.ledger.spent.waiting == pytest.approx(23.0) and p.ledger.spent.recovering == pytest.approx(50.0) and p.restarts == 1
    assert p.ledger.steps == 8 + int(16.5 / 2) and len(p.live) == 2


def test_a_checkpoint_that_is_being_written_is_broken_by_a_loss() -> None:
    """Of 4 s whole at 9, of 8 s at 13: too late for what goes wrong at 10.5, and after a loss there it never is."""
    at_once = replayed(elastic(FOUR, save_s=4.0, write_s=5.0), hits((10.5, 0), (10.5, 1)), 60.0)
    assert (at_once.restarts, at_once.undone) == (1, 6)
    later = replayed(elastic(FOUR, save_s=4.0, write_s=5.0), hits((10.5, 0), (14.2, 1), (14.3, 2)), 20.0)
    assert (later.restarts, later.undone) == (1, 10 + 2 - 4)


def test_who_is_back_was_never_away() -> None:
    """0 has joined again at 25.25: when 1 is lost, its copy of 0's state is not the last."""
    p = replayed(elastic(FOUR), [Failure(10.5, 0, 10.0), Failure(40.5, 1, 900.0)], 60.0)
    assert not p.restarts and p.losses == 2 and len(p.live) == 3


def test_a_place_that_is_empty_loses_nothing() -> None:
    once, again = (replayed(elastic(FOUR), hits(*at), 100.0) for at in (((10.5, 1),), ((10.5, 1), (30.2, 1))))
    assert once.ledger.steps == again.ledger.steps and again.losses == 1


@given(st.integers(0, 10**9), st.integers(0, 3), st.floats(0.5, 30.0))
@settings(deadline=None, max_examples=60)
def test_no_second_is_lost_whatever_comes(seed: int, spares: int, mtbf_s: float) -> None:
    rng = random.Random(seed)
    drawn = [replace(f, repair_s=rng.choice([0.3, 4.0, 40.0, math.inf])) for f in poisson(6, 6 * mtbf_s, 1.0, 300.0, seed)]
    of = {n: Mode(6 / n, 0.05, 0.1, rng.random(), rng.random(), rng.choice([1, 1, 3]), n) for n in (6, 5, 4, 3)}
    for policy in (
        elastic(of, 2, 1.0, 7.0, 3.0, 5.0, spares), elastic(of, None, 0.0, 7.0, 0.0, 0.0, spares),
        checkpointed(6, 0.7, 9, 1.5, 4.0, spares), checkpointed(6, 0.7, 9, 0.1, 0.0, spares, 2.0),
    ):  # fmt: skip
        replayed(policy, drawn, 300.0)
        assert policy.losses <= len(drawn) and policy.interrupted <= policy.losses and policy.restarts <= policy.losses
        times = [t for t, _ in policy.course]
        assert times == sorted(times) and times[-1] == 300.0


# ---- all together ----------------------------------------------------------------------------------------------------


def made(units: int = 16, survive: int = 4, groups: int = 1) -> Templates:
    """As plans ahead have it: fewer are slower by as much."""
    sizes = tuple(
        Size(
            n,
            8 * n,
            160.0 / n,
            shares=((n // groups, 1),) * groups,
            even_s=170.0 / n,
            even_groups=4,
            busiest_bytes=1e9 * (n < units),
            grown_bytes=1e9,
        )
        for n in range(units, units - survive - 1, -1)
    )
    return Templates("Model", "h100:16x8", "node", 64, 1, 8192, sizes, {}, {}, 1, 96e9, 25e9, 50e9, 1)


def test_all_ways_see_the_same_failures() -> None:
    drawn = poisson(16, 16 * 3600.0, 4 * 3600.0, 10 * 86400.0, 0)
    found = simulate(made(), drawn, 10.0)
    assert found == simulate(made(), drawn, 10.0), "the same again"
    assert found.failures == len(drawn) and found.mtbf_s == pytest.approx(864_000 / len(drawn)) and found.covered == 12
    by = {o.name: o for o in found.outcomes}
    assert by["ideal: nothing fails"].goodput == 1.0 and all(o.goodput < 1 for o in found.outcomes[1:])
    for o in found.outcomes:
        assert o.seconds.total == pytest.approx(864_000) and 0 <= o.in_use <= 1 and o.held <= o.goodput
        assert o.steps * found.step_s == pytest.approx(o.seconds.useful, abs=found.step_s * 1.01)
    assert by["checkpoints, always a spare"].losses == len(drawn), "no place is ever empty"
    assert by["checkpoints, always a spare"].goodput > by["checkpoints, 2 spares"].goodput
    assert (
        by["templates, 2 spares"].goodput > by["Oobleck-like, 2 spares"].goodput
        and by["templates, 2 spares"].held < by["templates, 2 spares"].goodput
    )
    assert by["templates, 2 spares"].goodput > by["templates, no spares"].goodput
    often = simulate(made(), drawn, 10.0, mtbf_s=600.0)
    assert often.mtbf_s == 600.0 and often.best_s < found.best_s, "checkpoints are written by what is known"
    lines = found.text().splitlines()
    assert all(any(line.startswith(name) for line in lines) for name in by)
    assert all("course" not in o for o in json.loads(json.dumps(found.document()))["outcomes"])


def test_nothing_fails_in_any() -> None:
    found = simulate(made(), [], 1.0, Setting(save_s=100.0, spares=0))
    by = {o.name: o for o in found.outcomes}
    assert by.keys() == {
        "ideal: nothing fails", "checkpoints, always a spare", "checkpoints, no spares", "checkpoints beside training, no spares", "Oobleck-like, no spares", "templates, no spares",
    }  # fmt: skip
    copies_s = 96e9 / 128 / 50e9
    assert by["templates, no spares"].goodput == pytest.approx(10 / (10 + copies_s))
    assert by["Oobleck-like, no spares"].goodput == pytest.approx(160 / 170), "its steps are slower, and are held against the best"
    assert found.write_s == pytest.approx(96 / 16) and found.failures == 0
    assert by["checkpoints, no spares"].goodput > 0.99


def test_what_a_size_takes() -> None:
    """By hand: 96 GB on 120 devices is 0.8 GB each, 16 ms to the host and 32 ms over the link; 1 GB moves in 40 ms."""
    of = modes(made(), Setting(detect_s=1.0, regroup_s=2.0, join_s=4.0))
    assert of[15] == Mode(160 / 15, pytest.approx(0.016), pytest.approx(0.032), pytest.approx(3.088), pytest.approx(4.088), 1, 120)
    two = modes(made(groups=2), Setting(detect_s=1.0, regroup_s=2.0))
    assert (two[16].copies_s, two[16].sent_s, two[16].replicas) == (0.0, 0.0, 2), "another group has it"


def test_sizes_without_a_plan_are_not_trained_on() -> None:
    sizes = (*made().sizes[:2], replace(made().sizes[2], step_s=None), *made().sizes[3:])
    assert simulate(replace(made(), sizes=sizes), [], 1.0).covered == 15


def test_the_defaults_are_what_was_measured() -> None:
    losses = json.loads((RESULTS / "elastic.json").read_text())["losses"]
    joins = json.loads((RESULTS / "elastic_joins.json").read_text())["joins"]
    s = Setting()
    assert s.detect_s == pytest.approx(max(x["detect_s"] for x in losses), abs=1e-3)
    assert s.regroup_s == pytest.approx(max(x["group_s"] + x["state_s"] for x in losses), abs=1e-3)
    assert s.start_s == pytest.approx(max(x["start_s"] for x in joins), abs=0.05)
    assert s.join_s == pytest.approx(max(x["pause_s"] for x in joins), abs=2e-3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"days": 0.0}, "days"), ({"days": math.nan}, "days"), ({"days": 1e9}, "days"), ({"mtbf_s": 0.0}, "between failures"), ({"failures": hits((1.0, 16))}, "there is no node 16"),
        ({"failures": hits((2.0, 1), (1.0, 1))}, "after one at"), ({"failures": hits((2.0, 1), repair_s=0.0)}, "a failure at"),
    ],
)  # fmt: skip
def test_what_cannot_be(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(AutoparError, match=said):
        simulate(made(), **{"failures": [], "days": 1.0, **wrong})
    for name in ("detect_s", "storage_Bps", "save_s", "spares"):
        with pytest.raises(AutoparError, match=name):
            Setting(**{name: -1})
    with pytest.raises(AutoparError, match="storage_Bps"):
        Setting(storage_Bps=0.0)
