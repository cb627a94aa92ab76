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
from tests.wide import cases

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


NEW = -1  # in place of a rank: one that has just come


def old_shards(state: State, r: int) -> set[Shard]:
    return set() if r == NEW else held(state, r)


# ---- a loss while one is recovered from --------------------------------------------------------------------------


def recoveries(state: State, dead: int | None, joins: int | None = None) -> Iterator[tuple[list[set[Shard]], bool]]:
    """What all hold at every point of a recovery, and whether any has let the old layout's shards go. dead: who is lost; joins: the new rank of one that comes, who has nothing."""
    n = len(state)
    alive = [r for r in range(n) if r != dead]
    if joins is not None:
        alive.insert(joins, NEW)
    chosen = version_to_go_on_from([old_shards(state, r) for r in alive])
    assert chosen is not None
    m, v = len(alive), chosen[0]
    start = ("moving",) * m, (False,) * m  # what each did last; whether its ward's new copy is here
    found, todo = {start}, [start]
    while todo:
        at, here = todo.pop()
        holds = []
        for i, r in enumerate(alive):
            mine = set() if at[i] == "done" else old_shards(state, r)
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


# ---- somebody joins ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """ranks; stands: which of them wait for the others after a step; flags: versions in whose commit somebody asked for that."""

    ranks: State
    stands: frozenset[int]
    flags: frozenset[int]


def asked_following(state: Asked, broken: str) -> Iterator[Asked]:
    """What one event makes of it, where any rank may hear at any time that a process is ready to join. broken: "each by itself": who has not heard goes on."""
    for after in following(state.ranks, ""):
        r = next(i for i, (x, y) in enumerate(zip(state.ranks, after, strict=True)) if x != y)
        if r in state.stands and after[r].at != "published":
            continue
        new = after[r]
        if new.at == "entered" and state.ranks[r].at == "published":
            yield Asked(after, state.stands, state.flags | {new.version})
            if broken:
                yield Asked(after, state.stands, state.flags)
                continue
        if new.at == "published" and state.ranks[r].at == "left" and new.version - 1 in state.flags:
            yield Asked(after, state.stands | {r}, state.flags)
            if not broken:
                continue
        yield Asked(after, state.stands, state.flags)


@cache
def asked_reachable(n: int, broken: str = "") -> frozenset[Asked]:
    start = Asked((START,) * n, frozenset(), frozenset())
    found, todo = {start}, [start]
    while todo:
        for s in asked_following(todo.pop(), broken):
            if s not in found:
                found.add(s)
                todo.append(s)
    return frozenset(found)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_all_wait_after_the_same_step_or_none(n: int) -> None:
    """Whenever which of them hear of it: who waits is never passed, and is never left alone for ever."""
    states = asked_reachable(n)
    assert any(len(s.stands) == n for s in states)
    for s in states:
        at = {s.ranks[r].version for r in s.stands}
        assert len(at) <= 1 and all(x.version <= v for x in s.ranks for v in at), s
        if s.stands and not list(asked_following(s, "")):
            assert len(s.stands) == n, s


def test_each_by_itself_would_not_do() -> None:
    assert any(
        s.stands and len(s.stands) < 2 and not list(asked_following(s, "each by itself")) for s in asked_reachable(2, "each by itself")
    )


@pytest.mark.parametrize("n", cases(range(1, 5), (1, 2, 3)))
def test_who_joins_may_die_at_any_time_and_so_may_another(n: int) -> None:
    """One that joins has no shards, whatever its new rank: without it the others stay at the version that they waited at. Where another is lost instead, they go on from what
    had been committed, or from that version once anybody has let the old shards go."""
    waiting = {s.ranks for s in asked_reachable(n) if len(s.stands) == n} if n < 4 else {
        s for s in reachable(n) if len({x.version for x in s}) == 1 and s[0].version and all(x.at == "published" for x in s)
    }  # fmt: skip
    assert waiting
    for state in waiting:
        v = state[0].version
        for joins in range(n + 1):
            for holds, dropped in recoveries(state, None, joins):
                for i in range(n + 1):
                    chosen = version_to_go_on_from([h for j, h in enumerate(holds) if j != i])
                    if n == 1 and i != joins and not dropped:
                        continue  # the only one that had anything
                    assert chosen is not None and chosen[0] >= (v if dropped or i == joins else committed(state)), (state, joins, i, holds)


def test_who_joins_decides_nothing() -> None:
    """Of versions; of the pieces it is given all, by who owns them."""
    held_by = [{Shard(5, 0, 2, 0), Shard(5, 0, 2, 1)}, set(), {Shard(5, 0, 2, 1), Shard(4, 0, 2, 0)}]
    assert version_to_go_on_from(held_by) == (5, 0, 2)
    assert sources((5, 0, 2), held_by, [Shard(5, 0, 2, 0), None, Shard(5, 0, 2, 1)]) == [[0, 0, 0], [0, 2, 2]]


def test_many_that_join_are_given_by_many() -> None:
    """What all have whole goes out from each of them."""
    whole = Shard(5, -1, 1, 0)
    assert sources((5, -1, 1), [{whole}, {whole}, set(), set()], [whole, whole, None, None]) == [[0, 1, 0, 1]]


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
