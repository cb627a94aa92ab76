"""Parts of the wide tests: each test is in one of them."""

from __future__ import annotations

import pytest

from tests.wide import Turn


def test_each_test_has_its_turn() -> None:
    names = [f"tests/a/test_b.py::test_c[{i}]" for i in range(200)]
    parts = [[n for n in names if Turn.of(f"{k}/5").has(n)] for k in range(5)]
    assert sorted(n for part in parts for n in part) == sorted(names) and all(len(p) > 20 for p in parts)
    assert all(Turn.of("0/1").has(n) for n in names)
    assert Turn.of("12/5") == Turn(2, 5)


@pytest.mark.parametrize("text", ["", "2", "2/0", "a/5", "-1/5"])
def test_what_is_no_turn_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="as 2/5"):
        Turn.of(text)
