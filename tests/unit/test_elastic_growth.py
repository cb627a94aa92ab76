"""What a supervisor makes of processes that are to join, and of agents that come back; and what such a process refuses to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.elastic import growth, program, words
from autopar.elastic.session import Session
from autopar.elastic.supervisor import Supervisor
from autopar.errors import AutoparError
from autopar.run import main


class Worker:
    """A process that ends when it is told to. said: its environment."""

    pid = 0

    def __init__(self, said: dict[str, str]) -> None:
        self.said, self.code = said, None

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9


class Run:
    """A supervisor of workers that do nothing, all of which have come to compile."""

    def __init__(self, size: int = 3, rejoin: int = 2, nodes: int = 1) -> None:
        self.lines: list[str] = []
        self.s = Supervisor(
            lambda w, said: Worker(dict(said)), size, 1, self.lines.append, nodes=nodes, rejoin=rejoin, arrive_s=0.0, node_silence_s=0.2
        )
        assert self.s._begin()
        self.beats = 0
        self.live()

    def live(self) -> None:
        self.beats += 1
        for w in [*self.s.members, *self.s.growth.coming]:
            words.write(self.s.store, words.beat(w), [self.beats, 0])

    def look(self) -> None:
        assert self.s._look()

    def lose(self, worker: int) -> int:
        """Returns who is started in its place."""
        self.s.processes[worker].kill()
        self.look()
        return max(self.s.growth.coming)

    def is_ready(self, worker: int, number: int = 0) -> None:
        words.write(self.s.store, words.ready(worker), number)

    def stand(self, number: int = 0) -> None:
        for w in self.s.members:
            words.write(self.s.store, words.between(self.s.generation, w), number)

    @property
    def asked(self) -> Any:
        return words.read(self.s.store, words.READY)


def test_a_place_is_filled_by_another_worker() -> None:
    run = Run()
    new = run.lose(1)
    said = run.s.processes[new].said
    assert new == 3 and run.s.members == [0, 2] and said[words.JOINS] == "1" and said[words.FULL] == "3"
    assert (said["RANK"], said["WORLD_SIZE"], said["LOCAL_RANK"], said[words.WORKER]) == ("0", "1", "1", "3")
    run.look()
    assert run.asked == [1, []], "members are not asked before it is ready"
    run.is_ready(new)
    run.look()
    assert run.asked == [1, [0]] and run.s.generation == 1
    words.write(run.s.store, words.between(1, 0), 0)
    run.look()
    assert run.s.generation == 1, "one of two waits"
    run.stand()
    run.look()
    assert (run.s.generation, run.s.members) == (2, [0, 3, 2]), "in its place's order"
    assert words.read(run.s.store, words.generation(2)) == [0, 3, 2] and words.read(run.s.store, words.NODES) == [0, 0, 0, 0]


def test_so_often_and_no_more() -> None:
    run = Run(rejoin=2)
    for _ in range(2):
        new = run.lose(1) if 1 in run.s.members else max(run.s.growth.coming)
        run.s.processes[new].kill()
        run.look()
    assert not run.s.growth.coming and run.s.members == [0, 2]
    assert [x for x in run.lines if "started" in x] == ["worker 3 started, to join", "worker 4 started, to join"]
    assert sum("has not joined: it ended by signal 9" in x for x in run.lines) == 2


def test_without_the_option_nobody_is_started() -> None:
    run = Run(rejoin=0)
    run.s.processes[1].kill()
    run.look()
    assert not run.s.growth.coming and words.FULL not in run.s.processes[0].said and run.asked is None


def test_one_that_does_not_fit_is_not_started_again() -> None:
    run = Run(rejoin=5)
    new = run.lose(0)
    words.write(run.s.store, words.unfit(new), "another program")
    run.s.processes[new].kill()
    run.look()
    assert not run.s.growth.coming and any(x.endswith("another program") for x in run.lines)


def test_members_that_wait_for_one_that_died_go_on() -> None:
    run = Run(rejoin=1)
    new = run.lose(1)
    run.is_ready(new)
    run.look()
    run.s.processes[new].kill()
    run.stand()
    run.look()
    assert (run.s.generation, run.s.members) == (2, [0, 2])


def test_who_was_started_together_is_let_in_together(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    first = run.lose(1)
    second = run.lose(2)
    run.is_ready(first)
    run.look()
    assert run.asked[1] == []
    monkeypatch.setattr(growth, "TOGETHER_S", -1.0)
    run.look()
    assert run.asked[1] == [0], "not for ever"
    monkeypatch.undo()
    run.is_ready(second)
    run.look()
    run.stand()
    run.look()
    assert run.s.members == [0, first, second]


def test_who_is_ready_in_another_pass_is_not_let_in() -> None:
    run = Run()
    new = run.lose(1)
    run.is_ready(new, 1)
    run.look()
    assert run.asked == [1, [1]]
    run.stand(0)
    run.look()
    assert run.s.members == [0, 2] and new in run.s.growth.coming


def test_a_node_that_comes_late_and_another_of_its_number() -> None:
    run = Run(size=2, nodes=2, rejoin=1)
    assert run.s.members == [0, 1] and run.s.places == [0, 0, 1, 1] and run.s.processes[0].said["WORLD_SIZE"] == "2"
    words.write(run.s.store, words.came(1), [2, "one"])
    words.write(run.s.store, words.agent("one"), 1)
    run.look()
    assert sorted(run.s.growth.coming) == [2, 3] and set(words.read(run.s.store, words.begin("one"))) == {"2", "3"}
    words.write(run.s.store, words.came(1), [2, "two"])
    run.look()
    assert words.read(run.s.store, words.not_let_in("two")) is None and words.read(run.s.store, words.begin("two")) is None, (
        "it waits for the first to be lost"
    )
    run.s.growth.waiting["two"] -= 100.0
    words.write(run.s.store, words.agent("one"), 2)
    run.look()
    assert words.read(run.s.store, words.not_let_in("two")) == "there is another agent of node 1"


def test_an_agent_that_nobody_waits_for_is_told() -> None:
    run = Run(size=2, rejoin=0)
    run.s.places.append(1)
    run.s.growth = growth.Growth(run.s, 0)
    words.write(run.s.store, words.came(1), [1, "late"])
    run.look()
    assert "without --rejoin" in words.read(run.s.store, words.not_let_in("late"))


def test_the_command() -> None:
    with pytest.raises(AutoparError, match="--rejoin -1"):
        main(["--nproc-per-node", "2", "--rejoin", "-1", "train.py"])


# ---- a process that is to join -----------------------------------------------------------------------------------


def test_a_program_that_would_train_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(words.JOINS, "1")
    with pytest.raises(AutoparError, match="its program compiles a model without elastic="):
        autopar.compile(nn.Linear(2, 2), {"dp": 1}, layout="fsdp", backend="aot_eager")


@pytest.mark.parametrize(("reached", "let_in"), [(7, 9), (7, 7), (7, 6), (7, 4)])
def test_the_place_in_the_data(reached: int, let_in: int) -> None:
    """Whether the members went on since it heard of them, or a loss took them back."""

    class Alone:
        passes, rehearsed, member = 1, True, None

        def data(self) -> list[tuple[int, bool]]:
            return [(0, True), (3, False)]

        def version(self) -> int:
            return reached

        def offer(self, number: int) -> None:
            assert number == 1

    class Member:
        looks = 0

        def is_let_in(self) -> bool:
            self.looks += 1
            return self.looks > 10

        def refuse_stopped(self) -> None: ...

    session: Any = Session.__new__(Session)
    session.newcomer, session.options, session.version, session.numbers = Alone(), autopar.Elastic(every=1), 0, {}
    session.newcomer.member = Member()

    def recover(broken: bool) -> None:
        session.version, session.passes, session.given = let_in, [(0, True), (3, False)], (torch.get_rng_state(), False)

    session._recover = recover
    source, kept = iter(range(3, 20)), dict[int, int]()  # a batch's number is its step's
    assert list(session._as_a_newcomer(source, kept)) == []
    following = [kept[v] if v in kept else next(source) for v in range(let_in, 15)]
    assert following == list(range(let_in, 15))


def test_the_first_line_that_differs_is_said() -> None:
    program.compare({"the model": "a\nb"}, {"the model": "a\nb", "more": ""})
    with pytest.raises(AutoparError, match="disagrees with it about the model") as e:
        program.compare({"the model": "a\nb"}, {"the model": "a\nc"})
    assert e.value.where == "the run has 'b', this process has 'c'"
