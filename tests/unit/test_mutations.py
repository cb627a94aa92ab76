"""Errors put in on purpose, each of which a named test must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from autopar.planner.formulation.memory_rows import Rows
from autopar.solver.model import Program
from autopar.solver.problem import Row
from tests.unit.test_accumulation import test_measured as measured_is_predicted
from tests.unit.test_program import test_equals_brute_force as equals_brute_force
from tests.wide import cases, wide

Mutate = Callable[[pytest.MonkeyPatch], None]


def without(kind: str, which: Callable[[int], bool] = lambda i: True) -> Mutate:
    """The program without rows of a kind: those whose number among them is one of `which`."""

    def mutate(m: pytest.MonkeyPatch) -> None:
        true = Program.constrain

        def constrain(self: Program, said: str, lower: float, upper: float, terms: Iterable[tuple[int, float]]) -> None:
            if said != kind or not which(self.row_kind.count(kind)):
                true(self, said, lower, upper, terms)
            else:
                self.dropped = True  # type: ignore[attr-defined]

        m.setattr(Program, "constrain", constrain)

    return mutate


def reruns_read_nothing(m: pytest.MonkeyPatch) -> None:
    m.setattr(Program, "rereads", lambda self, flow, reread: [])


def no_row_at_the_turn(m: pytest.MonkeyPatch) -> None:
    """The first positions of backward, where what forward kept is all there, are left out."""
    true = Rows.rows

    def rows(self: Rows) -> tuple[Row, ...]:
        near = {op.name for op in self.program.graph.ops[self.life.turn - 12 : self.life.turn + 12]}
        return tuple(r for r in true(self) if r.name.rpartition(" ")[2] not in near)

    m.setattr(Rows, "rows", rows)


def views_are_tensors_of_their_own(m: pytest.MonkeyPatch) -> None:
    m.setattr("autopar.planner.formulation.materialized.is_view", lambda op, rule: False)


def some_blocks() -> None:
    for block in range(5):
        equals_brute_force(block)


def activations_dominate() -> None:
    measured_is_predicted(32)


CASES: list[tuple[str, Mutate, Callable[[], Any]]] = [
    ("what reruns read", reruns_read_nothing, some_blocks),
    ("a memory row", without("memory", lambda i: i == 0), some_blocks),
    ("the rows of a link", without("limit"), some_blocks),
    ("what is kept must have been there", without("keep"), some_blocks),
    ("the memory at the turn", no_row_at_the_turn, activations_dominate),
    ("views share storage", views_are_tensors_of_their_own, activations_dominate),
]


@pytest.mark.parametrize("test", cases([some_blocks, activations_dominate], [some_blocks]))
def test_nothing_is_noticed_without_them(test: Callable[[], Any]) -> None:
    test()


@pytest.mark.parametrize(
    ("mutate", "test"), [pytest.param(*c[1:], id=c[0], marks=wide if c[2] is activations_dominate else ()) for c in CASES]
)
def test_noticed(mutate: Mutate, test: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        test()
