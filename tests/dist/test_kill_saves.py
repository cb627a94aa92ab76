"""Saves that are killed over an earlier checkpoint (`python -m tests.dist.kill_saves` does so many times)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.dist import kill_saves
from tests.wide import cases, wide

SMALL, LARGE = "256", "250000"


@pytest.mark.parametrize("flat", cases([False, True], [True]))
def test_killed_before_every_file_operation(tmp_path: Path, flat: bool) -> None:
    """First the earlier one, from one operation on the new one; the earlier one may have the format before."""
    states = kill_saves.at_every_operation(str(tmp_path), SMALL, flat)
    assert len(states) > 10 and states == sorted(states), states
    assert states[0] == 0 and states[-2:] == [1, 1], "also where what was replaced is not removed yet"


@wide
def test_killed_at_any_moment(tmp_path: Path) -> None:
    report = kill_saves.hammer(3, 2, os.path.join(str(tmp_path), "c"), LARGE, seed=1)
    assert not [what for what in report.found if "NEITHER" in what], report
    assert set(report.told) <= {"saved", "LostRankError in checkpoint save"}, report
