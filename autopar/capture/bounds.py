"""How far before and behind it a query of attention sees keys, where its mask is made from positions: a sliding window, causality beside a padding mask.

A mask is a tensor of queries x keys, and what it hides is computed all the same. Where its program says that a query sees no key beyond some distance, whatever
the data, that is told to the attention operator (`before`, `after`), which may leave out those keys; the mask still says of every pair whether it is seen.
Followed are, from the mask backwards, values that are

    an index       a whole number plus whole multiples of the indices of the tensor's dims: `arange`, sums with numbers, differences
    a truth        what it implies of (query, key), a tensor's last two dims, where it holds and where it does not: comparisons of indices, their and, or, not
    a bias         what being more than -inf implies: a choice between -inf and something else by a truth, sums

and everything else implies nothing. A large finite number hides like -inf only where every query sees a key, its own: then nothing is left of the others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar import _torch

LOWEST = -1e30  # beside the score of a key that is seen, a bias from here on leaves exactly nothing


@dataclass(frozen=True)
class Bounds:
    """A query sees keys from `before` before it to `after` behind it at most (None: no bound). is_exact: and all of these."""

    before: int | None = None
    after: int | None = None
    is_exact: bool = False

    def both(self, other: Bounds) -> Bounds:
        """What is seen by either alone is not."""
        return Bounds(_least(self.before, other.before), _least(self.after, other.after), self.is_exact and other.is_exact)

    def either(self, other: Bounds) -> Bounds:
        return Bounds(_most(self.before, other.before), _most(self.after, other.after))


UNKNOWN, ALL = Bounds(), Bounds(is_exact=True)


@dataclass(frozen=True)
class _Index:
    """steps: by dim."""

    steps: tuple[int, ...]
    base: int

    def difference(self, other: _Index) -> _Index:
        dims = max(len(self.steps), len(other.steps))
        mine, theirs = ((0,) * (dims - len(x.steps)) + x.steps for x in (self, other))
        return _Index(tuple(a - b for a, b in zip(mine, theirs, strict=True)), self.base - other.base)

    def at_least(self, least: int) -> Bounds:
        """What it implies of query and key that this is `least` or more: of a multiple of one is known which way alone."""
        if len(self.steps) < 2 or any(self.steps[:-2]):
            return UNKNOWN
        query, key = self.steps[-2:]
        far = self.base - least
        if (query, key) == (-1, 1):  # key >= query - far
            return Bounds(before=max(far, 0), is_exact=far >= 0)
        if (query, key) == (1, -1):  # key <= query + far
            return Bounds(after=max(far, 0), is_exact=far >= 0)
        return UNKNOWN

    @property
    def negative(self) -> _Index:
        return _Index(tuple(-s for s in self.steps), -self.base)


@dataclass(frozen=True)
class _Distance:
    """The absolute value of an index."""

    of: _Index


@dataclass(frozen=True)
class _Truth:
    holds: Bounds
    fails: Bounds = UNKNOWN

    @property
    def negative(self) -> _Truth:
        return _Truth(self.fails, self.holds)


@dataclass(frozen=True)
class _Bias:
    """is_finite: hides by a large finite number, which is right as long as nothing is done to it."""

    seen: Bounds
    is_finite: bool = False


@dataclass(frozen=True)
class _Number:
    """The same everywhere."""

    value: float


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _most(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else max(a, b)


_SAME = (
    "clone",
    "alias",
    "detach",
    "contiguous",
    "lift_fresh_copy",
    "lift_fresh",
    "_to_copy",
    "to",
    "expand",
    "unsqueeze",
    "squeeze",
    "view",
    "_unsafe_view",
    "reshape",
)
_TRUE = {"gt": (0, 1), "ge": (0, 0), "lt": (1, 1), "le": (1, 0)}  # (which way round the difference is, how much it is at least)
_CONSTANT = ("full", "full_like", "new_full", "scalar_tensor", "ones", "zeros", "ones_like", "zeros_like", "new_ones", "new_zeros")


def bound_masks(gm: fx.GraphModule) -> None:
    """Says to every attention operator, of as many queries as keys, how far its mask lets queries see. Backward is told what forward is."""
    known: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and not _torch.is_getitem(node):
            known[node] = _value(node, known)
    for node in gm.graph.nodes:
        at = {"autopar.attention_v2.default": (0, 1, 3, 7), "autopar.attention_backward_v3.default": (1, 2, 6, 11)}.get(str(node.target))
        if at is None or len(node.args) != at[3] or not isinstance(node.args[at[2]], fx.Node):
            continue
        args: tuple[Any, ...] = node.args
        q, k, mask = (args[i] for i in at[:3])
        found = known.get(mask)
        if isinstance(found, _Bias) and q.meta["val"].shape[2] == k.meta["val"].shape[2] and mask.meta["val"].shape[2] > 1:
            before, after = (-1 if n is None else n for n in (found.seen.before, found.seen.after))
            if before >= 0 or after >= 0:
                node.args = (*node.args, before, after)


def _value(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    """What is known of what `node` makes; None: nothing."""
    name, _, _ = str(node.target).removeprefix("aten.").partition(".")
    val = node.meta.get("val")
    if not str(node.target).startswith("aten.") or not isinstance(val, torch.Tensor):
        return None
    given: list[Any] = [
        known.get(a) if isinstance(a, fx.Node) else _Number(float(a)) if isinstance(a, (bool, int, float)) else a for a in node.args
    ]
    if name == "arange":
        return _arange(node, val)
    if name in _CONSTANT:
        return _constant(name, given)
    if name in _SAME:
        return _same(name, node, given[0], val)
    if name in ("add", "sub"):
        return _sum(node, given, 1 if name == "add" else -1, val) if node.kwargs.get("alpha", 1) == 1 else None
    if name == "neg" and isinstance(given[0], _Index):
        return given[0].negative
    if name == "abs" and isinstance(given[0], _Index):
        return _Distance(given[0])
    if name in _TRUE or name == "eq":
        return _compared(name, given[0], given[1], val)
    if name in ("bitwise_and", "logical_and", "bitwise_or", "logical_or", "bitwise_not", "logical_not") and val.dtype == torch.bool:
        return _joined(name, [_truth(x) for x in given])
    if name == "where" and len(given) == 3:
        return _chosen(_truth(given[0]), given[1], given[2], val)
    if name == "masked_fill":
        return _chosen(_truth(given[1]), given[2], given[0], val)
    if name in ("tril", "triu"):
        return _triangle(name, given[0], int(given[1].value) if len(given) > 1 else 0, val)
    return None


def _is_whole(val: torch.Tensor) -> bool:
    return val.dtype in (torch.int64, torch.int32)


def _arange(node: fx.Node, val: torch.Tensor) -> Any:
    first, step = (node.args[0] if len(node.args) > 1 else 0), (node.args[2] if len(node.args) > 2 else 1)
    if not (_is_whole(val) and isinstance(first, int) and isinstance(step, int)):
        return None
    return _Index((step if len(val) > 1 else 0,), first)  # of a dim of one, which broadcasts, there is no other index


def _constant(name: str, given: list[Any]) -> Any:
    if "ones" in name or "zeros" in name:
        return _Number(float("ones" in name))
    number = given[-1]
    return number if isinstance(number, _Number) else None


def _same(name: str, node: fx.Node, found: Any, val: torch.Tensor) -> Any:
    """Through casts, and views that add, drop or repeat dims."""
    source: Any = node.args[0]
    if found is None or isinstance(found, _Number):
        return found
    before, after = source.meta["val"].shape, val.shape
    if isinstance(found, (_Truth, _Bias)):
        kept = val.dtype == torch.bool if isinstance(found, _Truth) else val.dtype.is_floating_point
        return found if kept and len(after) >= 2 and before[-2:] == after[-2:] else None
    if not _is_whole(val) or isinstance(found, _Distance):
        return None
    if name == "expand":
        return _Index((0,) * (len(after) - len(before)) + found.steps, found.base)
    large = [(n, s) for n, s in zip(before, found.steps, strict=True) if n != 1]
    if [n for n, _ in large] != [n for n in after if n != 1]:
        return None
    steps = iter(s for _, s in large)
    return _Index(tuple(next(steps) if n != 1 else 0 for n in after), found.base)


def _sum(node: fx.Node, given: list[Any], sign: int, val: torch.Tensor) -> Any:
    a, b = given[:2]
    if val.dtype.is_floating_point:  # -inf stays, whatever is added to it
        seen = [x.seen for x in ((a, b) if sign > 0 else (a,)) if isinstance(x, _Bias) and not x.is_finite]
        return _Bias(functools.reduce(Bounds.both, seen)) if seen else None
    if not _is_whole(val):
        return None
    parts = [_Index((), int(x.value)) if isinstance(x, _Number) else x for x in (a, b)]
    if not all(isinstance(x, _Index) for x in parts):
        return None
    found = parts[0].difference(parts[1] if sign < 0 else parts[1].negative)
    return _Index((0,) * (val.dim() - len(found.steps)) + found.steps, found.base)


def _compared(name: str, a: Any, b: Any, val: torch.Tensor) -> Any:
    if isinstance(a, _Distance) and isinstance(b, _Number) and name in ("lt", "le"):
        far = math.ceil(b.value) - 1 if name == "lt" else math.floor(b.value)
        return _Truth(a.of.at_least(-far).both(a.of.negative.at_least(-far)))
    a, b = (_Index((), int(x.value)) if isinstance(x, _Number) and x.value.is_integer() else x for x in (a, b))
    if not isinstance(a, _Index) or not isinstance(b, _Index):
        return None
    if name == "eq":
        difference = a.difference(b)
        return _Truth(difference.at_least(0).both(difference.negative.at_least(0)))
    turned, least = _TRUE[name]
    difference = b.difference(a) if turned else a.difference(b)
    return _Truth(difference.at_least(least), difference.negative.at_least(1 - least))


def _truth(x: Any) -> _Truth:
    if isinstance(x, _Number):
        return _Truth(ALL) if x.value else _Truth(UNKNOWN, ALL)
    return x if isinstance(x, _Truth) else _Truth(UNKNOWN)


def _joined(name: str, given: list[_Truth]) -> _Truth:
    if name.endswith("not"):
        return given[0].negative
    a, b = given[:2]
    if name.endswith("or"):
        return _joined("and", [a.negative, b.negative]).negative
    return _Truth(a.holds.both(b.holds), a.fails.either(b.fails))


def _chosen(which: _Truth, a: Any, b: Any, val: torch.Tensor) -> Any:
    """`a` where it holds, else `b`; one of them may hide."""
    if val.dtype == torch.bool:  # masks filled with False
        holds = [_truth(x).holds.both(y) for x, y in ((a, which.holds), (b, which.fails)) if not (isinstance(x, _Number) and not x.value)]
        return _Truth(holds[0]) if len(holds) == 1 else None
    if not val.dtype.is_floating_point:
        return None
    for hides, other, seen in ((a, b, which.fails), (b, a, which.holds)):
        if not isinstance(hides, _Number) or hides.value > LOWEST:
            continue
        if hides.value == -math.inf:
            more = other.seen if isinstance(other, _Bias) and not other.is_finite else UNKNOWN
            return _Bias(seen.both(more))
        if seen.is_exact and isinstance(other, _Number) and other.value == 0:  # within exact bounds there is a query's own key
            return _Bias(seen, True)
    return None


def _triangle(name: str, of: Any, diagonal: int, val: torch.Tensor) -> Any:
    """What is above or below a diagonal of keys - queries is zero."""
    if val.dim() < 2 or 1 in val.shape[-2:]:
        return None
    low = _Index((0,) * (val.dim() - 2) + (-1, 1), -diagonal)  # keys - queries - diagonal
    kept = _Truth(low.negative.at_least(0), low.at_least(1)) if name == "tril" else _Truth(low.at_least(0), low.negative.at_least(1))
    if val.dtype == torch.bool:
        return _joined("and", [kept, _truth(of)])
    hides = isinstance(of, _Number) and of.value == -math.inf and val.dtype.is_floating_point
    return _Bias(kept.fails) if hides else None
