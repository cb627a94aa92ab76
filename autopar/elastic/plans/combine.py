"""Groups of several sizes that train together: which numbers of units they can fill, and the best way to fill them.

A group of k units does x parts of a batch in t_k(x) seconds, which grows with x. Units lie in places (all nodes in one; or devices, each node's survivors in a place of their own),
and a group lies in one place. Of R groups, the smallest of k units, gradients are summed in s(R, k) seconds. Wanted, over all ways to fill the places and to deal B parts,

    min  max_i t_ki(x_i) + s(R, min_i k_i)        sum x_i = B,  x_i >= 1

Within T seconds a group of k does c_k(T) parts, so with T, R and the smallest size fixed this asks for the most parts that R groups can do: an unbounded knapsack in each place,

    f_r(u) = max_k f_r-1(u - k) + c_k(T),         F_r = max-plus convolution over places

and a T will do iff F_R >= B. The best T is one of the finitely many t_k(x): binary search among these is exact. A smallest size that is taken too small only makes s larger, and the right
one is tried too.

Which numbers can be filled without rest is the coin problem. Of coins with gcd 1 all sums above the Frobenius number can be paid; it is less than the product of the two
smallest coprime ones (Sylvester 1882; Jang et al., "Oobleck", SOSP '23, section 4.1, has consecutive sizes). The ranges here are small, so all of them are gone through.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.errors import AutoparError

Speed = Callable[[int], float]  # parts -> seconds, which grow
Sync = Callable[[int, int], float]  # groups, units of the smallest -> seconds; more groups and smaller ones take no less
Row = NDArray[np.float64]


@dataclass(frozen=True)
class Combination:
    """groups: (units, parts of the batch) of each; seconds: of the slowest; sync_s: that gradients take between groups; idle: units without work."""

    groups: tuple[tuple[int, int], ...]
    seconds: float
    sync_s: float
    idle: int

    @property
    def step_s(self) -> float:
        return self.seconds + self.sync_s

    @property
    def counts(self) -> Mapping[int, int]:
        return Counter(k for k, _ in self.groups)

    def text(self) -> str:
        """Such as "7 x 8 (36-37), 1 x 7 (32)": groups x units (parts)."""
        out = []
        for k, n in sorted(self.counts.items(), reverse=True):
            parts = sorted({x for size, x in self.groups if size == k})
            out.append(f"{n} x {k} ({parts[0]}{f'-{parts[-1]}' if len(parts) > 1 else ''})")
        return ", ".join(out)


def fillable(sizes: Sequence[int], most: int) -> tuple[bool, ...]:
    """Whether 0, 1, ..., `most` units can be filled by groups of `sizes`, with no unit left."""
    can = [True] + [False] * most
    for n in range(1, most + 1):
        can[n] = any(k <= n and can[n - k] for k in sizes)
    return tuple(can)


def frobenius(sizes: Sequence[int]) -> int | None:
    """The largest number that `sizes` do not fill; -1 where they fill all, None where there is no largest (their gcd is not 1)."""
    if not sizes or math.gcd(*sizes) != 1:
        return None
    if 1 in sizes:
        return -1
    small = min(sizes)
    least = [0] + [math.inf] * (small - 1)  # the least sum in each residue class of the smallest (Brauer and Shockley 1962)
    for _ in range(small):
        for r in range(small):
            for k in sizes:
                to = (r + k) % small
                least[to] = min(least[to], least[r] + k)
    return int(max(least)) - small


def best(speeds: Mapping[int, Speed], places: Sequence[int], batch: int, sync: Sync) -> Combination | None:
    """The fastest way to fill `places` (units of each) by groups of `speeds`' sizes that do `batch` parts; where it is as fast, one without idle units. None: no group fits."""
    if batch < 1 or any(k < 1 for k in speeds) or any(u < 0 for u in places):
        raise AutoparError(
            f"{batch} parts of a batch, groups of {sorted(speeds)} units, places of {list(places)}",
            where="combine",
            fix="give whole numbers from 1",
        )
    found: Combination | None = None
    for idles in (False, True):
        made = _best(speeds, tuple(sorted(places)), batch, sync, idles, math.inf if found is None else found.step_s)
        found = made or found
    return found


def even(speeds: Mapping[int, Speed], places: Sequence[int], batch: int, sync: Sync) -> Combination | None:
    """As `best`, of ways that deal every group as much, rounded up; with idle units only where no way is without."""
    found: Combination | None = None
    for idles in (False, True):
        for small in speeds if found is None else ():
            for groups in range(1, sum(places) // small + 1):
                share = -(-batch // groups)
                by_time = sorted((k for k in speeds if k >= small), key=lambda k: speeds[k](share))
                made = (_filled(dict.fromkeys(by_time[:n], 1.0), tuple(sorted(places)), groups, idles) for n in range(1, len(by_time) + 1))
                units = next((u for u in made if u is not None), None)  # with the slower sizes, one by one
                if units is None:
                    continue
                idle = sum(places) - sum(units)
                got = Combination(tuple((k, share) for k in units), max(speeds[k](share) for k in units), sync(groups, min(units)), idle)
                if found is None or (got.step_s, got.idle) < (found.step_s, found.idle):
                    found = got
    return found


# ---- parts -----------------------------------------------------------------------------------------------------------


def _best(speeds: Mapping[int, Speed], places: tuple[int, ...], batch: int, sync: Sync, idles: bool, below_s: float) -> Combination | None:
    sizes = sorted(k for k in speeds if k <= max(places, default=0))
    times = {k: [speeds[k](x) for x in range(1, batch + 1)] for k in sizes}
    found: Combination | None = None
    for small in sizes:
        ks = [k for k in sizes if k >= small]
        every = sorted({t for k in ks for t in times[k]})
        known: dict[int, Row] = {}

        def done(at: int, ks: Sequence[int] = ks, every: Sequence[float] = every, known: dict[int, Row] = known) -> Row:
            if at not in known:
                known[at] = _most(_within(ks, times, every[at]), places, idles)
            return known[at]

        for groups in range(1, min(batch, sum(u // small for u in places)) + 1):
            sync_s = sync(groups, small)
            limit = below_s if found is None else found.step_s
            if sync_s >= limit:
                break
            high = bisect.bisect_left(every, limit - sync_s) - 1
            if high < 0 or not _does(done(high), groups, batch):
                continue
            low = -1
            while high - low > 1:
                middle = (high + low) // 2
                low, high = (low, middle) if _does(done(middle), groups, batch) else (middle, high)
            capacity = _within(ks, times, every[high])
            units = _filled(capacity, places, groups, idles)
            assert units is not None
            dealt = _dealt([(k, int(capacity[k])) for k in units], batch, times)
            took_s = max(times[k][x - 1] for k, x in dealt)
            got = Combination(tuple(dealt), took_s, sync(groups, min(units)), sum(places) - sum(units))
            if got.step_s < limit:
                found = got
    return found


def _within(ks: Sequence[int], times: Mapping[int, Sequence[float]], seconds: float) -> dict[int, float]:
    """Parts that a group of each size does in `seconds`; without those that do none."""
    found = {k: float(bisect.bisect_right(times[k], seconds)) for k in ks}
    return {k: n for k, n in found.items() if n}


def _does(most: Row, groups: int, batch: int) -> bool:
    return groups < len(most) and bool(most[groups] >= batch)


def _tables(capacity: Mapping[int, float], units: int, idles: bool) -> list[Row]:
    """f_r(u) of a place, for r = 0, 1, ...; -inf where it cannot be filled so."""
    first = np.zeros(units + 1) if idles else np.full(units + 1, -np.inf)
    first[0] = 0.0
    rows = [first]
    for _ in range(units // min(capacity) if capacity else 0):
        row = np.full(units + 1, -np.inf)
        for k, n in capacity.items():
            if k <= units:
                np.maximum(row[k:], rows[-1][: units + 1 - k] + n, out=row[k:])
        rows.append(row)
    return rows


def _joined(a: Row, b: Row) -> Row:
    """Max-plus convolution."""
    out = np.full(len(a) + len(b) - 1, -np.inf)
    for i, x in enumerate(a):
        if x > -np.inf:
            np.maximum(out[i : i + len(b)], b + x, out=out[i : i + len(b)])
    return out


def _most(capacity: Mapping[int, float], places: Sequence[int], idles: bool) -> Row:
    """Parts that r groups in all places do at most."""
    of = {u: np.array([row[u] for row in _tables(capacity, u, idles)]) for u in set(places)}
    total: Row = np.zeros(1)
    for u in places:
        total = _joined(total, of[u])
    return total


def _filled(capacity: Mapping[int, float], places: Sequence[int], groups: int, idles: bool) -> list[int] | None:
    """Sizes of so many groups that do the most."""
    tables = {u: _tables(capacity, u, idles) for u in set(places)}
    ends = {u: np.array([row[u] for row in rows]) for u, rows in tables.items()}
    totals: list[Row] = [np.zeros(1)]
    for u in places:
        totals.append(_joined(totals[-1], ends[u]))
    if groups >= len(totals[-1]) or totals[-1][groups] == -np.inf:
        return None
    sizes: list[int] = []
    left = groups
    for i in range(len(places) - 1, -1, -1):
        u, before = places[i], totals[i]
        here = next(n for n in range(len(ends[u])) if 0 <= left - n < len(before) and before[left - n] + ends[u][n] == totals[i + 1][left])
        sizes += _sizes(tables[u], u, here, capacity)
        left -= here
    return sorted(sizes, reverse=True)


def _sizes(rows: Sequence[Row], units: int, groups: int, capacity: Mapping[int, float]) -> list[int]:
    found = []
    for r in range(groups, 0, -1):
        k = next(k for k, n in capacity.items() if k <= units and rows[r - 1][units - k] + n == rows[r][units])
        found.append(k)
        units -= k
    return found


def _dealt(capacity: Sequence[tuple[int, int]], batch: int, times: Mapping[int, Sequence[float]]) -> list[tuple[int, int]]:
    """What each may do at most, less what is too much: taken from those that would end last."""
    shares = [n for _, n in capacity]
    heap = [(-times[k][n - 1], i) for i, (k, n) in enumerate(capacity) if n > 1]
    heapq.heapify(heap)
    for _ in range(sum(shares) - batch):
        _, i = heapq.heappop(heap)
        shares[i] -= 1
        if shares[i] > 1:
            heapq.heappush(heap, (-times[capacity[i][0]][shares[i] - 1], i))
    return [(k, x) for (k, _), x in zip(capacity, shares, strict=True)]
