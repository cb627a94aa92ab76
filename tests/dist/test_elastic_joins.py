"""Processes that join a training, held against plain eager PyTorch on one device that loses and wins nobody: losses, parameters, buffers, schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.elastic import PHASES, TWICE, Death, Outcome, Task, compare, run
from tests.wide import cases, wide

LOST = Death(1, 2, "backward")
TASK = Task(rejoin=1, hold=4, steps=9, deaths=(LOST,))  # its place is worker 4's from step 5 on
WHILE_JOINING = {
    "rehearsing": Death(4, 0, "forward", 1),
    "regrouped": Death(4, 0, "regrouped", 2),
    "moved": Death(4, 5, "moved", 2),
    **{phase: Death(4, 5, phase, 2) for phase in PHASES if phase not in ("copied", "copy")},
}


def joined(task: Task, lost: set[int] | None = None, limit_s: float = 120.0) -> Outcome:
    """lost: members, other than those that the task's deaths name."""
    out = run(task, limit_s)
    compare(task, out, {d.worker for d in task.deaths} if lost is None else lost)
    return out


def test_a_lost_rank_comes_back() -> None:
    """The others' processes stay, and nothing is captured or compiled by anybody once it is let in; its new shard is all that moves."""
    out = joined(TASK)
    assert set(out.done) == {0, 2, 3, 4}
    for worker, done in out.done.items():
        r = done.recoveries[-1]
        assert (r.ranks, r.joined, r.ahead) == (4, 1, True) and 2 < r.version < 9 and done.captured == 0
        assert worker == 4 or [x.ranks for x in done.recoveries] == [3, 4]
    assert -1 in out.done[4].losses, "what it went through alone has a number of its own"


@pytest.mark.parametrize("phase", cases(WHILE_JOINING, ("moved",)))
def test_it_dies_while_it_joins(phase: str) -> None:
    """The next one that is started in its place joins."""
    death = WHILE_JOINING[phase]
    task = replace(TASK, rejoin=2, joins=2 if phase in PHASES else 1, deaths=(LOST, death))
    out = joined(task, {1} if phase == "rehearsing" else {1, 4})
    assert set(out.done) == {0, 2, 3, 5}
    assert any("worker 4 has not joined: it ended by signal 9" in x for x in out.said) == (phase == "rehearsing")
    if phase in TWICE:  # where nobody else is lost no step is done again
        assert [r.version for r in out.done[0].recoveries] == [2, 5, 6]


@pytest.mark.parametrize(("layout", "memory"), cases([("fsdp+tp", None), (None, "least"), (None, None)], ((None, "least"),)))
def test_a_lost_rank_of_two_axes_comes_back(layout: str | None, memory: str | None) -> None:
    """It takes the plans that the members have."""
    out = joined(replace(TASK, layout=layout, axes=(("tp", 2),), memory=memory))
    assert all((r := d.recoveries[-1]).ranks == 4 and r.joined == 1 and r.ahead and d.captured == 0 for d in out.done.values())


PP = replace(TASK, axes=(("pp", 2),), model="toy", silence_s=60.0)


@pytest.mark.parametrize(("layout", "lost"), cases([("fsdp", 1), ("fsdp", 0), ("fsdp", 3), (None, 2)], (("fsdp", 1),)))
def test_a_stage_comes_back(layout: str | None, lost: int) -> None:
    """Of 2 x 2 in a pipeline: three are left in one stage, and the fourth makes it two again, whose parts go straight to their stages. It has compiled what it gets."""
    out = joined(replace(PP, layout=layout, deaths=(replace(LOST, worker=lost),)), limit_s=400.0)
    for worker, done in out.done.items():
        r = done.recoveries[-1]
        assert (r.ranks, r.joined, r.ahead) == (4, 1, True) and done.captured == 0
        assert worker == 4 or [x.ranks for x in done.recoveries] == [3, 4]
        names = {n for n in done.parameters if n.startswith("layers.")}
        assert len({n.split(".")[1] for n in names}) == 1, "each has its stage alone"


@wide
@pytest.mark.parametrize("phase", ["regrouped", "moved", "forward", "stepped"])
def test_it_dies_while_it_joins_a_pipeline(phase: str) -> None:
    joined(replace(PP, rejoin=2, joins=2 if phase in PHASES else 1, deaths=(LOST, WHILE_JOINING[phase])), {1, 4}, limit_s=400.0)


@wide
def test_a_pipeline_begins_with_fewer() -> None:
    """Two stages of one device each become two of two."""
    task = replace(PP, nodes=(2, 2), rejoin=2, hold=2, steps=7, joins=2, late_s=0.5, deaths=())
    for done in joined(task, limit_s=400.0).done.values():
        assert done.recoveries[-1].joined == 2 and done.recoveries[-1].ahead and done.captured == 0


@wide
@pytest.mark.parametrize("other", ["dropout", "width", "data"])
def test_another_program_does_not_fit_the_plans(other: str) -> None:
    out = run(replace(TASK, layout=None, memory="least", axes=(("tp", 2),), others_program=other))
    assert out.code == 0 and set(out.done) == {0, 2, 3} and set(out.errors) == {4}
    assert ("InputError" if other == "data" else "DisagreementError: this process cannot join the run") in out.errors[4]


@wide
@pytest.mark.parametrize("phase", TWICE)
def test_another_dies_while_it_joins(phase: str) -> None:
    out = joined(replace(TASK, rejoin=2, survive=2, deaths=(LOST, Death(3, 5, phase, 2))))
    assert {0, 2, 4} <= set(out.done)


@wide
def test_it_stops_while_it_joins() -> None:
    out = joined(replace(TASK, rejoin=2, silence_s=2.0, deaths=(LOST, replace(WHILE_JOINING["rehearsing"], how="stopped"))), {1})
    assert any("worker 4 has not joined: it gave no sign of life for 2 s" in x for x in out.said)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        pytest.param("dropout", "about the program", id="dropout"),
        pytest.param("width", "about the model's parameters and buffers", id="width", marks=pytest.mark.wide),
        pytest.param("optimizer", "about the optimizer", id="optimizer", marks=pytest.mark.wide),
    ],
)
def test_another_program_is_refused(other: str, said: str) -> None:
    """By itself, before the others have anything to do with it; and nobody starts it again."""
    task = replace(TASK, rejoin=3, others_program=other)
    out = run(task)
    error = out.errors.pop(4)
    compare(task, out, {1})
    assert (
        f"this process cannot join the run: it disagrees with it {said}" in error and "the run has" in error and "this process has" in error
    )
    assert all([r.ranks for r in d.recoveries] == [3] for d in out.done.values())
    assert sum("started, to join" in x for x in out.said) == 1


@wide
def test_other_data_is_refused() -> None:
    """Which is seen at its first batch among the others, who do that step again without it."""
    task = replace(TASK, others_program="data")
    out = run(task)
    assert "were given different batches" in out.errors.pop(4)
    compare(task, out, {1, 4})


@wide
def test_replicas() -> None:
    joined(replace(TASK, layout="ddp"))
    joined(replace(TASK, layout="ddp", rejoin=2, deaths=(LOST, WHILE_JOINING["moved"])))


@wide
def test_copies_every_third_step() -> None:
    joined(replace(TASK, every=3))


@wide
@pytest.mark.parametrize(("passes", "hold", "step"), [(2, 5, 2), (3, 8, 2), (2, 9, 7)])
def test_later_passes_through_the_data(passes: int, hold: int, step: int) -> None:
    """The one that joins goes through the earlier ones without a step. The first is let in in the last step of a pass."""
    out = joined(replace(TASK, steps=12, passes=passes, hold=hold, deaths=(replace(LOST, step=step),)))
    assert out.done[4].recoveries[0].version == hold + 1


@wide
def test_one_place_after_another() -> None:
    """The first that joined is among those that the second gets its state from."""
    out = joined(replace(TASK, rejoin=2, steps=12, joins=2, deaths=(LOST, Death(0, 6, "forward", 2))))
    assert set(out.done) == {2, 3, 4, 5}


@wide
def test_a_node_comes_back() -> None:
    """With a new agent, in one generation with all its workers."""
    task = replace(TASK, nodes=(2, 2), survive=2, joins=2, deaths=(Death(2, 2, "stepped", how="with its node"),))
    out = joined(task, {2, 3})
    assert "node 1 has come" in out.said and [r.ranks for r in out.done[0].recoveries] == [2, 4]


@pytest.mark.parametrize(("nodes", "deaths"), cases([((1, 1), False), ((2, 2), False), ((1, 1), True)], (((1, 1), False),)))
def test_a_run_begins_with_fewer(nodes: tuple[int, int], deaths: bool) -> None:
    """And grows when the other node comes; of one process alone, which had all whole. Its larger step is there before."""
    task = Task(ranks=sum(nodes), nodes=nodes, rejoin=2, hold=2, steps=7, joins=nodes[1], late_s=0.5)
    out = joined(replace(task, deaths=(Death(1, 3, "moved", 1),)) if deaths else task)
    for done in out.done.values():
        assert done.recoveries[-1].joined == nodes[1] and done.recoveries[-1].ahead and done.captured == 0


@wide
def test_inductor_compiles_nothing_once_it_is_let_in() -> None:
    out = joined(replace(TASK, backend="inductor", silence_s=60.0), limit_s=400.0)
    assert all(d.captured == 0 and d.recoveries[-1].ahead for d in out.done.values())
