"""A linear layer and what a loss reads of its result, without that result: the logits of all tokens are never in memory, but of one tile at a time.

    z[t, v] = cap tanh(s (h[t] . w[v] + b[v]) / cap)            scores; without a cap: s (h . w + b)
    picked[t] = z[t, y[t]]     total[t] = sum_v z[t, v]     lse[t] = log sum_v exp z[t, v]

so that picked - lse is the log-probability of the target, total - V lse the sum of all of them (label smoothing), lse^2 what a z-loss adds. And, with gradients p, q, l
of the three,

    dz[t, v] = p[t] [v = y[t]] + q[t] + l[t] exp(z[t, v] - lse[t]),    du = s (1 - (z / cap)^2) dz,    dh = du w,    dw = du^T h,    db[v] = sum_t du[t, v]

`autopar::linear_log_prob_v1` (h [T, D], w [V, D], b? [V], y [T] int64, with_total, scale, cap (0: none), tile) -> (picked [T], total [T] or [0], lse [T]), float32 at least.
A target outside of 0..V-1 picks 0: one that is ignored, or at home on another rank. `autopar::linear_log_prob_backward_v1` has what is wanted of (dh, dw, db), [0] for the rest.

Scores are made again in backward, one product more than the plain layer's three; nothing but lse is kept. The other way, gradients of h and w made in forward (Liger), needs no
product twice but goes over the tokens, whose every chunk reads and writes all of dw in float32: 8 V D bytes a chunk of C tokens against 2 C V D FLOPs, which at 200 FLOPs
a byte is more than the product it saves below 800 tokens a chunk; it holds dw from forward on, in float32; it wants to know the loss's gradient beforehand, and, where
ranks split the vocabulary, has to wait for them in every chunk. Here tiles go over the vocabulary outside and tokens inside: a block of dw is done before the next one
begins, and ranks that split the vocabulary meet once, over three numbers a token.

Products are made in the operands' dtype, as the plain layer makes them, all else in float32. On a GPU a tile's scores are passed over once each way, by a kernel (`triton/scores.py`), where it takes
them; elsewhere by `add_statistics` and `gradient`, which mean the same. A body's name changes with it: compiled graphs are cached by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.kernels.tiles import sides
from autopar.kernels.triton import why_not


def _spans(size: int, step: int) -> Iterator[slice]:
    return (slice(i, min(i + step, size)) for i in range(0, size, step))


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def _products(h: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return torch.mm(h, w.t()) if b is None else torch.addmm(b, h, w.t())


def _scores(x: Tensor, scale: float, cap: float) -> Tensor:
    """In the operands' dtype where nothing is done to them: what reads them then computes in float32 all the same, without a copy of them."""
    if cap:
        return x.to(_wide(x)).mul_(scale / cap).tanh_().mul_(cap)
    return x if scale == 1.0 else x.to(_wide(x)).mul_(scale)


def _less(z: Tensor, column: Tensor) -> Tensor:
    """z - column in float32, beside z. A CPU's kernel copies what it widens; a GPU's reads it."""
    if z.dtype == column.dtype or z.is_cuda:
        return z - column
    return z.to(column.dtype).sub_(column)


def _here(target: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """Of every token the column of its target in a block of words, and whether it is there; [tokens, 1] each."""
    here = (target >= words.start) & (target < words.stop)
    return torch.where(here, target - words.start, 0).unsqueeze(1), here.unsqueeze(1)


def add_statistics(
    x: Tensor, target: Tensor, first: int, scale: float, cap: float, picked: Tensor, total: Tensor | None, largest: Tensor, rest: Tensor
) -> None:
    """Adds a tile of products x, the first of whose columns is of word `first`, to what is known of its rows: the sum of exp z so far is rest exp(largest). Spends x."""
    at, here = _here(target, slice(first, first + x.shape[1]))
    z = _scores(x, scale, cap)
    del x
    picked += torch.where(here, z.gather(1, at), 0.0).squeeze(1)
    if total is not None:
        total += z.sum(1, dtype=total.dtype)
    more = torch.maximum(largest, z.amax(1))
    rest.mul_((largest - more).exp_()).add_(_less(z, more.unsqueeze(1)).exp_().sum(1))
    largest.copy_(more)


def gradient(
    x: Tensor, target: Tensor, first: int, scale: float, cap: float, lse: Tensor, picked: Tensor, total: Tensor | None, normal: Tensor
) -> Tensor:
    """Of a tile of products x, given those of the three results. Spends x."""
    dtype, (at, here) = x.dtype, _here(target, slice(first, first + x.shape[1]))
    z = _scores(x, scale, cap)
    del x
    d = _less(z, lse.unsqueeze(1)).exp_().mul_(normal.unsqueeze(1))
    d.scatter_add_(1, at, torch.where(here, picked.unsqueeze(1), 0.0))
    if total is not None:
        d.add_(total.unsqueeze(1))
    if cap:
        d.mul_(z.div_(cap).square_().neg_().add_(1.0))
    if scale != 1.0:
        d.mul_(scale)
    del z
    return d.to(dtype)


def _passes(h: Tensor) -> tuple[Any, Any]:
    """`add_statistics` and `gradient`, or the kernels that do the same."""
    if why_not(h.device, h.dtype):
        return add_statistics, gradient
    from autopar.kernels.triton import scores

    return scores.add_statistics, scores.gradient


@torch.library.custom_op("autopar::linear_log_prob_v1", mutates_args=())
def linear_log_prob(
    h: Tensor, w: Tensor, b: Tensor | None, target: Tensor, with_total: bool, scale: float, cap: float, tile: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, words = h.shape[0], w.shape[0]
    chunk, block = sides(tokens, words, tile)
    picked = h.new_zeros(tokens, dtype=_wide(h))
    total = torch.zeros_like(picked) if with_total else picked.new_empty(0)
    largest, rest = torch.full_like(picked, -math.inf), torch.zeros_like(picked)
    add, _ = _passes(h)
    for v in _spans(words, block):
        for t in _spans(tokens, chunk):
            # Products have no name here: where something wider is made of them, they go.
            bias = None if b is None else b[v]
            add(
                _products(h[t], w[v], bias),
                target[t],
                v.start,
                scale,
                cap,
                picked[t],
                total[t] if with_total else None,
                largest[t],
                rest[t],
            )
    return picked, total, largest + rest.log()


@linear_log_prob.register_fake
def _(
    h: Tensor, w: Tensor, b: Tensor | None, target: Tensor, with_total: bool, scale: float, cap: float, tile: int
) -> tuple[Tensor, Tensor, Tensor]:
    picked = h.new_empty(h.shape[0], dtype=_wide(h))
    return picked, torch.empty_like(picked) if with_total else picked.new_empty(0), torch.empty_like(picked)


@torch.library.custom_op("autopar::linear_log_prob_backward_v1", mutates_args=())
def linear_log_prob_backward(
    picked: Tensor, total: Tensor | None, normal: Tensor, h: Tensor, w: Tensor, b: Tensor | None, target: Tensor, lse: Tensor, scale: float,
    cap: float, tile: int, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """picked, total, normal: gradients of the three results, in order."""
    tokens, words = h.shape[0], w.shape[0]
    chunk, block = sides(tokens, words, tile)
    wide = _wide(h)
    # What is added up over several tiles is added up in float32.
    dh = h.new_zeros(h.shape if wanted[0] else (0,), dtype=wide if block < words else h.dtype)
    dw = w.new_empty(w.shape if wanted[1] else (0,))
    db = w.new_zeros(words if wanted[2] else 0, dtype=wide)
    _, gradient_of = _passes(h)
    rows = [None if g is None else g.to(wide) for g in (picked, total, normal, lse)]
    for v in _spans(words, block):
        part = w.new_zeros((v.stop - v.start, w.shape[1]) if wanted[1] else (0,), dtype=wide if chunk < tokens else w.dtype)
        for t in _spans(tokens, chunk):
            p, q, n, normaliser = (None if c is None else c[t] for c in rows)
            bias = None if b is None else b[v]
            d = gradient_of(_products(h[t], w[v], bias), target[t], v.start, scale, cap, normaliser, p, q, n)
            if wanted[0]:
                _add_product(dh[t], d, w[v])
            if wanted[1]:
                _add_product(part, d.t(), h[t])
            if wanted[2]:
                db[v] += d.sum(0)
            del d  # before the next tile is made
        if wanted[1]:
            dw[v] = part
        del part
    return dh.to(h.dtype), dw, db.to(w.dtype)


def _add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    if into.dtype == a.dtype:
        into.addmm_(a, b)
    else:
        into.add_(torch.mm(a, b))


@linear_log_prob_backward.register_fake
def _(
    picked: Tensor, total: Tensor | None, normal: Tensor, h: Tensor, w: Tensor, b: Tensor | None, target: Tensor, lse: Tensor, scale: float,
    cap: float, tile: int, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shapes = (h.shape, w.shape, w.shape[:1])
    dh, dw, db = (t.new_empty(s if x else (0,)) for t, s, x in zip((h, w, w), shapes, wanted, strict=True))
    return dh, dw, db


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    h, w, b, target, ctx.with_total, *ctx.rest = inputs
    ctx.save_for_backward(h, w, b, target, output[2])


def _backward(ctx: Any, picked: Tensor, total: Tensor, normal: Tensor) -> tuple[Tensor | None, ...]:
    h, w, b, target, lse = ctx.saved_tensors
    wanted = [bool(x) for x in ctx.needs_input_grad[:3]]
    found = linear_log_prob_backward(picked, total if ctx.with_total else None, normal, h, w, b, target, lse, *ctx.rest, wanted)
    return *(g if x else None for g, x in zip(found, wanted, strict=True)), *(None,) * 5


linear_log_prob.register_autograd(_backward, setup_context=_setup)
