"""A schedule made for stages that take given times, within given memory: what the named ones are for stages that all take the same.

It is the best, by the replay, of the named ones that keep to the memory, and of one made action by action: ranks are taken up in the order in which they are free, each with what it can
begin first; of that I before F before W, later stages before earlier ones. Building the best schedule is a job shop, and NP-hard: nothing is proven but that the named ones are no better.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import LayoutError
from autopar.pipeline.actions import FORWARD, INPUT, WEIGHT, Action, Lists
from autopar.pipeline.replay import replay
from autopar.pipeline.schedule import Schedule
from autopar.pipeline.times import Times
from autopar.pipeline.zero_bubble import dualpipev, zb_h1, zbv


def filled(times: Times, micro_batches: int, where: Sequence[int], most: Sequence[int]) -> Lists:
    """where: the rank of each stage; most: for every rank the micro-batches that its stages may hold between F and W, each stage's counted by itself.

    Raises LayoutError where nothing keeps to that."""
    p, found = len(most), list[Lists]()
    try:
        found.append(greedy(times, micro_batches, where, most))
    except LayoutError:
        if len(where) not in (p, 2 * p):
            raise
    if len(where) == p:
        found += [zb_h1(p, micro_batches), Schedule("1f1b", p, micro_batches).lists(), Schedule("gpipe", p, micro_batches).lists()]
    elif len(where) == 2 * p:
        found += [zbv(p, micro_batches), dualpipev(p, micro_batches)]
        if micro_batches >= p and micro_batches % p == 0:
            found.append(Schedule("interleaved", p, micro_batches, 2).lists())
    fitting = [x for x in found if x.where == tuple(where) and all(x.in_flight(r) <= n for r, n in enumerate(most))]
    if not fitting:
        raise LayoutError("no schedule keeps to these numbers of micro-batches", where=f"{list(most)}", fix="let ranks hold more")
    best = min(fitting, key=lambda x: replay(x, times).total_s)
    return Lists(best.ranks, "filled")


def greedy(times: Times, micro_batches: int, where: Sequence[int], most: Sequence[int]) -> Lists:
    """By what can begin first.

    Ranks are taken up in the order in which they are free, each with what it can begin first: of that I before F before W, later stages before earlier ones.
    Raises LayoutError where a rank may hold fewer than its stages need for one micro-batch."""
    m, last, p = micro_batches, len(where) - 1, len(most)
    mine = [[s for s, r in enumerate(where) if r == rank] for rank in range(p)]
    for rank, n in enumerate(most):
        if n < len(mine[rank]):
            raise LayoutError(
                f"rank {rank} may hold {n} micro-batches, and has {len(mine[rank])} stages", fix="let it hold one a stage, at least"
            )
    lags_s = times.lags_between(where)
    end_f: dict[tuple[int, int], float] = {}
    end_i: dict[tuple[int, int], float] = {}
    done = {(s, kind): 0 for s in range(last + 1) for kind in (FORWARD, INPUT, WEIGHT)}
    held, clock_s = [0] * p, [0.0] * p
    lists: list[list[Action]] = [[] for _ in range(p)]

    def choices(rank: int) -> list[tuple[float, int, int, Action]]:
        """(when it can begin, kind's rank, minus the stage, action)."""
        found = []
        for s in mine[rank]:
            i, f, w = done[s, INPUT], done[s, FORWARD], done[s, WEIGHT]
            if i < f:
                came = end_f[s, i] if s == last else end_i.get((s + 1, i))
                if came is not None:
                    found.append((max(clock_s[rank], came + lags_s[2 * last + 1 - s]), 0, -s, Action(s, INPUT, i)))
            # A stage before others of this rank leaves each of them room for one.
            if f < m and held[rank] + sum(done[t, FORWARD] <= f for t in mine[rank] if t > s) < most[rank]:
                came = 0.0 if s == 0 else end_f.get((s - 1, f))
                if came is not None:
                    found.append((max(clock_s[rank], came + lags_s[s]), 1, -s, Action(s, FORWARD, f)))
            if w < i:
                found.append((clock_s[rank], 2, -s, Action(s, WEIGHT, w)))
        return found

    left = 3 * m * (last + 1)
    while left:
        # What begins first of all; another rank's can then come no earlier than that.
        best = min(((*c, rank) for rank in range(p) for c in choices(rank)), key=lambda c: (c[0], c[1], c[2], c[4]), default=None)
        if best is None:
            raise LayoutError("no schedule keeps to these numbers of micro-batches", where=f"{list(most)}", fix="let ranks hold more")
        begin, _, _, a, rank = best
        clock_s[rank] = begin + times.action_s(a)
        lists[rank].append(a)
        done[a.stage, a.kind] += 1
        if a.kind == FORWARD:
            end_f[a.stage, a.micro_batch] = clock_s[rank]
            held[rank] += 1
        elif a.kind == INPUT:
            end_i[a.stage, a.micro_batch] = clock_s[rank]
        else:
            held[rank] -= 1
        left -= 1
    return Lists(tuple(map(tuple, lists)), "filled")
