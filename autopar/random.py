"""Counter-based random numbers in plain integer torch ops.

A number is a function of (seed, step, position of the random op in the graph, global index of the element) and nothing else: the same on any
mesh, when recomputed, in eager and under Inductor, on CPU and GPU. All arithmetic is on int64 tensors that hold 32-bit
words, with multipliers below 2^31, so that no product leaves 63 bits. The mixer is the xorshift-multiply finaliser in the manner of
MurmurHash3's fmix32; two keyed rounds make a block of it (cf. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x2C1B3C6D) & _MASK
    x = x ^ (x >> 12)
    x = (x * 0x297A2D39) & _MASK
    return x ^ (x >> 15)


def bits(seed: Tensor, op_index: int, index: Tensor, stream: int = 0) -> Tensor:
    """Uniform words in [0, 2^32), int64, of `index`'s shape. seed: int64 [2] = (seed, step); index: int64, below 2^63."""
    key = _mix((seed[0] & _MASK) ^ 0x9E3779B9)
    key = _mix(key ^ ((seed[0] >> 32) & _MASK))
    key = _mix((key + (seed[1] & _MASK)) & _MASK)
    key = _mix(key ^ ((seed[1] >> 32) & _MASK))
    key = _mix((key + op_index * 4 + stream) & _MASK)
    other = _mix(key ^ 0x5BD1E995)
    word = _mix((index & _MASK) ^ key)
    return _mix((word + ((index >> 32) & _MASK) * 0x3C6EF372 + other) & _MASK)


def keep_mask(seed: Tensor, op_index: int, index: Tensor, p: float) -> Tensor:
    """Bool: False with probability p (to 2^-32)."""
    return bits(seed, op_index, index) >= round(p * 2**32)


def uniform(seed: Tensor, op_index: int, index: Tensor, dtype: torch.dtype = torch.float32, stream: int = 0) -> Tensor:
    """Uniform in [0, 1), with as many bits as `dtype` holds."""
    high = bits(seed, op_index, index, stream)
    if dtype == torch.float64:
        low = bits(seed, op_index, index, stream + 2)
        return ((high << 21) | (low >> 11)).to(torch.float64) * 2.0**-53
    kept = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]
    return ((high >> (32 - kept)).to(torch.float32) * 2.0**-kept).to(dtype)


def normal(seed: Tensor, op_index: int, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal (Box & Muller 1958)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    u, v = uniform(seed, op_index, index, wide), uniform(seed, op_index, index, wide, stream=1)
    return (torch.sqrt(-2.0 * torch.log1p(-u)) * torch.cos(2.0 * math.pi * v)).to(dtype)


def randint(seed: Tensor, op_index: int, index: Tensor, low: int, high: int) -> Tensor:
    """Integers in [low, high), int64; high - low below 2^31."""
    return low + ((bits(seed, op_index, index) * (high - low)) >> 32)


def dropout(x: Tensor, p: float, seed: Tensor, op_index: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """(x with a share p of its elements zero and the rest scaled by 1 / (1 - p), the mask of what is kept)."""
    mask = keep_mask(seed, op_index, index, p)
    return x * mask * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), mask


class EagerRandom(TorchFunctionMode):
    """In here, eager PyTorch on one device draws the very numbers that a captured step draws: the oracle of our tests.

    seed, step: as in `rng_state()`. Random ops are numbered in the order they are called, as they are in a captured graph.
    """

    def __init__(self, seed: int, step: int) -> None:
        super().__init__()
        self.seed = torch.tensor([seed, step])
        self.count = 0

    def _next(self, shape: Any) -> tuple[int, Tensor]:
        self.count += 1
        return self.count - 1, torch.arange(math.prod(shape)).reshape(tuple(shape))

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (F.dropout, torch.dropout):
            x, p, train = _arguments(args, kwargs, ("input", "p", "training" if func is F.dropout else "train"), (None, 0.5, True))
            return self.dropout(x, p) if train and p > 0.0 else x
        if func is F.scaled_dot_product_attention and _arguments(args, kwargs, _SDPA, _SDPA_DEFAULTS)[4] > 0.0:
            return self.attention(*_arguments(args, kwargs, _SDPA, _SDPA_DEFAULTS))
        if func in _DRAWS:
            like = func(*args, **kwargs)
            op, index = self._next(like.shape)
            draw = normal if func in (torch.randn, torch.randn_like) else uniform
            return draw(self.seed, op, index, like.dtype).to(like.device)
        return func(*args, **kwargs)

    def dropout(self, x: Tensor, p: float) -> Tensor:
        op, index = self._next(x.shape)
        return dropout(x, p, self.seed, op, index)[0]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: Any, gqa: bool) -> Tensor:
        """softmax, then dropout on [B, H, Q, S], then v: what attention with dropout means."""
        if gqa:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        half = math.sqrt(q.shape[-1] ** -0.5 if scale is None else scale)
        scores = (q * half) @ (k * half).transpose(-1, -2)
        if causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            mask = seen if mask is None else mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        op, index = self._next(scores.shape)
        return dropout(torch.ops.aten._safe_softmax(scores, -1), p, self.seed, op, index)[0] @ v


_DRAWS = (torch.rand, torch.rand_like, torch.randn, torch.randn_like)
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_SDPA_DEFAULTS = (None, None, None, None, 0.0, False, None, False)


def _arguments(args: Any, kwargs: dict[str, Any], names: tuple[str, ...], defaults: tuple[Any, ...]) -> list[Any]:
    return [args[i] if i < len(args) else kwargs.get(n, d) for i, (n, d) in enumerate(zip(names, defaults, strict=True))]
