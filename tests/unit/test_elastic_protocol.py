"""The commit rule, on a model of it: all interleavings of a few ranks and steps, with a death at every point of each.

In the model a rank publishes a version, waits for its ward's copy, enters the commit, leaves it once all have entered, runs its optimizer. A copy arrives at any time after both ends
have published that version, while the sender lives. What survivors hold is given to the function that a run uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest

from autopar.elastic.protocol import Shard, partner, sources, version_to_go_on_from, ward

STEPS = 3


@dataclass(frozen=True)
class Rank:
    """at: what it did last, of version `version`. own, copies: versions that it holds of its own shard, of its ward's."""

    at: str
    version: int
    own: frozenset[int]
    copies: frozenset[int]


State = tuple[Rank, ...]
START = Rank("published", 0, frozenset({0}), frozenset())


def following(state: State, broken: str) -> Iterator[State]:
    """What one event makes of it. broken: "": the rule; else a rule that is wrong."""
    n = len(state)

    def with_rank(r: int, new: Rank) -> State:
        return (*state[:r], new, *state[r + 1 :])

    for r, x in enumerate(state):
        v = x.version
        if v in state[ward(r, n)].own and v not in x.copies:  # the ward's copy arrives
            yield with_rank(r, replace(x, copies=x.copies | {v}))
        if x.at == "published" and (v in x.copies or broken == "no wait"):
            yield with_rank(r, replace(x, at="entered"))
        if x.at == "entered" and (
            broken == "no meeting" or all(y.version > v or (y.version == v and y.at in ("entered", "left")) for y in state)
        ):
            yield with_rank(r, replace(x, at="left"))
        if x.at == "left" and v < STEPS:
            own = frozenset() if broken == "one version" else frozenset(w for w in x.own if w >= v)
            yield with_rank(r, Rank("published", v + 1, own | {v + 1}, frozenset(w for w in x.copies if w >= v)))


@cache
def reachable(n: int, broken: str = "") -> frozenset[State]:
    start = (START,) * n
    found, todo = {start}, [start]
    while todo:
        for s in following(todo.pop(), broken):
            if s not in found:
                found.add(s)
                todo.append(s)
    return frozenset(found)


def held(state: State, r: int) -> set[Shard]:
    n, x = len(state), state[r]
    return {Shard(v, 0, n, r) for v in x.own} | {Shard(v, 0, n, ward(r, n)) for v in x.copies}


def committed(state: State) -> int:
    """The last version that anybody has left the commit of; -1 before the first."""
    return max((x.version if x.at == "left" else x.version - 1) for x in state)


def survives(state: State, dead: set[int]) -> bool:
    """Whether survivors go on from a version that nobody is further than by more than what it does again, and that each has its own shard of."""
    alive = [r for r in range(len(state)) if r not in dead]
    chosen = version_to_go_on_from([held(state, r) for r in alive])
    if committed(state) < 0:
        return True  # the first version is not yet whole anywhere: a session that cannot begin
    return chosen is not None and chosen[0] >= committed(state) and all(chosen[0] in state[r].own for r in alive)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_any_one_may_die_at_any_time(n: int) -> None:
    states = reachable(n)
    assert len(states) > {2: 40, 3: 200, 4: 800}[n] and max(x.version for s in states for x in s) == STEPS
    bad = [(s, r) for s in states for r in range(n) if not survives(s, {r})]
    assert not bad, bad[0]


def test_two_that_are_not_neighbours_may_die_at_once() -> None:
    states = reachable(4)
    bad = [(s, dead) for s in states for dead in ({0, 2}, {1, 3}) if not survives(s, dead)]
    assert not bad, bad[0]


def test_neighbours_may_not() -> None:
    assert any(not survives(s, {1, 2}) for s in reachable(4))


@pytest.mark.parametrize("broken", ["no wait", "no meeting", "one version"])
def test_each_part_of_the_rule_is_needed(broken: str) -> None:
    """Without it the model finds a death that is not survived."""
    assert any(not survives(s, {r}) for s in reachable(3, broken) for r in range(3))


def test_versions_alive() -> None:
    """Three at most: the committed one, and one on either side."""
    for s in reachable(3):
        c = committed(s)
        assert {v for x in s for v in (*x.own, *x.copies)} <= {c - 1, c, c + 1}


# ---- a loss while one is recovered from --------------------------------------------------------------------------


def recoveries(state: State, dead: int) -> Iterator[tuple[list[set[Shard]], bool]]:
    """What the survivors hold at every point of a recovery, and whether any has let the old layout's shards go."""
    n = len(state)
    alive = [r for r in range(n) if r != dead]
    chosen = version_to_go_on_from([held(state, r) for r in alive])
    assert chosen is not None
    m, v = len(alive), chosen[0]
    start = ("moving",) * m, (False,) * m  # what each did last; whether its ward's new copy is here
    found, todo = {start}, [start]
    while todo:
        at, here = todo.pop()
        holds = []
        for i, r in enumerate(alive):
            mine = set() if at[i] == "done" else held(state, r)
            mine |= {Shard(v, 1, m, i)} if at[i] != "moving" else set()
            mine |= {Shard(v, 1, m, ward(i, m))} if here[i] else set()
            holds.append(mine)
        yield holds, "done" in at
        after = []
        for i in range(m):
            moved = (*at[:i], "", *at[i + 1 :])
            # The new shard needs pieces of the old ones, which all others still have then.
            if at[i] == "moving":
                after.append((tuple(x or "published" for x in moved), here))
            if at[i] != "moving" and at[ward(i, m)] != "moving" and not here[i]:
                after.append((at, (*here[:i], True, *here[i + 1 :])))
            if at[i] == "published" and here[i]:
                after.append((tuple(x or "entered" for x in moved), here))
            if at[i] == "entered" and all(x in ("entered", "done") for x in at):
                after.append((tuple(x or "done" for x in moved), here))
        for s in after:
            if s not in found:
                found.add(s)
                todo.append(s)


def test_another_may_die_in_the_recovery() -> None:
    """The one across at any point, any once somebody has let the old shards go: from the version of the first recovery, or, where a copy of that never came, from the one
    before, which is no older than what anybody had committed."""
    states = [s for s in reachable(4) if committed(s) >= 0]
    kinds = {(tuple(sorted(map(len, (x.own | x.copies for x in s)))), tuple(x.at for x in s)): s for s in states}
    assert len(kinds) > 20
    for state in kinds.values():
        for dead in range(4):
            alive = [r for r in range(4) if r != dead]
            first = version_to_go_on_from([held(state, r) for r in alive])
            assert first is not None
            for holds, dropped in recoveries(state, dead):
                for i, second in enumerate(alive):
                    chosen = version_to_go_on_from([h for j, h in enumerate(holds) if j != i])
                    if dropped or second == (dead + 2) % 4:
                        assert chosen is not None and chosen[0] >= (first[0] if dropped else committed(state)), (state, dead, second, holds)


# ---- who gives what ----------------------------------------------------------------------------------------------


def test_partners_are_each_others() -> None:
    for n, stride in itertools.product(range(2, 9), (1, 2, 4)):
        assert all(ward(partner(r, n, stride), n, stride) == r for r in range(n))
        assert stride % n == 0 or all(partner(r, n, stride) != r for r in range(n))


def test_a_node_can_be_lost() -> None:
    """Partners a node away: ranks of one node have no copies of each other."""
    assert all(partner(r, 8, 4) // 4 != r // 4 for r in range(8))


def test_owners_give_before_partners_and_nobody_sends_what_is_there() -> None:
    n, dead = 4, 2
    alive = [0, 1, 3]
    holds = [{Shard(5, 0, n, r), Shard(5, 0, n, ward(r, n))} for r in alive]
    mine = [Shard(5, 0, n, r) for r in alive]
    source = sources((5, 0, n), holds, list(mine))
    assert source[dead] == [2, 2, 2]  # the partner of rank 2, rank 3, which is now 2
    assert source[0] == [0, 1, 0]  # rank 1 has a copy itself
    assert source[3] == [0, 2, 2]  # rank 0 kept rank 3's


def test_nothing_whole() -> None:
    assert version_to_go_on_from([[Shard(3, 0, 2, 0)], []]) is None
    assert version_to_go_on_from([[Shard(3, 0, 2, 0), Shard(2, 0, 2, 0)], [Shard(2, 0, 2, 1)]]) == (2, 0, 2)
