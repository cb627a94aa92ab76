"""Routed experts as one op: every token goes through the K experts that its router chose, and their results are added with the router's scores.

    h[t, k] = x[t] W1[e] + b1[e],  a = gate(h),  y[t, k] = a W2[e] + b2[e],  out[t] = sum_k s[t, k] y[t, k]        e = index[t, k]

and, with g the gradient of out,

    ds = g . y,  dy = s g,  da = dy W2^T,  dh = gate'(h) da,  dx[t] = sum_k dh W1^T,  dW2[e] = sum a^T dy,  dW1[e] = sum x^T dh,  db: sums of dy, dh

`autopar::experts_v1` (x [T, D], index [T, K] int64, scores [T, K], w1 [E, G, D], w2 [E, D, F], b1? [E, G], b2? [E, D], transposed,
interleaved, gate, group, ranks, order) -> [T, D]. transposed: weights are [E, D, G] and [E, F, D]. interleaved: of a gate and what it gates, features stand side
by side (a matter of the sharding rule alone). gate: a name in `gates.py`. Rows are sorted by expert; those of one expert stand together, and a product
of two is a grouped one. Nothing is dropped, and no size depends on data but inside the op. Backward makes h again: it is not kept.

Expert parallelism: with a group of `ranks`, w1 and w2 are this rank's part of the experts (`order` lists all experts, rank by rank; [] if they stand in order),
x, index and scores its part of the tokens, whichever. Counts are exchanged, then rows go to the rank of their expert and their results come back: two exchanges of
rows forward, three backward (x, g, what came of them). Sizes are read on the host once.

When a body (`exchange.py`) changes so must the name: compiled graphs are cached by name.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.kernels.exchange import Body, Exchange, over_group
from autopar.kernels.expert_load import tell
from autopar.kernels.gates import Gate
from autopar.kernels.gates import gate as gate_of
from autopar.kernels.triton import DTYPES, why_not

# ---- rows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Route:
    """order: (token, k) pairs, sorted by expert. send, receive: rows to and from every rank. to_expert: the order of received rows by expert; None where nothing
    was sent. counts: rows of each expert of this rank."""

    order: Tensor
    tokens: Tensor
    send: list[int]
    receive: list[int]
    to_expert: Tensor | None
    counts: list[int]

    def go(self, rows: Tensor) -> Generator[Exchange, Tensor, Tensor]:
        """Rows of (token, k) pairs in `order` -> those of this rank's experts."""
        if self.to_expert is None:
            return rows
        got = yield Exchange(rows.contiguous(), self.send, self.receive)
        return got[self.to_expert]

    def back(self, rows: Tensor) -> Generator[Exchange, Tensor, Tensor]:
        if self.to_expert is None:
            return rows
        there = torch.empty_like(rows)
        there[self.to_expert] = rows
        return (yield Exchange(there, self.receive, self.send))

    def in_order(self, rows: Tensor) -> Tensor:
        """Of every (token, k) pair, as they stand in the index."""
        out = torch.empty_like(rows)
        out[self.order] = rows
        return out


def _route(index: Tensor, here: int, ranks: int, order: Sequence[int]) -> Generator[Exchange, Tensor, _Route]:
    experts, flat = here * ranks, index.reshape(-1)
    if order:
        place = torch.empty(experts, dtype=torch.int64)
        place[torch.tensor(order)] = torch.arange(experts)
        flat = place.to(flat.device)[flat]
    by_expert = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts)
    tokens = by_expert // index.shape[1]
    if ranks == 1:
        return _Route(by_expert, tokens, [], [], None, counts.tolist())
    got = yield Exchange(counts, [here] * ranks, [here] * ranks)
    sizes = torch.stack(
        [counts.view(ranks, here).sum(1), got.view(ranks, here).sum(1)]
    ).tolist()  # on the host: what is exchanged has to be allocated
    tell(sum(sizes[1]), flat.numel())
    local = torch.arange(here, device=flat.device).repeat(ranks).repeat_interleave(got)
    return _Route(by_expert, tokens, sizes[0], sizes[1], torch.argsort(local, stable=True), got.view(ranks, here).sum(0).tolist())


# ---- grouped products ----------------------------------------------------------------------------------------------


def _fused(a: Tensor, *sizes: int) -> bool:
    """Whether torch's grouped product takes these: bfloat16 rows of whole 16-byte units, on devices that have one."""
    units = all(n % 8 == 0 for n in sizes)
    return a.is_cuda and a.dtype == torch.bfloat16 and units and torch.cuda.get_device_capability(a.device) >= (8, 0)


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def _product(rows: Tensor, w: Tensor, counts: Sequence[int]) -> Tensor:
    """[S, I] with w [E, I, O], rows sorted by expert: [S, O]."""
    rows = rows.to(w.dtype)
    if _fused(rows, *w.shape[1:]):
        return F.grouped_mm(rows.contiguous(), w, offs=_ends(counts, rows.device))
    out = rows.new_empty(rows.shape[0], w.shape[2])
    for part, into, matrix in zip(rows.split(counts), out.split(counts), w, strict=True):
        torch.mm(part, matrix, out=into)
    return out


def _outer(a: Tensor, b: Tensor, counts: Sequence[int]) -> Tensor:
    """[S, I] and [S, O]: [E, I, O], zeros for an expert without rows."""
    if _fused(a, a.shape[1], b.shape[1]):
        return F.grouped_mm(a.contiguous().mT, b.contiguous(), offs=_ends(counts, a.device))
    out = a.new_empty(len(counts), a.shape[1], b.shape[1])
    for x, y, into in zip(a.split(counts), b.split(counts), out, strict=True):
        torch.mm(x.mT, y, out=into)
    return out


def _add(rows: Tensor, bias: Tensor | None, counts: Sequence[int]) -> Tensor:
    return rows if bias is None else rows + _repeated(bias, counts)


def _repeated(bias: Tensor, counts: Sequence[int]) -> Tensor:
    return bias.repeat_interleave(torch.tensor(counts, device=bias.device), 0, output_size=sum(counts))


def _sums(rows: Tensor, counts: Sequence[int]) -> Tensor:
    return torch.stack([part.sum(0) for part in rows.split(counts)])


# ---- passes over rows, in one each where there is a kernel ---------------------------------------------------------


def _kernel(gate: Gate, *rows: Tensor) -> Any:
    """Of the gate's form; None where there is none for these."""
    if gate.form is None or any(why_not(t.device, t.dtype) for t in rows):
        return None
    from autopar.kernels.triton import gate as kernel

    return kernel


def _gated(gate: Gate, h: Tensor) -> Tensor:
    kernel = _kernel(gate, h)
    a: Tensor = gate.forward(h) if kernel is None else kernel.forward(gate.form, h)
    return a


def _combined(r: _Route, y: Tensor, shape: Sequence[int], scores: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows of (token, k) pairs in the route's order, weighted and added up: [T, D]. shape: [T, K]."""
    dtypes = (dtype, *([] if scores is None else [scores.dtype]))
    if why_not(y.device, y.dtype) or any(d not in DTYPES for d in dtypes):
        rows = r.in_order(y).view(*shape, y.shape[1])
        return (rows if scores is None else rows * scores.unsqueeze(-1)).sum(1).to(dtype)
    from autopar.kernels.triton.combine import combine

    place = torch.empty_like(r.order)
    place[r.order] = torch.arange(len(place), device=place.device)
    return combine(y.contiguous(), place.view(*shape), scores, dtype)


# ---- the bodies ----------------------------------------------------------------------------------------------------


def _ways(w1: Tensor, w2: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Both as [E, in, out]."""
    return (w1, w2) if transposed else (w1.mT, w2.mT)


def forward_body(
    x: Tensor, index: Tensor, scores: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, transposed: bool, interleaved: bool,
    gate: str, group: str, ranks: int, order: Sequence[int],
) -> Body:  # fmt: skip
    up, down = _ways(w1, w2, transposed)
    r = yield from _route(index, w1.shape[0], ranks, order)
    rows = yield from r.go(x[r.tokens])
    h = _add(_product(rows, up, r.counts), b1, r.counts)
    del rows  # what is done with goes: rows are the most of what an operator takes (`autopar.cost.experts`)
    a = _gated(gate_of(gate), h)
    del h
    y = _add(_product(a, down, r.counts), b2, r.counts)
    del a
    y = yield from r.back(y)
    return _combined(r, y, index.shape, scores, x.dtype)


def backward_body(
    grad: Tensor, x: Tensor, index: Tensor, scores: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None,
    transposed: bool, interleaved: bool, gate: str, group: str, ranks: int, order: Sequence[int],
) -> Body:  # fmt: skip
    """(dx, dscores, dw1, dw2, db1, db2). The score's gradient is made where the expert is, g W2^T . a: y does not travel again."""
    (up, down), wide = _ways(w1, w2, transposed), torch.promote_types(w2.dtype, scores.dtype)
    r = yield from _route(index, w1.shape[0], ranks, order)
    rows = (yield from r.go(x[r.tokens])).to(w1.dtype)
    g = (yield from r.go(grad[r.tokens])).to(wide)
    s = yield from r.go(scores.reshape(-1)[r.order].unsqueeze(1))
    h = _add(_product(rows, up, r.counts), b1, r.counts)
    between = gate_of(gate)
    kernel = _kernel(between, h, s) if h.dtype == w2.dtype else None
    if kernel is None:
        a = between.forward(h)
        unweighted = _product(g, down.mT, r.counts)
        ds = (unweighted.to(wide) * a).sum(-1, keepdim=True)
    else:  # over what they are made of: the gradient of h over h, a over the other
        dh, a, ds = kernel.backward(between.form, h, _product(g, down.mT, r.counts), s)
        ds = ds.to(wide)
    if b2 is not None:
        ds = ds + (g * _repeated(b2, r.counts)).sum(-1, keepdim=True)
    dy = (g * s).to(w2.dtype)
    del g
    dw2 = _outer(a, dy, r.counts)
    db2 = grad.new_empty((0,)) if b2 is None else _sums(dy, r.counts)
    del a, dy
    if kernel is None:
        da = (unweighted * s).to(w2.dtype)
        del unweighted
        dh = between.backward(h, da)
        del da
    del h
    dw1 = _outer(rows, dh, r.counts)
    del rows
    dx = _combined(r, (yield from r.back(_product(dh, up.mT, r.counts))), index.shape, None, x.dtype)
    ds = r.in_order((yield from r.back(ds.to(scores.dtype)))).view(scores.shape)
    if not transposed:
        dw1, dw2 = dw1.mT.contiguous(), dw2.mT.contiguous()
    db1 = grad.new_empty((0,)) if b1 is None else _sums(dh, r.counts)
    return dx, ds, dw1, dw2, db1, db2


# ---- the ops -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("autopar::experts_v1", mutates_args=())
def experts(
    x: Tensor, index: Tensor, scores: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, transposed: bool, interleaved: bool,
    gate: str, group: str, ranks: int, order: Sequence[int],
) -> Tensor:  # fmt: skip
    out: Tensor = over_group(forward_body(x, index, scores, w1, w2, b1, b2, transposed, interleaved, gate, group, ranks, order), group)
    return out


@experts.register_fake
def _(
    x: Tensor, index: Tensor, scores: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, transposed: bool, interleaved: bool,
    gate: str, group: str, ranks: int, order: Sequence[int],
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], w2.shape[2 if transposed else 1])


@torch.library.custom_op("autopar::experts_backward_v1", mutates_args=())
def experts_backward(
    grad: Tensor, x: Tensor, index: Tensor, scores: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None,
    transposed: bool, interleaved: bool, gate: str, group: str, ranks: int, order: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dscores, dw1, dw2, db1, db2), the last two empty where there is no bias."""
    body = backward_body(grad, x, index, scores, w1, w2, b1, b2, transposed, interleaved, gate, group, ranks, order)
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = over_group(body, group)
    return found


@experts_backward.register_fake
def _(
    grad: Tensor, x: Tensor, index: Tensor, scores: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None,
    transposed: bool, interleaved: bool, gate: str, group: str, ranks: int, order: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    none = grad.new_empty((0,))
    biases = [none if b is None else b.new_empty(b.shape) for b in (b1, b2)]
    x, scores, w1, w2 = (t.new_empty(t.shape) for t in (x, scores, w1, w2))
    return x, scores, w1, w2, biases[0], biases[1] if b2 is not None else grad.new_empty((0,))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, transposed, interleaved, gate, group, ranks, order = inputs
    ctx.save_for_backward(*tensors)
    ctx.rest = (transposed, interleaved, gate, group, ranks, order)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *_, b1, b2 = ctx.saved_tensors
    dx, ds, dw1, dw2, db1, db2 = experts_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return dx, None, ds, dw1, dw2, None if b1 is None else db1, None if b2 is None else db2, *(None,) * 6


experts.register_autograd(_backward, setup_context=_setup)
