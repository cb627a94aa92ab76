"""Attention as one op: softmax(scale q k^T + bias) v, with its log-sum-exp and a backward of its own.

    s = scale q k^T + bias,  lse = log sum_keys exp s,  p = exp(s - lse),  out = p v

and, with g the gradient of out and delta = sum_d g out (Dao et al., FlashAttention, section 3.1):

    dv = p^T g,  ds = p (g v^T - delta),  dq = scale ds k,  dk = scale ds^T q,  dbias = ds

`autopar::attention_v2` (q [B, Hq, Q, E], k [B, Hkv, S, E], v [B, Hkv, S, D], bias? [B|1, Hq|1, Q|1, S], is_causal, scale, q_index?, before, after)
-> (out [B, Hq, Q, D], lse [B, Hq, Q] in float32, float64 for doubles).

- Hq is a multiple of Hkv: query head h reads key/value head h // (Hq / Hkv).
- is_causal: query i sees keys 0 .. i. q_index [Q], int64: the global index of every query, where a rank has some of them only. Neighbouring queries are computed together, in two
  kernels whose results are merged: of their own keys, causal, and of all before. So there is no mask of queries x keys, and what causality hides is skipped (without a bias).
- before, after: what is known of the bias, that query i sees no key before i - before nor behind i + after (below zero: nothing is known). It says so itself;
  ring attention (`autopar.kernels.ring`) leaves out what is beyond.
- A row that sees no key gives zeros and passes no gradient, as torch's attention does; its lse is -inf.
- out, dq, dk and dv lie as torch's kernels make them, heads within queries or keys ([B, Q, H, D] in memory), so that what projects them reads them without a copy;
  operands may lie anyhow, elements of a head together.
- `attention_backward_v3` takes out and lse of all keys a query sees; given some of those keys it gives their part of dq, and their dk and dv. It also gives the gradient of the bias, summed to the bias's shape, where one is wanted.

torch's fused kernels do the work where they mean the same, the formulas elsewhere: on a GPU cuDNN's or flash attention, as torch would choose, where there is no bias and half precision, else
the memory-efficient one. CUDA's fused backward adds in no fixed order unless `torch.use_deterministic_algorithms` is on, as in eager torch. When a body changes so must the name: compiled graphs are cached
by name.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar import _torch
from autopar.kernels.triton import DTYPES, why_not

aten = torch.ops.aten
LSE_ROWS = 32  # the memory-efficient kernel wants an lse padded to a multiple of this


# ---- operands ------------------------------------------------------------------------------------------------------


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _causal(q: Tensor, k: Tensor, q_index: Tensor | None) -> Tensor:
    """[Q, S] in q's dtype: -inf where a causal query does not see a key."""
    rows = torch.arange(q.shape[2], device=q.device) if q_index is None else q_index
    hidden = rows.unsqueeze(1) < torch.arange(k.shape[2], device=q.device)
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, -math.inf)


def _mask(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, q_index: Tensor | None) -> tuple[Tensor | None, bool]:
    """What is added to the scores, of four dims and q's dtype, and whether causality is still to be seen to.

    It is where that is possible: kernels that know of it skip half of the work.
    """
    if bias is not None:
        bias = bias.to(q.dtype)
    if not is_causal or (bias is None and q_index is None):
        return bias, is_causal
    hidden = _causal(q, k, q_index)[None, None]
    return (hidden if bias is None else bias + hidden), False


def _group(x: Tensor, heads: int) -> Tensor:
    """Key/value heads repeated to `heads`."""
    return _rows(x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1))


def _rows(x: Tensor) -> Tensor:
    """The elements of a head together: what kernels read."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _laid(x: Tensor) -> Tensor:
    """[B, H, N, D], as [B, N, H, D] in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _new(x: Tensor, *shape: Any) -> Tensor:
    b, h, n, d = shape
    return x.new_empty((b, n, h, d)).transpose(1, 2)


def _ungroup(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of `x` from that of `_group(x)`."""
    groups, heads = x.shape[1], grad.shape[1]
    if groups != heads:
        grad = grad.unflatten(1, (groups, heads // groups)).sum(2)
    return _laid(grad.to(x.dtype))


# ---- the formulas --------------------------------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    wide = _wide(q.dtype)
    s = q.to(wide) @ k.to(wide).mT * scale
    if is_causal:
        s = s + _causal(q, k, None)
    return s if mask is None else s + mask


def _probabilities(s: Tensor) -> Tensor:
    """softmax, zeros in a row without keys. Not exp(s - lse): where the lowest finite number hides every key of a row, the lse has lost its logarithm."""
    return s.softmax(-1).masked_fill((s == -math.inf).all(-1, keepdim=True), 0.0)


def _share(s: Tensor, lse: Tensor) -> Tensor:
    """What these keys have of a row's sum over all the keys that `lse` is of: exactly 1 where they are all of them, a row that the lowest finite
    number hides included."""
    mine = s.logsumexp(-1)
    return torch.where(mine == -math.inf, 0.0, (mine - lse).exp()).unsqueeze(-1)


def _math(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    s = _scores(q, k, mask, is_causal, scale)
    return (_probabilities(s) @ v.to(s.dtype)).to(q.dtype), s.logsumexp(-1)


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    s = _scores(q, k, mask, is_causal, scale)
    p = _probabilities(s) * _share(s, lse)
    grad, q, k, v, out = (x.to(p.dtype) for x in (grad, q, k, v, out))
    ds = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True))
    return ds @ k * scale, ds.mT @ q * scale, p.mT @ grad, ds


# ---- torch's kernels -----------------------------------------------------------------------------------------------


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> str:
    """Which of torch's kernels means the same for this call: "cpu", "cudnn", "flash", "efficient", or "math" for none."""
    e, d = q.shape[-1], v.shape[-1]
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return "math"
    if q.device.type == "cpu":
        return "cpu" if e == d else "math"
    if q.device.type != "cuda" or q.dtype == torch.float64 or e % 8 or d % 8:
        return "math"
    # CUDA's flash kernel aligns causality at the last key, attention at the first: the same for as many queries as keys.
    if q.dtype != torch.float32 and e == d <= 256 and mask is None and (not is_causal or q.shape[2] == k.shape[2]):
        return "cudnn" if _torch.prefers_cudnn_attention(q, k, v, is_causal) else "flash"
    return "efficient"


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The memory-efficient kernel reads a mask in pieces of 16 bytes, expanded to every head."""
    if mask is None:
        return None
    keys = k.shape[2]
    if mask.stride(-1) != 1 or (mask.shape[2] > 1 and mask.stride(2) % 8):
        mask = mask.contiguous()
    return F.pad(mask, (0, -keys % 8))[..., :keys].expand(*q.shape[:3], keys)


def _fused(kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if kernel == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    elif kernel == "cudnn":
        out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)[:2]
        lse = lse.reshape(q.shape[:3])
    elif kernel == "flash":
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[:2]
    else:
        out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, _aligned(mask, q, k), True, 0.0, is_causal, scale=scale)[:2]
        lse = lse[..., : q.shape[2]]
    # What the kernels say of a row without keys (0, +inf) differs; -inf is what merges with the lse of other keys.
    return out, lse if mask is None else lse.masked_fill((mask == -math.inf).all(-1), -math.inf)


def _fused_backward(
    kernel: str, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, is_causal: bool,
    scale: float, bias_grad: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # p = 0
    found: tuple[Tensor, ...]
    if kernel == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = backward(grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale)
        return found
    if kernel == "cudnn":
        unused = torch.zeros((), dtype=torch.int64, device=q.device)  # state of the dropout that is none
        backward = aten._scaled_dot_product_cudnn_attention_backward
        found = backward(
            grad, q, k, v, out, lse.unsqueeze(-1), unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0, is_causal, scale=scale
        )
        return found
    if kernel == "flash":
        unused = torch.zeros(2, dtype=torch.int64, device=q.device).view(torch.uint64)  # state of the dropout that is none
        backward = aten._scaled_dot_product_flash_attention_backward
        found = backward(grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, unused, unused, scale=scale)
        return found
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    found = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, _aligned(mask, q, k), out, F.pad(lse, (0, -lse.shape[-1] % LSE_ROWS), value=math.inf), unused, unused,
        0.0, [True, True, True, bias_grad], is_causal, scale=scale,
    )  # fmt: skip
    return found


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float, q_index: Tensor | None
) -> tuple[Tensor, Tensor]:
    mask, is_causal = _mask(q, k, bias, is_causal, q_index)
    q, k, v = _rows(q), _group(k, q.shape[1]), _group(v, q.shape[1])
    kernel = _kernel(q, k, v, mask, is_causal)
    if kernel == "math":
        return _math(q, k, v, mask, is_causal, scale)
    return _fused(kernel, q, k, v, mask, is_causal, scale)


def _backward_of(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, is_causal: bool, scale: float,
    q_index: Tensor | None, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As attention_backward, dk and dv of as many heads as q has."""
    mask, is_causal = _mask(q, k, bias, is_causal, q_index)
    # Some kernels read out as they made it, whatever strides it says it has.
    grad, q, out, lse = _rows(grad), _rows(q), _laid(out), lse.contiguous()
    keys, values = _group(k, q.shape[1]), _group(v, q.shape[1])
    kernel = _kernel(q, keys, values, mask, is_causal)
    if kernel == "math" or (kernel == "cpu" and bias_grad):
        dq, dk, dv, ds = _math_backward(grad, q, keys, values, out, lse, mask, is_causal, scale)
    else:
        dq, dk, dv, *rest = _fused_backward(kernel, grad, q, keys, values, out, lse, mask, is_causal, scale, bias_grad)
        ds = rest[0] if rest else grad
    dbias = grad.new_empty((0,))
    if bias_grad:
        assert bias is not None
        dbias = ds.sum_to_size(bias.shape).to(bias.dtype).contiguous()
    return dq, dk, dv, dbias


# ---- a part of the queries -----------------------------------------------------------------------------------------

PIECES = 16  # runs of neighbouring queries: of more, kernels are too short to be worth it


class _Piece(NamedTuple):
    """Neighbouring queries, at `rows` of those that are here: they see all keys before `before`, and of `keys` those up to their own, if is_causal."""

    rows: slice
    before: int
    keys: slice
    is_causal: bool

    def parts(self) -> list[tuple[slice, bool]]:
        """Keys, and whether they are seen up to the query's own."""
        return [(self.keys, self.is_causal), *([(slice(0, self.before), False)] if self.before else [])]

    def of(self, keys: slice, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What of the operands is of these queries and keys."""
        return q[:, :, self.rows], k[:, :, keys], v[:, :, keys]


def _pieces(q: Tensor, k: Tensor, is_causal: bool, q_index: Tensor | None) -> list[_Piece] | None:
    """A rank's queries of causal attention, as runs of neighbours: a kernel that knows of causality does each run's own keys, and one without a mask those before. A mask
    instead has queries x keys elements, and nothing of it is skipped. None where that is not what to do. Reads q_index, which waits for the device.

    Not with a bias: where it hides a row by the lowest finite number, the log-sum-exps of its pieces have lost how many keys each has."""
    if not is_causal or q_index is None or q.shape[2] == 0:
        return None
    starts: list[int] = [0, *((q_index.diff() != 1).nonzero().flatten() + 1).tolist()]
    if len(starts) > PIECES:
        return None
    firsts: list[int] = q_index[starts].tolist()
    keys, found = k.shape[2], list[_Piece]()
    for first, a, b in zip(firsts, starts, [*starts[1:], len(q_index)], strict=True):
        inside = max(0, min(first + b - a, keys) - first)  # queries that have a key of their own
        if inside:
            found.append(_Piece(slice(a, a + inside), first, slice(first, first + inside), True))
        if a + inside < b:
            found.append(_Piece(slice(a + inside, b), 0, slice(0, keys), False))
    return found


def merged(out: Tensor, lse: Tensor, other: Tensor, its: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, from that over each (Dao et al., FlashAttention-2, section 2.3.1). out: [B, H, Q, D]; lse: [B, H, Q], -inf where no key is seen."""
    both = torch.logaddexp(lse, its)
    base = both.masked_fill(both == -math.inf, 0.0)
    mine, theirs = (lse - base).exp().unsqueeze(-1), (its - base).exp().unsqueeze(-1)
    return (out * mine + other * theirs).to(out.dtype), both


def merge(into: Tensor, sums: Tensor, out: Tensor, lse: Tensor, other: Tensor, its: Tensor) -> None:
    """`merged`, to where it is to lie; `into` may be `out`, and `sums` `lse`. On a GPU in one pass."""
    if why_not(out.device, other.dtype) or out.dtype not in DTYPES or out.stride(-1) != 1:
        into[:], sums[:] = merged(out, lse, other, its)
        return
    from autopar.kernels.triton import merge as kernel

    kernel.merge(into, sums, out, lse, _rows(other), its)


# ---- the ops -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("autopar::attention_v2", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float,
    q_index: Tensor | None,
    before: int = -1,
    after: int = -1,
) -> tuple[Tensor, Tensor]:
    pieces = _pieces(q, k, is_causal, q_index) if bias is None else None
    if pieces is None:
        out, lse = _forward(q, k, v, bias, is_causal, scale, q_index)
        return _laid(out), lse.contiguous()
    out, lse = _new(q, *q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=_wide(q.dtype))
    for piece in pieces:
        found = [_forward(*piece.of(keys, q, k, v), None, causal, scale, None) for keys, causal in piece.parts()]
        into, sums = out[:, :, piece.rows], lse[:, :, piece.rows]
        if len(found) > 1:
            merge(into, sums, *found[0], *found[1])
        else:
            into[:], sums[:] = found[0]
    return out, lse


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float,
    q_index: Tensor | None,
    before: int = -1,
    after: int = -1,
) -> tuple[Tensor, Tensor]:
    return _new(q, *q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=_wide(q.dtype))


@torch.library.custom_op("autopar::attention_backward_v3", mutates_args=())
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, is_causal: bool, scale: float,
    q_index: Tensor | None, bias_grad: bool, before: int = -1, after: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dbias); dbias is an empty tensor unless `bias_grad`."""
    pieces = _pieces(q, k, is_causal, q_index) if bias is None else None
    if pieces is None:
        dq, dk, dv, dbias = _backward_of(grad, q, k, v, out, lse, bias, is_causal, scale, q_index, bias_grad)
        return _laid(dq.to(q.dtype)), _ungroup(dk, k), _ungroup(dv, v), dbias
    wide = _wide(q.dtype) if len(pieces) > 1 else q.dtype  # keys that several pieces see get a sum
    dq, dk, dv = _new(q, *q.shape), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for piece in pieces:
        rows = piece.rows
        for i, (keys, causal) in enumerate(piece.parts()):
            some = piece.of(keys, q, k, v)
            found = _backward_of(grad[:, :, rows], *some, out[:, :, rows], lse[:, :, rows], None, causal, scale, None, False)
            dq[:, :, rows] = found[0] if i == 0 else dq[:, :, rows] + found[0]
            dk[:, :, keys] += _ungroup(found[1], some[1])
            dv[:, :, keys] += _ungroup(found[2], some[2])
    return dq, _laid(dk.to(k.dtype)), _laid(dv.to(v.dtype)), grad.new_empty((0,))


@attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, is_causal: bool, scale: float,
    q_index: Tensor | None, bias_grad: bool, before: int = -1, after: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dbias = bias.new_empty(bias.shape) if bias_grad and bias is not None else grad.new_empty((0,))
    return _new(q, *q.shape), _new(k, *k.shape), _new(v, *v.shape), dbias


def _setup(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, is_causal, scale, q_index, before, after = inputs
    ctx.save_for_backward(q, k, v, output[0], output[1], bias, q_index)
    ctx.rest = (is_causal, scale, before, after)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, bias, q_index = ctx.saved_tensors
    is_causal, scale, before, after = ctx.rest
    bias_grad = ctx.needs_input_grad[3]
    dq, dk, dv, dbias = attention_backward(grad, q, k, v, out, lse, bias, is_causal, scale, q_index, bias_grad, before, after)
    return dq, dk, dv, dbias if bias_grad else None, None, None, None, None, None


attention.register_autograd(_backward, setup_context=_setup)
