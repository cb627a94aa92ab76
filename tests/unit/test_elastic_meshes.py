"""The mesh that those are laid out on who are left. The first axis that is no pipeline's takes the loss."""

from __future__ import annotations

import itertools
import math

import pytest

from autopar.elastic.meshes import axes_for, ranks_of


@pytest.mark.parametrize(
    ("axes", "ranks", "found"),
    [
        ({"dp": 4, "tp": 2}, 8, {"dp": 4, "tp": 2}),
        ({"dp": 4, "tp": 2}, 7, {"dp": 7, "tp": 1}),
        ({"dp": 4, "tp": 2}, 6, {"dp": 3, "tp": 2}),
        ({"dp": 4, "tp": 2}, 10, {"dp": 5, "tp": 2}),
        ({"dp": 8}, 5, {"dp": 5}),
        ({"dp": 1, "tp": 8}, 6, {"dp": 3, "tp": 2}),
        ({"dp": 2, "cp": 4, "tp": 4}, 24, {"dp": 3, "cp": 2, "tp": 4}),
        ({"dp": 2, "cp": 4, "tp": 4}, 1, {"dp": 1, "cp": 1, "tp": 1}),
        ({"pp": 2, "dp": 4}, 6, {"pp": 2, "dp": 3}),
        ({"pp": 2, "dp": 4}, 7, {"pp": 1, "dp": 7}),
        ({"pp": 4}, 3, {"pp": 3}),
        ({"pp": 2, "dp": 2, "tp": 2}, 7, {"pp": 1, "dp": 7, "tp": 1}),
        ({"replicas": 2, "dp": 6}, 9, {"replicas": 3, "dp": 3}),
    ],
)
def test_inner_axes_stay_where_they_divide(axes: dict[str, int], ranks: int, found: dict[str, int]) -> None:
    assert axes_for(axes, ranks) == found
    assert list(axes_for(axes, ranks)) == list(axes)


def test_nobody_idles_and_what_divided_still_does() -> None:
    for ranks in range(1, 65):
        found = axes_for({"dp": 4, "cp": 4, "tp": 8}, ranks)
        assert math.prod(found.values()) == ranks
        assert 4 % found["cp"] == 0 and 8 % found["tp"] == 0


@pytest.mark.parametrize("largest", range(1, 8))
def test_the_ranks_that_a_process_may_have_are_those_that_it_has(largest: int) -> None:
    """Over all ways in which so many of all are there."""
    for ranks in range(1, largest + 1):
        found: dict[int, set[int]] = {place: set() for place in range(largest)}
        for there in itertools.combinations(range(largest), ranks):
            for rank, place in enumerate(there):
                found[place].add(rank)
        assert {place: set(ranks_of(place, largest, ranks)) for place in range(largest)} == found
