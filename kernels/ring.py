"""Attention over a sequence of which every rank has a part of the queries and the same part of the keys: keys and values go round.

Of n ranks, rank r has its own block of keys at first, then that of rank r - 1, and so on: n - 1 hops to the next rank, each beside what is computed with the block that is
here. Results over blocks are merged by their log-sum-exps (Liu et al., Ring Attention, 2023, section 3; Dao et al., FlashAttention-2, section 2.3.1):

    lse = log(e^lse1 + e^lse2),  out = out1 e^(lse1 - lse) + out2 e^(lse2 - lse)

Backward has out and lse of all keys, from which each block's part follows. A block's dk and dv are sums over ranks: they go round one hop behind their keys,
and after the last one go home. Blocks that no rank sees anything of are not visited: keys are handed on by as many ranks as it takes to the next that some rank
does.

`autopar::ring_attention_v2` (q [B, Hq, Q, E], k [B, Hkv, S, E], v [B, Hkv, S, D], bias? [B|1, Hq|1, Q|1, S x ranks], is_causal, scale, q_index? [Q], before,
after, place [], starts, run, hops, group, ranks) -> (out [B, Hq, Q, D], lse [B, Hq, Q]), as `autopar::attention_v2` has them; `ring_attention_backward_v2`
(grad, q, k, v, out, lse, bias?, ...) -> (dq, dk, dv).

- S keys are here of S x ranks. Key/value heads go round as they are, not repeated for the query heads that read them. The bias stays: it has all columns, in
  the order of the sequence, of the queries that are here. It gets no gradient.
- is_causal, or bounds: q_index, int64, is the global index of every query that is here; starts has that of the first of every `run` neighbouring keys, rank by
  rank. Queries lie within such runs. Of a block, a run of queries sees all keys before it by a kernel without a mask, and its own by a causal one; blocks
  behind it are not computed.
- before, after: a promise of the bias: query i sees no key before i - before nor behind i + after (below zero: no bound). Keys beyond are left out, and where
  both are bounds, runs of queries are cut into strips (`autopar.graph.runs`).
- hops: the blocks that are visited, by the hops to them, from 0 on.
- place, 0-d int64: which rank of the group this one is. q_index and place are read on the host.
- A row that sees no key gives zeros and passes no gradient; its lse is -inf. In a row whose every key a bias hides by a large finite number scores are lost:
  blocks count by what the bias has of them.

When a body changes so must the name: compiled graphs are cached by name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.graph.runs import strip, strips
from autopar.kernels.attention import _backward_of, _forward, _kernel, _laid, _new, _ungroup, _wide, merge, merged
from autopar.kernels.exchange import Body, Exchange, over_group

Later = Callable[[], Tensor]
LOST = 8.0  # beside a bias of which this is the rounding, scores are lost


class Part(NamedTuple):
    """Neighbouring queries, and those keys of a block that all of them see but for the bias, or that each sees up to its own."""

    rows: slice
    keys: slice
    is_causal: bool


def parts(
    rows: Sequence[tuple[int, slice]] | None, starts: Sequence[int], run: int, keys: int, before: int, after: int, whole: bool
) -> list[Part]:
    """rows: runs of queries with the global index of the first, None where all see all; starts: of the block's runs of keys, of which there are `keys`; whole:
    a bias says what each query sees, causality as well."""

    def until(index: int) -> int:
        """How many keys of the block come before that of this global index."""
        return sum(min(run, max(0, index - s)) for s in starts)

    if rows is None:
        return [Part(slice(None), slice(0, keys), False)]
    out = []
    for first, here in rows:
        n = here.stop - here.start
        low = until(first - before) if before >= 0 else 0
        high = keys if after < 0 else until(first + n + after) if whole else until(first)
        if high > low:
            out.append(Part(here, slice(low, high), False))
        if not whole and any(s <= first < s + run for s in starts):
            out.append(Part(here, slice(high, high + n), True))
    return out


def _runs(q_index: Tensor | None, run: int, wide: int) -> list[tuple[int, slice]] | None:
    """Neighbouring queries, cut where a run of keys ends, into pieces of at most `wide`."""
    if q_index is None:
        return None
    begins = (q_index.diff() != 1) | (q_index[1:] % run == 0)
    at = [0, *(begins.nonzero().flatten() + 1).tolist(), len(q_index)]
    firsts: list[int] = q_index[at[:-1]].tolist()
    return list(strips([(first, slice(a, b)) for first, a, b in zip(firsts, at, at[1:], strict=False)], wide))


def _packed(*tensors: Tensor) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _unpacked(rows: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As `_packed` of what has the shapes of k and v."""
    a, b = rows.split([k.numel(), v.numel()])
    return a.view(k.shape), b.view(v.shape)


def _moved(rows: Tensor, by: int, at: int, ranks: int) -> Generator[Exchange, Later, Later]:
    """To the rank that is `by` further; answered by what comes from the one as far before."""
    send, receive = ([len(rows) if r == (at + there) % ranks else 0 for r in range(ranks)] for there in (by, -by))
    return (yield Exchange(rows, send, receive, is_later=True))


class _Ring:
    """Where this rank is, and what its queries see of each block. bias: with causality in it."""

    def __init__(
        self, q: Tensor, keys: int, bias: Tensor | None, is_causal: bool, q_index: Tensor | None, before: int, after: int, place: Tensor,
        starts: Sequence[int], run: int, hops: Sequence[int], ranks: int,
    ) -> None:  # fmt: skip
        self.at, self.ranks, self.keys, self.starts, self.run, self.hops = int(place), ranks, keys, starts, run, hops
        if bias is not None and is_causal:
            assert q_index is not None
            hidden = q_index.unsqueeze(1) < torch.arange(bias.shape[-1], device=q.device)
            bias = torch.where(hidden, -math.inf, bias).to(bias.dtype)
        self.bias, self.before, self.after = bias, before, 0 if is_causal else after
        self.rows = _runs(q_index, run, strip(run, before, self.after)) if is_causal or before >= 0 or after >= 0 else None
        self.even = None if bias is None else _Even.of(bias, _wide(q.dtype))

    def moves(self) -> Iterator[tuple[int, int]]:
        """(hops to a block, by how many ranks it is then handed on); 0: it is the last one."""
        for hop, then in itertools.pairwise((*self.hops, self.hops[-1])):
            yield hop, then - hop

    def of(self, hop: int) -> Iterator[tuple[Part, Tensor | None, Tensor | None]]:
        """Of the block that has come so far: what is computed, with its bias, and what it counts for in rows whose scores are lost (None: there are none)."""
        block, each = (self.at - hop) % self.ranks, len(self.starts) // self.ranks
        mine = self.starts[block * each : (block + 1) * each]
        for part in parts(self.rows, mine, self.run, self.keys, self.before, self.after, self.bias is not None):
            bias = None if self.bias is None else self.columns(mine, part)
            yield part, bias, None if bias is None or self.even is None else self.even.share(bias, part.rows)

    def columns(self, starts: Sequence[int], part: Part) -> Tensor:
        """The bias of these queries, and of these of a block's keys."""
        assert self.bias is not None
        rows = self.bias[:, :, part.rows] if self.bias.shape[2] > 1 else self.bias
        spans = [
            (max(part.keys.start, i * self.run), min(part.keys.stop, (i + 1) * self.run), s - i * self.run) for i, s in enumerate(starts)
        ]
        some = [rows[..., a + by : b + by] for a, b, by in spans if a < b]
        return some[0] if len(some) == 1 else torch.cat(some, -1)


class _Even(NamedTuple):
    """Rows in which every key that is not hidden altogether has so low a bias that scores are lost beside it. top, total: the largest bias of a row, and the
    sum over its keys of e to what is less; is_lost: which rows those are; all [B|1, H|1, Q|1, 1]."""

    top: Tensor
    total: Tensor
    is_lost: Tensor

    @staticmethod
    def of(bias: Tensor, wide: torch.dtype) -> _Even | None:
        top = bias.amax(-1, keepdim=True).to(wide)
        is_lost = (top < -LOST / torch.finfo(wide).eps) & top.isfinite()
        if not bool(is_lost.any()):
            return None
        top = top.masked_fill(~is_lost, 0.0)
        return _Even(top, (bias.to(wide) - top).exp().sum(-1, keepdim=True), is_lost)

    def share(self, bias: Tensor, rows: slice) -> Tensor:
        """What some keys, of which `bias` is, have of these rows; -1 where scores are not lost."""
        top, total, is_lost = (t[:, :, rows] if t.shape[2] > 1 else t for t in self)
        return ((bias.to(top.dtype) - top).exp().sum(-1, keepdim=True) / total).masked_fill(~is_lost, -1.0)


def forward_body(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float, q_index: Tensor | None, before: int, after: int,
    place: Tensor, starts: Sequence[int], run: int, hops: Sequence[int], group: str, ranks: int,
) -> Body:  # fmt: skip
    ring = _Ring(q, k.shape[2], bias, is_causal, q_index, before, after, place, starts, run, hops, ranks)
    wide = _wide(q.dtype)
    out = _new(q, *q.shape[:-1], v.shape[-1]).to(wide).zero_()
    lse = torch.full(q.shape[:-1], -math.inf, dtype=wide, device=q.device)
    held = _packed(k, v)
    for hop, by in ring.moves():
        later = (yield from _moved(held, by, ring.at, ranks)) if by else None
        keys, values = _unpacked(held, k, v)
        for (rows, seen, causal), some, share in ring.of(hop):
            found, its = _forward(q[:, :, rows], keys[:, :, seen], values[:, :, seen], some, causal, scale, None)
            into, sums = out[:, :, rows], lse[:, :, rows]
            if share is None:
                merge(into, sums, into, sums, found, its)
            else:
                both, sums[:] = merged(into, sums, found, its)
                into[:] = torch.where(share < 0, both, into + share * found)
        if later is not None:
            held = later()
    return _laid(out.to(q.dtype)), lse


def backward_body(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, is_causal: bool, scale: float,
    q_index: Tensor | None, before: int, after: int, place: Tensor, starts: Sequence[int], run: int, hops: Sequence[int], group: str, ranks: int,
) -> Body:  # fmt: skip
    """(dq, dk, dv)."""
    ring = _Ring(q, k.shape[2], bias, is_causal, q_index, before, after, place, starts, run, hops, ranks)
    wide = _wide(q.dtype)
    dq = _new(q, *q.shape).to(wide).zero_()
    held, sums = _packed(k, v), None
    for hop, by in ring.moves():
        later = (yield from _moved(held, by, ring.at, ranks)) if by else None
        keys, values = _unpacked(held, k, v)
        mine = torch.zeros_like(held, dtype=wide)
        dk, dv = _unpacked(mine, k, v)
        for (rows, seen, causal), bias_, share in ring.of(hop):
            some = q[:, :, rows], keys[:, :, seen], values[:, :, seen]
            its = grad[:, :, rows]
            if share is not None and _kernel(*some, bias_, causal) == "math":  # whose share of a lost row's sum is lost too
                its = torch.where(share < 0, its, its * share).to(grad.dtype)
            found = _backward_of(its, *some, out[:, :, rows], lse[:, :, rows], bias_, causal, scale, None, False)
            dq[:, :, rows] += found[0]
            dk[:, :, seen] += _ungroup(found[1], some[1])
            dv[:, :, seen] += _ungroup(found[2], some[2])
        if sums is not None:
            mine += sums()
        home = by or -hop % ranks
        sums = (yield from _moved(mine, home, ring.at, ranks)) if home else lambda mine=mine: mine
        if later is not None:
            held = later()
    assert sums is not None
    dk, dv = _unpacked(sums(), k, v)
    return _laid(dq.to(q.dtype)), _laid(dk.to(k.dtype)), _laid(dv.to(v.dtype))


@torch.library.custom_op("autopar::ring_attention_v2", mutates_args=())
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float, q_index: Tensor | None, before: int, after: int,
    place: Tensor, starts: Sequence[int], run: int, hops: Sequence[int], group: str, ranks: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    body = forward_body(q, k, v, bias, is_causal, scale, q_index, before, after, place, starts, run, hops, group, ranks)
    found: tuple[Tensor, Tensor] = over_group(body, group)
    return found


@ring_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float, q_index: Tensor | None, before: int, after: int,
    place: Tensor, starts: Sequence[int], run: int, hops: Sequence[int], group: str, ranks: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _new(q, *q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=_wide(q.dtype))


@torch.library.custom_op("autopar::ring_attention_backward_v2", mutates_args=())
def ring_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, is_causal: bool, scale: float,
    q_index: Tensor | None, before: int, after: int, place: Tensor, starts: Sequence[int], run: int, hops: Sequence[int], group: str, ranks: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv)."""
    body = backward_body(grad, q, k, v, out, lse, bias, is_causal, scale, q_index, before, after, place, starts, run, hops, group, ranks)
    found: tuple[Tensor, Tensor, Tensor] = over_group(body, group)
    return found


@ring_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, is_causal: bool, scale: float,
    q_index: Tensor | None, before: int, after: int, place: Tensor, starts: Sequence[int], run: int, hops: Sequence[int], group: str, ranks: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _new(q, *q.shape), _new(k, *k.shape), _new(v, *v.shape)
