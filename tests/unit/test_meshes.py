"""Which mesh a plan takes where none is asked for: no worse than on any of those that are tried, by the same prices."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import pytest

import autopar
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.planner.axes import said
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.meshes import TRIED, best_of, may_be_better, others
from autopar.planner.micro_batches import AUTO
from tests.unit.test_offline import model, planned

FIRST = {"dp": 8}
FOUR, TWO = {"dp": 2, "tp": 4}, {"dp": 4, "tp": 2}


def test_others() -> None:
    assert list(others(Cluster.of("h100:1x8"))) == [FOUR, TWO]
    assert list(others(Cluster.of("a100:4x8"))) == [{"dp": 8, "tp": 4}, {"dp": 16, "tp": 2}]
    assert list(others(Cluster.of("h100:2"))) == [] == list(others(Cluster.of("h100:1x1")))


@functools.cache
def any_plan() -> Plan:
    return planned(layout="ddp")


def plan_of(mesh: Mapping[str, int], step_time_s: float, exposed_s: float = 1.0) -> Plan:
    return replace(
        any_plan(), mesh_axes=dict(mesh), predicted={"step_time_s": step_time_s, "exposed_s": exposed_s}, solver={}, recompute=frozenset()
    )


class Planner:
    """Plans by mesh and number of micro-batches; asked: of which, in order."""

    def __init__(self, of: Mapping[tuple[str, int | str], Plan | Exception]) -> None:
        self.of, self.asked = of, list[tuple[str, int | str]]()

    def __call__(self, axes: Mapping[str, int], number: int | str) -> Plan:
        self.asked.append((said(axes), number))
        found = self.of[self.asked[-1]]
        if isinstance(found, Exception):
            raise found
        return found


def test_the_best_mesh_is_planned_with_any_number_of_micro_batches() -> None:
    planner = Planner(
        {
            ("dp=8", AUTO): plan_of(FIRST, 10.0), ("dp=2 x tp=4", 1): InfeasibleError("memory", 1, ""), ("dp=4 x tp=2", 1): plan_of(TWO, 9.0),
            ("dp=4 x tp=2", AUTO): plan_of(TWO, 8.0),
        }
    )  # fmt: skip
    found = best_of(FIRST, (FOUR, TWO), planner, AUTO)
    assert found.mesh_axes == TWO and found.predicted["step_time_s"] == 8.0 and planner.asked[-1] == ("dp=4 x tp=2", AUTO)
    assert found.solver[TRIED] == "dp=8: 10.00 s; dp=2 x tp=4: does not fit; dp=4 x tp=2: 9.000 s"
    text = replace(any_plan(), solver={**any_plan().solver, TRIED: found.solver[TRIED]}).text()
    assert "meshes tried, each with a bound of its own: dp=8: 10.00 s" in text


def test_no_other_where_none_may_be_better() -> None:
    planner = Planner({("dp=8", 2): plan_of(FIRST, 10.0, 0.05)})
    assert TRIED not in best_of(FIRST, (FOUR, TWO), planner, 2).solver
    again = replace(plan_of(FIRST, 10.0, 0.0), recompute=frozenset({"mm"}))
    assert may_be_better(again)
    for used, is_worth_it in ((0.5, False), (0.99, True)):
        memory = {"peak_memory_bytes": used * 8e10, "budget_bytes": 8e10}
        assert may_be_better(replace(again, predicted={**again.predicted, **memory})) == is_worth_it
    assert may_be_better(plan_of(FIRST, 10.0, 0.2)) and not may_be_better(plan_of(FIRST, 10.0, 0.0))


def test_others_are_tried_with_the_number_that_is_best_on_the_first() -> None:
    four = {
        ("dp=8", AUTO): replace(plan_of(FIRST, 10.0), micro_batches=4),
        ("dp=2 x tp=4", 4): plan_of(FOUR, 11.0),
        ("dp=4 x tp=2", 4): plan_of(TWO, 10.0),
    }
    planner = Planner(four)
    assert best_of(FIRST, (FOUR, TWO), planner, AUTO).mesh_axes == FIRST  # a tie
    assert planner.asked == list(four)
    with pytest.raises(InfeasibleError):
        best_of(FIRST, (FOUR, TWO), Planner({("dp=8", 2): InfeasibleError("memory", 1, "")}), 2)


def test_without_time_the_first_is_the_plan() -> None:
    planner = Planner({("dp=8", AUTO): plan_of(FIRST, 10.0)})
    found = best_of(FIRST, (FOUR, TWO), planner, AUTO, lambda: 0.0)
    assert found.mesh_axes == FIRST and found.solver[TRIED].count("not tried, for want of time") == 2
    failing = Planner({("dp=8", 1): plan_of(FIRST, 10.0), **{(said(m), 1): AutoparError("no plan in time") for m in (FOUR, TWO)}})
    assert best_of(FIRST, (FOUR, TWO), failing, 1).solver[TRIED].count("no plan was found") == 2


def test_where_less_is_left_than_the_first_took_others_are_planned_by_hand() -> None:
    first = plan_of(FIRST, 10.0)
    planner = Planner({("dp=8", 1): replace(first, solver={"seconds": 30.0})})
    hand = Planner({("dp=2 x tp=4", 1): plan_of(FOUR, 8.0), ("dp=4 x tp=2", 1): plan_of(TWO, 9.0)})
    found = best_of(FIRST, (FOUR, TWO), planner, 1, lambda: 20.0, hand)
    assert found.mesh_axes == FOUR and hand.asked == [("dp=4 x tp=2", 1), ("dp=2 x tp=4", 1)] and len(planner.asked) == 1
    planner.of = {**planner.of, **hand.of}
    assert best_of(FIRST, (FOUR, TWO), planner, 1, lambda: 40.0, hand).mesh_axes == FOUR and len(hand.asked) == 2


def test_a_model_whose_gradients_take_long_is_planned_on_another_mesh() -> None:
    """Few tokens on slow links: data over some devices and tensors over others is faster than either over all."""
    where = Cluster.of("h100:1x4")
    where = where.model_copy(
        update={"intra": where.intra.model_copy(update={"bandwidth_Bps": where.intra.bandwidth_Bps / 20, "latency_s": 0.0})}
    )
    shapes = {"input_ids": (16, 128), "labels": (16, 128)}
    found = autopar.plan(model(), shapes, where, precision="bf16", options={"gap": 0.05, "seconds": 60})
    times = {mesh: parse_time(took) for mesh, took in (x.split(": ") for x in str(found.solver[TRIED]).split("; "))}
    assert said(found.mesh_axes) == "dp=2 x tp=2" and set(times) == {"dp=4", "dp=2 x tp=2"}
    assert times["dp=2 x tp=2"] == pytest.approx(found.predicted["step_time_s"], rel=1e-3) and times["dp=2 x tp=2"] < times["dp=4"]


def parse_time(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
