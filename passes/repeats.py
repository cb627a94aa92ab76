"""Finds stacks of equal layers in a sequence of calls, without module names, and where to cut them.

Every call is hashed by what it is (target, constants, shapes, strides, dtypes of result and operands). A run in which the
hash sequence equals itself shifted by p is a tandem repeat of period p: a stack of layers. It may be cut anywhere in the period;
the best cut is the one that the fewest values cross.

No cut may separate a tuple from what takes it apart, nor a collective from its wait: Inductor keeps a collective's input
for a wait in the same body only, and would reuse its memory while the collective still reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

# Calls. Layers are longer and save more; a body for less would only keep Inductor from fusing it with its surroundings.
MIN_PERIOD = 12
MIN_SAVED = 50


@dataclass(frozen=True)
class Repeat:
    """Nodes [start, start + period x count) of the call sequence are `count` copies of one body."""

    start: int
    period: int
    count: int

    def copies(self, calls: list[fx.Node]) -> list[list[fx.Node]]:
        return [calls[self.start + k * self.period : self.start + (k + 1) * self.period] for k in range(self.count)]


# ---- finding -----------------------------------------------------------------------------------------------------


def text(x: Any, node: Callable[[fx.Node], str]) -> str:
    if isinstance(x, fx.Node):
        return node(x)
    if isinstance(x, (list, tuple)):
        return "(" + ",".join(text(y, node) for y in x) + ")"
    if isinstance(x, dict):
        return "{" + ",".join(f"{k}:{text(v, node)}" for k, v in x.items()) + "}"
    return repr(x)


def call_hash(n: fx.Node) -> str:
    args = (n.args[0], "counter") if adds_integer(n) else n.args
    return hashlib.sha256(f"{n.target}{text(args, value_text)}{text(n.kwargs, value_text)}{value_text(n)}".encode()).hexdigest()


def value_text(n: fx.Node) -> str:
    def one(v: Any) -> str:
        return f"{tuple(v.shape)}{v.stride()}{v.dtype}{v.device}" if isinstance(v, torch.Tensor) else repr(v)

    val = n.meta.get("val")
    return "|".join(map(one, val)) if isinstance(val, (list, tuple)) else one(val)


def find_repeats(hashes: Sequence[str]) -> list[Repeat]:
    """Disjoint tandem repeats, in order; each covers the most nodes in its stretch."""
    ids: dict[str, int] = {}
    sequence = np.array([ids.setdefault(h, len(ids)) for h in hashes])
    return list(_search(sequence, 0, len(sequence)))


def _search(sequence: Any, lo: int, hi: int) -> Iterator[Repeat]:
    best: Repeat | None = None
    a = sequence[lo:hi]
    for period in range(MIN_PERIOD, (hi - lo) // 2 + 1):
        equal = np.concatenate(([False], a[:-period] == a[period:], [False]))
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        if not len(edges):
            continue
        starts, ends = edges[::2], edges[1::2]
        i = int(np.argmax(ends - starts))
        run = int(ends[i] - starts[i])
        saved = run // period * period
        if saved >= MIN_SAVED and (best is None or saved > best.period * (best.count - 1)):
            best = Repeat(lo + int(starts[i]), period, run // period + 1)
    if best is None:
        return
    yield from _search(sequence, lo, best.start)
    yield best
    yield from _search(sequence, best.start + best.period * best.count, hi)


# ---- cutting -----------------------------------------------------------------------------------------------------


class Cuts:
    """Where a run may be cut, and what crosses there. Cut c lies before call c."""

    def __init__(self, calls: list[fx.Node]) -> None:
        position = {n: i for i, n in enumerate(calls)}
        self.last = np.array([max((position.get(u, len(calls)) for u in n.users), default=i) for i, n in enumerate(calls)])
        closed = np.zeros(len(calls) + 2, dtype=np.int64)
        for i, n in enumerate(calls):
            if isinstance(n.meta["val"], (list, tuple)) or _in_flight(n):
                closed[i + 1] += 1
                closed[self.last[i] + 1] -= 1
        self.closed = np.cumsum(closed) > 0

    def crossing(self, cut: int, period: int) -> int:
        """Values that the next copy reads of the last two; what lives longer (saved for backward) crosses every cut anyway."""
        last = self.last[max(0, cut - 2 * period) : cut]
        return int(np.count_nonzero((last >= cut) & (last < cut + period)))

    def best(self, r: Repeat) -> Repeat | None:
        """`r` shifted within its run to the cut that the fewest values cross; None where it cannot be cut."""
        end = r.start + r.period * r.count
        found: list[tuple[int, int]] = []
        for start in range(r.start, min(r.start + r.period, end - 2 * r.period + 1)):
            if not self.closed[start : end + 1 : r.period].any():
                found.append((self.crossing(start + r.period, r.period), start))
        if not found:
            return None
        start = min(found)[1]
        return Repeat(start, r.period, (end - start) // r.period)


def _in_flight(n: fx.Node) -> bool:
    """A collective's result before its wait."""
    return "_c10d_functional" in str(n.target) and "wait_tensor" not in str(n.target)


def adds_integer(n: fx.Node) -> bool:
    """Whether `n` adds a constant integer to an int64 tensor: how random ops get their number, in which equal layers differ."""
    return (
        n.target is torch.ops.aten.add.Tensor
        and isinstance(n.args[0], fx.Node)
        and type(n.args[1]) is int
        and not n.kwargs
        and n.args[0].meta["val"].dtype == torch.int64
    )
