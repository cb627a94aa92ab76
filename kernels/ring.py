"""Attention over a sequence of which every rank has a part of the queries and the same part of the keys: keys and values go round.

Of n ranks, rank r has its own block of keys at first, then that of rank r - 1, and so on: n - 1 hops to the next rank, each beside what is computed with the block that is
here. Results over blocks are merged by their log-sum-exps (Liu et al., Ring Attention, 2023, section 3; Dao et al., FlashAttention-2, section 2.3.1):

    lse = log(e^lse1 + e^lse2),  out = out1 e^(lse1 - lse) + out2 e^(lse2 - lse)

Backward has out and lse of all keys, from which each block's part follows. A block's dk and dv are sums over ranks: they go round one hop behind their keys, and after n
hops are where the keys are from.

`autopar::ring_attention_v1` (q [B, Hq, Q, E], k [B, Hkv, S, E], v [B, Hkv, S, D], is_causal, scale, q_index? [Q], place [], starts, run, group, ranks)
-> (out [B, Hq, Q, D], lse [B, Hq, Q]), as `autopar::attention_v2` has them; `ring_attention_backward_v1` (grad, q, k, v, out, lse, ...) -> (dq, dk, dv).

- S keys are here of S x ranks. Key/value heads go round as they are, not repeated for the query heads that read them.
- is_causal: q_index, int64, is the global index of every query that is here; starts has that of the first of every `run` neighbouring keys, rank by rank. Queries lie
  within such runs. Of a block, a run of queries sees all keys before it by a kernel without a mask, and its own by a causal one; blocks behind it are not computed.
- place, 0-d int64: which rank of the group this one is. q_index and place are read on the host.

When a body changes so must the name: compiled graphs are cached by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.kernels.attention import _backward_of, _forward, _laid, _new, _ungroup, _wide, merged
from autopar.kernels.exchange import Body, Exchange, over_group

Later = Callable[[], Tensor]


class Part(NamedTuple):
    """Neighbouring queries, and those keys of a block that all of them see, or that each sees up to its own."""

    rows: slice
    keys: slice
    is_causal: bool


def parts(rows: Sequence[tuple[int, slice]] | None, starts: Sequence[int], run: int, keys: int) -> list[Part]:
    """rows: runs of queries with the global index of the first, None where all see all; starts: of the block's runs of keys, of which there are `keys`."""
    if rows is None:
        return [Part(slice(None), slice(0, keys), False)]
    out = []
    for first, here in rows:
        before = sum(min(run, max(0, first - s)) for s in starts)
        if before:
            out.append(Part(here, slice(0, before), False))
        if any(s <= first < s + run for s in starts):
            out.append(Part(here, slice(before, before + here.stop - here.start), True))
    return out


def _runs(q_index: Tensor | None, is_causal: bool, run: int) -> list[tuple[int, slice]] | None:
    """Neighbouring queries, cut where a run of keys ends."""
    if not is_causal:
        return None
    assert q_index is not None
    begins = (q_index.diff() != 1) | (q_index[1:] % run == 0)
    at = [0, *(begins.nonzero().flatten() + 1).tolist(), len(q_index)]
    firsts: list[int] = q_index[at[:-1]].tolist()
    return [(first, slice(a, b)) for first, a, b in zip(firsts, at, at[1:], strict=False)]


def _packed(*tensors: Tensor) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _unpacked(rows: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As `_packed` of what has the shapes of k and v."""
    a, b = rows.split([k.numel(), v.numel()])
    return a.view(k.shape), b.view(v.shape)


def _hop(rows: Tensor, at: int, ranks: int) -> Generator[Exchange, Later, Later]:
    """To the next rank; answered by what comes from the one before."""
    send, receive = ([len(rows) if r == (at + by) % ranks else 0 for r in range(ranks)] for by in (1, -1))
    return (yield Exchange(rows, send, receive, is_later=True))


def forward_body(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, q_index: Tensor | None, place: Tensor, starts: Sequence[int], run: int,
    group: str, ranks: int,
) -> Body:  # fmt: skip
    at, runs, each = int(place), _runs(q_index, is_causal, run), len(starts) // ranks
    wide = _wide(q.dtype)
    out = _new(q, *q.shape[:-1], v.shape[-1]).to(wide).zero_()
    lse = torch.full(q.shape[:-1], -math.inf, dtype=wide, device=q.device)
    held = _packed(k, v)
    for hop in range(ranks):
        later = (yield from _hop(held, at, ranks)) if hop < ranks - 1 else None
        block = (at - hop) % ranks
        keys, values = _unpacked(held, k, v)
        for rows, seen, causal in parts(runs, starts[block * each : (block + 1) * each], run, k.shape[2]):
            found, its = _forward(q[:, :, rows], keys[:, :, seen], values[:, :, seen], None, causal, scale, None)
            out[:, :, rows], lse[:, :, rows] = merged(out[:, :, rows], lse[:, :, rows], found, its)
        if later is not None:
            held = later()
    return _laid(out.to(q.dtype)), lse


def backward_body(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float, q_index: Tensor | None, place: Tensor,
    starts: Sequence[int], run: int, group: str, ranks: int,
) -> Body:  # fmt: skip
    """(dq, dk, dv)."""
    at, runs, each = int(place), _runs(q_index, is_causal, run), len(starts) // ranks
    wide = _wide(q.dtype)
    dq = _new(q, *q.shape).to(wide).zero_()
    held, sums = _packed(k, v), None
    for hop in range(ranks):
        later = (yield from _hop(held, at, ranks)) if hop < ranks - 1 else None
        block = (at - hop) % ranks
        keys, values = _unpacked(held, k, v)
        mine = torch.zeros_like(held, dtype=wide)
        dk, dv = _unpacked(mine, k, v)
        for rows, seen, causal in parts(runs, starts[block * each : (block + 1) * each], run, k.shape[2]):
            some = keys[:, :, seen], values[:, :, seen]
            found = _backward_of(grad[:, :, rows], q[:, :, rows], *some, out[:, :, rows], lse[:, :, rows], None, causal, scale, None, False)
            dq[:, :, rows] += found[0]
            dk[:, :, seen] += _ungroup(found[1], some[0])
            dv[:, :, seen] += _ungroup(found[2], some[1])
        if sums is not None:
            mine += sums()
        sums = yield from _hop(mine, at, ranks)
        if later is not None:
            held = later()
    assert sums is not None
    dk, dv = _unpacked(sums(), k, v)
    return _laid(dq.to(q.dtype)), _laid(dk.to(k.dtype)), _laid(dv.to(v.dtype))


@torch.library.custom_op("autopar::ring_attention_v1", mutates_args=())
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, q_index: Tensor | None, place: Tensor, starts: Sequence[int], run: int,
    group: str, ranks: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    found: tuple[Tensor, Tensor] = over_group(forward_body(q, k, v, is_causal, scale, q_index, place, starts, run, group, ranks), group)
    return found


@ring_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, q_index: Tensor | None, place: Tensor, starts: Sequence[int], run: int,
    group: str, ranks: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _new(q, *q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=_wide(q.dtype))


@torch.library.custom_op("autopar::ring_attention_backward_v1", mutates_args=())
def ring_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float, q_index: Tensor | None, place: Tensor,
    starts: Sequence[int], run: int, group: str, ranks: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv)."""
    body = backward_body(grad, q, k, v, out, lse, is_causal, scale, q_index, place, starts, run, group, ranks)
    found: tuple[Tensor, Tensor, Tensor] = over_group(body, group)
    return found


@ring_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float, q_index: Tensor | None, place: Tensor,
    starts: Sequence[int], run: int, group: str, ranks: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _new(q, *q.shape), _new(k, *k.shape), _new(v, *v.shape)
