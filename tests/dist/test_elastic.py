"""Training that loses processes, held against plain eager PyTorch on one device that loses none: losses, parameters, buffers, schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.planner.layout import Layout
from tests.elastic import PHASES, TWICE, Death, Outcome, Task, compare, run
from tests.wide import cases, wide

NOW = ("stepped",)


QUICK_S = 25.0  # of a process that stops


def survived(task: Task) -> Outcome:
    if task.model != "net":  # which takes time to compile, in which a process may seem silent
        task = replace(task, silence_s=max(task.silence_s, 60.0) if task.silence_s != QUICK_S else QUICK_S)
    out = run(task, 120.0 if task.model == "net" else 400.0)
    compare(task, out, {w for d in task.deaths for w in (task.mates(d.worker)[1] if d.how == "with its node" else [d.worker])})
    return out


@pytest.mark.parametrize("phase", cases(PHASES, NOW))
def test_a_rank_is_killed(phase: str) -> None:
    """Wherever it is in its step. Of the first rank's loss nothing moves: the partner of each has what it gets more of."""
    dead = PHASES.index(phase) % 4
    out = survived(Task(deaths=(Death(dead, 3, phase),)))
    for done in out.done.values():
        (r,) = done.recoveries
        assert r.ranks == 3 and r.version in (2, 3) and (r.moved.bytes > 0) == (dead > 0)
        assert r.ahead and done.captured == 0, "something was captured or compiled after the failure"


@pytest.mark.parametrize("worker", cases(range(4), ()))
@pytest.mark.parametrize("phase", PHASES)
def test_any_rank_is_killed_anywhere(phase: str, worker: int) -> None:
    survived(Task(deaths=(Death(worker, 2, phase),)))


test_any_rank_is_killed_anywhere = wide(test_any_rank_is_killed_anywhere)


def test_a_rank_stops() -> None:
    """Its silence is noticed by the supervisor, long before the group's timeout."""
    out = survived(Task(deaths=(Death(1, 3, "backward", how="stopped"),), silence_s=2.0))
    assert "gave no sign of life for 2 s" in dict(out.lost)[1]
    assert 2.0 < out.times["redone"] - out.times["died"] < 20.0


@pytest.mark.parametrize("phase", cases(("reduced", "forward", "stepped"), ("reduced",)))
def test_replicas(phase: str) -> None:
    """Nothing is copied: whoever is left has everything."""
    out = survived(Task("ddp", deaths=(Death(0, 3, phase),)))
    assert all(d.held_bytes == 0 for d in out.done.values())


@wide
@pytest.mark.parametrize("phase", PHASES)
def test_copies_every_third_step(phase: str) -> None:
    """The steps since then are done again, with batches that were kept; lost once where there is a copy of the version, once where there is none."""
    for step in (3, 5) if phase not in ("commit", "copy") else (3,):  # which there is none of at 5
        out = survived(Task(every=3, steps=7, deaths=(Death(1, step, phase),)))
        for done in out.done.values():
            (r,) = done.recoveries
            assert r.version in (0, 3, 6) and r.version <= step + 1


@wide
def test_another_is_lost_with_copies_every_second_step() -> None:
    for phase in (*TWICE, "backward", "commit"):
        survived(Task(every=2, steps=8, survive=2, deaths=(Death(1, 4, "backward"), Death(3, 4, phase, 1))))


@pytest.mark.parametrize("phase", cases(PHASES, ("stepped",)))
def test_a_node_is_lost(phase: str) -> None:
    """With its agent and all its workers at once: what they had is on the other node."""
    task = Task(nodes=(2, 2), survive=2, deaths=(Death(2, 3, phase, how="with its node"),))
    out = run(task)
    compare(task, out, {2, 3})
    assert all("with its node" in why for _, why in out.lost)
    assert all(d.recoveries[-1].ranks == 2 and d.captured == 0 for d in out.done.values())


@wide
@pytest.mark.parametrize("worker", range(1, 5))
def test_a_worker_of_several_nodes_is_lost(worker: int) -> None:
    """Nodes of different sizes."""
    survived(Task(nodes=(1, 2, 2), ranks=5, deaths=(Death(worker, 3, "backward"),)))


def test_two_at_once() -> None:
    out = survived(Task(deaths=(Death(1, 3, "reduced"), Death(3, 3, "reduced")), survive=2))
    assert {len(d.recoveries) for d in out.done.values()} <= {1, 2}


@pytest.mark.parametrize("phase", cases(TWICE, ("moved",)))
def test_another_is_lost_in_the_recovery(phase: str) -> None:
    """Holdings of the old layout are kept until the copies of the new one are whole."""
    survived(Task(deaths=(Death(1, 3, "backward"), Death(3, 3, phase, 1)), survive=2))


@wide
def test_one_after_the_other_until_one_is_left() -> None:
    deaths = (Death(0, 1, "forward"), Death(2, 3, "commit", 1), Death(1, 4, "copy", 2))
    out = survived(Task(deaths=deaths, survive=3, steps=7))
    assert [r.ranks for r in out.done[3].recoveries] == [3, 2, 1]


def test_micro_batches() -> None:
    """Those of one size, whatever the number of ranks, are made ahead as whole batches are."""
    out = survived(Task(model="toy", micro_batches=2, steps=4, deaths=(Death(2, 2, "forward"),)))
    assert all(d.recoveries[0].ahead and d.captured == 0 for d in out.done.values())


def test_a_batch_that_does_not_divide() -> None:
    survived(Task(batch=8, deaths=(Death(2, 2, "forward"),)))


TP = (("tp", 2),)
HSDP = Layout(data=("dp", "shard"), shard=("shard",))


@pytest.mark.parametrize(
    ("layout", "axes", "memory"),
    cases([("fsdp+tp", TP, None), (None, TP, "least"), (None, (), None), ("tp", TP, None), (HSDP, (("shard", 2),), None), ("fsdp", TP, None), ("ddp", TP, None)],
          (("fsdp+tp", TP, None), (None, TP, "least"))),
)  # fmt: skip
def test_meshes_of_several_axes_and_plans(layout: str | Layout | None, axes: tuple[tuple[str, int], ...], memory: str | None) -> None:
    """Three that are left of 2 x 2 are 3 x 1, two are 1 x 2: laid out, or planned, and compiled before anybody is lost."""
    task = Task(layout, axes=axes, memory=memory, survive=2, deaths=(Death(1, 2, "backward"), Death(3, 4, "forward", 1)))
    out = survived(task)
    for done in out.done.values():
        assert [r.ranks for r in done.recoveries] == [3, 2] and all(r.ahead for r in done.recoveries) and done.captured == 0


@wide
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_of_several_axes_is_killed(phase: str) -> None:
    for worker, (layout, memory) in enumerate([("fsdp+tp", None), (None, "least"), ("fsdp+tp", None), (None, "least")]):
        survived(Task(layout, axes=TP, memory=memory, deaths=(Death(worker, 2, phase),)))


def test_more_than_was_asked_for_on_two_axes() -> None:
    """The first plan for two moves parameters in the next call, and the optimizer's state after them."""
    out = survived(Task("fsdp+tp", axes=TP, deaths=(Death(1, 2, "forward"), Death(3, 4, "forward", 1))))
    assert [r.ahead for r in out.done[0].recoveries] == [True, False]


@wide
@pytest.mark.parametrize("model", ["llama", "mixtral"])
@pytest.mark.parametrize(("layout", "axes"), [("fsdp", ()), ("fsdp+tp", TP), ("fsdp+ep", (("ep", 2),)), (None, TP)])
def test_models(model: str, layout: str | None, axes: tuple[tuple[str, int], ...]) -> None:
    """With dropout of the attention on, and auxiliary losses over the global batch."""
    if (model, layout) != ("llama", "fsdp+ep"):
        survived(Task(layout, axes=axes, model=model, steps=4, deaths=(Death(1, 2, "backward"),)))


@pytest.mark.parametrize("phase", cases(("committed", "stepped", "commit", "forward"), ("commit",)))
def test_a_plan_that_replicates_has_no_copies(phase: str) -> None:
    """Before there is a plan parameters are split. Somebody is lost where the first step's copies are given up."""
    out = survived(Task(None, model="llama", steps=3, deaths=(Death(1, 0 if phase in ("committed", "stepped") else 1, phase),)))
    assert all(d.held_bytes == 0 for d in out.done.values())


PP = (("pp", 2),)


@pytest.mark.parametrize(("phase", "model"), cases([("backward", "toy"), *((p, "llama") for p in PHASES)], (("backward", "toy"),)))
def test_a_stage_is_lost(phase: str, model: str) -> None:
    """Of 2 x 2 in a pipeline: three are left in one stage. What the lost one's stage had is with its partner, which is of another stage."""
    out = survived(Task("fsdp", axes=PP, model=model, steps=4, deaths=(Death(PHASES.index(phase) % 4, 2, phase),)))
    assert all(r.ranks == 3 and r.ahead and d.captured == 0 for d in out.done.values() for r in d.recoveries)


@wide
@pytest.mark.parametrize(
    "task",
    [
        Task("fsdp", axes=PP, ranks=2, deaths=(Death(0, 2, "forward"),)),
        Task("fsdp", axes=PP, survive=2, deaths=(Death(1, 1, "copy"), Death(3, 2, "forward", 1))),
        Task("fsdp", axes=PP, survive=2, deaths=(Death(1, 2, "backward"), Death(3, 2, "moved", 1))),
        Task(None, axes=PP, optimizer="sgd", deaths=(Death(2, 2, "stepped"),)),
        Task("fsdp+tp", axes=(*PP, ("tp", 2)), deaths=(Death(2, 2, "commit"),)),
        Task("fsdp", axes=PP, nodes=(2, 2), survive=2, deaths=(Death(2, 2, "backward", how="with its node"),)),
        Task("fsdp", axes=PP, deaths=(Death(1, 2, "backward", how="stopped"),), silence_s=QUICK_S),
    ],
    ids=["alone", "one-after-the-other", "in-recovery", "planned", "tp", "node", "stopped"],
)
def test_pipelines(task: Task) -> None:
    survived(replace(task, model="llama", steps=4))


@wide
@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_inductor_compiles_nothing_at_a_failure(layout: str) -> None:
    out = survived(Task(layout, backend="inductor", deaths=(Death(1, 3, "backward"),), silence_s=60.0))
    assert all(d.captured == 0 and d.recoveries[0].ahead for d in out.done.values())


def test_more_than_was_asked_for() -> None:
    """Goes on all the same; then a step is captured and compiled, and that is said."""
    out = survived(Task(deaths=(Death(1, 2, "forward"), Death(3, 4, "forward", 1)), survive=1))
    assert [r.ahead for r in out.done[0].recoveries] == [True, False]


def test_neighbours_at_once_are_not_survived() -> None:
    """And every survivor says so, and what to start again from."""
    out = run(Task(deaths=(Death(1, 3, "reduced"), Death(2, 3, "reduced")), survive=2, saves=2))
    assert out.code == 1 and not out.done
    assert set(out.errors) == {0, 3}
    for text in out.errors.values():
        assert "more was lost than can be survived at once: of version" in text and "nobody has the shard of rank 1 of 4" in text, text
        assert "start again, from the last checkpoint, " in text and "checkpoint of step 2" in text, text


def test_full_host_memory() -> None:
    """Every process says so, before anything is copied that has no room."""
    small, large = (run(Task(full=(2, left), steps=3)) for left in (10**4, 10**9))
    assert small.code == 1 and set(small.errors) == {0, 1, 2, 3}, (small.said, small.errors)
    assert all("host memory is full: copies of shards need" in text and "machine" in text for text in small.errors.values())
    assert large.code == 0 and set(large.done) == {0, 1, 2, 3}


def test_fewer_than_the_least() -> None:
    out = run(Task(deaths=(Death(1, 2, "forward"),), least=4))
    assert out.code == 1 and set(out.errors) == {0, 2, 3}, (out.said, out.errors)
    for text in out.errors.values():
        assert "3 of 4 processes are left, and the run needs 4; worker 1 ended by signal 9" in text, text
        assert "start again, from the last checkpoint" in text, text
