"""What moves when groups change, by hand."""

from __future__ import annotations

import pytest

from autopar.elastic.plans.moves import places, worst
from autopar.elastic.plans.templates import spread
from autopar.planner.layout import Layout

SHARDED = Layout(dp=4, zero=3)


def test_a_group_that_stays_moves_nothing():
    four = places(SHARDED, 4)
    assert worst([four, four], [four], 4) == (0.0, 0.0)


def test_one_of_four_shards_is_lost():
    # Thirds of which the three that are left hold quarters: they overlap by 1/4, 1/6 and 1/12.
    four, three = places(SHARDED, 4), places(Layout(dp=3, zero=3), 3)
    assert worst([four], [three], 1)[0] == pytest.approx(1 - 1 / 4 - 1 / 6 - 1 / 12)


def test_replicas_that_hold_all_move_nothing():
    assert worst([places(Layout(dp=4), 4)], [places(Layout(dp=3), 3)], 1)[0] == 0.0


def test_losses_are_spread_over_nodes():
    assert spread(8, 8, 0) == (8,) * 8 and spread(8, 8, 3) == (7, 7, 7, 8, 8, 8, 8, 8) and spread(2, 2, 2) == (1, 1)
