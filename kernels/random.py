"""Counter-based random numbers in plain integer torch ops.

A number is a function of (seed, step, position of the random op in the graph, global index of the element) and nothing else: the same on any
mesh, when recomputed, in eager and under Inductor, on CPU and GPU. All arithmetic is on int64 tensors that hold 32-bit words, with
multipliers below 2^31, so that no product leaves 63 bits. The mixer is the xorshift-multiply finaliser in the manner of MurmurHash3's fmix32;
two rounds, each with a 32-bit key of its own, make a block of it (cf. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

`SAMPLERS` says what each of torch's random ops draws; a captured step and `EagerRandom`, eager PyTorch with these numbers, both read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from autopar._torch import TorchDispatchMode

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


def _key(seed: Tensor, op_index: int, stream: int, salt: int) -> Tensor:
    key = _mix((seed[0] & _MASK) ^ salt)
    key = _mix(key ^ ((seed[0] >> 32) & _MASK))
    key = _mix((key + (seed[1] & _MASK)) & _MASK)
    key = _mix(key ^ ((seed[1] >> 32) & _MASK))
    return _mix((key + op_index * 4 + stream) & _MASK)


def bits(seed: Tensor, op_index: int, index: Tensor, stream: int = 0) -> Tensor:
    """Uniform words in [0, 2^32), int64, of `index`'s shape. seed: int64 [2] = (seed, step); index: int64, below 2^63."""
    # Two keys: one of 32 bits would repeat itself among the op calls of a long run.
    word = _mix((index & _MASK) ^ _key(seed, op_index, stream, 0x9E3779B9))
    high = (index >> 32) * 0x3C6EF372
    return _mix((word + (high & _MASK) + _key(seed, op_index, stream, 0x5BD1E995)) & _MASK)


def chance(seed: Tensor, op_index: int, index: Tensor, p: float) -> Tensor:
    """Bool: True with probability p (to 2^-32)."""
    return bits(seed, op_index, index) < round(p * 2**32)


def keep_mask(seed: Tensor, op_index: int, index: Tensor, p: float) -> Tensor:
    """Bool: False with probability p."""
    return chance(seed, op_index, index, 1.0 - p)


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
    """Integers in [low, high), int64; high - low below 2^63."""
    if high - low < 1 << 31:
        return low + ((bits(seed, op_index, index) * (high - low)) >> 32)
    word = (bits(seed, op_index, index) << 31) | (bits(seed, op_index, index, stream=1) >> 1)
    return low + word % (high - low)


def dropout(x: Tensor, p: float, seed: Tensor, op_index: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """(x with a share p of its elements zero and the rest scaled by 1 / (1 - p), the mask of what is kept)."""
    mask = keep_mask(seed, op_index, index, p)
    return x * mask * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), mask


# ---- torch's random ops ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """One call of a random op. index: global row-major index of every element it gives; dtype: of what it gives."""

    seed: Tensor
    op_index: int
    index: Tensor
    dtype: torch.dtype

    def uniform(self) -> Tensor:
        return uniform(self.seed, self.op_index, self.index, self.dtype)

    def open_uniform(self) -> Tensor:
        """In (0, 1): both its logarithms are finite."""
        return (1.0 - uniform(self.seed, self.op_index, self.index, torch.float64)).clamp(max=1.0 - 2.0**-53)

    def normal(self) -> Tensor:
        return normal(self.seed, self.op_index, self.index, self.dtype)

    def chance(self, p: Tensor | float) -> Tensor:
        if isinstance(p, Tensor):
            return (uniform(self.seed, self.op_index, self.index, torch.float64) < p).to(self.dtype)
        return chance(self.seed, self.op_index, self.index, p).to(self.dtype)

    def randint(self, low: int, high: int) -> Tensor:
        return randint(self.seed, self.op_index, self.index, low, high).to(self.dtype)

    def exponential(self, rate: float) -> Tensor:
        return (-torch.log(self.open_uniform()) / rate).to(self.dtype)

    def cauchy(self, median: float, sigma: float) -> Tensor:
        return (median + sigma * torch.tan(math.pi * (self.open_uniform() - 0.5))).to(self.dtype)

    def geometric(self, p: float) -> Tensor:
        """How many tries of chance p until the first success."""
        return torch.ceil(torch.log(self.open_uniform()) / math.log1p(-p)).clamp(min=1.0).to(self.dtype)


Sampler = Callable[..., Tensor]
# By op, of the op's own arguments (without dtype, device and the like). Tensor arguments are of the draw's shape.
SAMPLERS: dict[str, Sampler] = {
    "aten.rand.default": lambda d, size: d.uniform(),
    "aten.rand_like.default": lambda d, x: d.uniform(),
    "aten.uniform.default": lambda d, x, low=0.0, high=1.0: d.uniform() * (high - low) + low,
    "aten.randn.default": lambda d, size: d.normal(),
    "aten.randn_like.default": lambda d, x: d.normal(),
    "aten.normal_functional.default": lambda d, x, mean=0.0, std=1.0: d.normal() * std + mean,
    "aten.normal.Tensor_Tensor": lambda d, mean, std: d.normal() * std + mean,
    "aten.normal.Tensor_float": lambda d, mean, std=1.0: d.normal() * std + mean,
    "aten.normal.float_Tensor": lambda d, mean, std: d.normal() * std + mean,
    "aten.normal.float_float": lambda d, mean, std, size: d.normal() * std + mean,
    "aten.log_normal.default": lambda d, x, mean=1.0, std=2.0: (d.normal() * std + mean).exp(),
    "aten.exponential.default": lambda d, x, rate=1.0: d.exponential(rate),
    "aten.cauchy.default": lambda d, x, median=0.0, sigma=1.0: d.cauchy(median, sigma),
    "aten.geometric.default": lambda d, x, p: d.geometric(p),
    "aten.bernoulli.default": lambda d, p: d.chance(p),
    "aten.bernoulli.Tensor": lambda d, x, p: d.chance(p),
    "aten.bernoulli.p": lambda d, x, p=0.5: d.chance(p),
    "aten.randint.default": lambda d, high, size: d.randint(0, high),
    "aten.randint.low": lambda d, low, high, size: d.randint(low, high),
    "aten.randint_like.default": lambda d, x, high: d.randint(0, high),
    "aten.randint_like.low_dtype": lambda d, x, low, high: d.randint(low, high),
}
_NOT_OF_THE_DRAW = ("dtype", "layout", "device", "pin_memory", "memory_format", "generator")


def sample(target: str, draw: Draw, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return SAMPLERS[target](draw, *args, **{k: v for k, v in kwargs.items() if k not in _NOT_OF_THE_DRAW}).to(draw.dtype)


# What writes into its first argument, and the op that capture makes of it.
_IN_PLACE = {
    "aten.uniform_.default": "aten.uniform.default",
    "aten.normal_.default": "aten.normal_functional.default",
    "aten.log_normal_.default": "aten.log_normal.default",
    "aten.exponential_.default": "aten.exponential.default",
    "aten.cauchy_.default": "aten.cauchy.default",
    "aten.geometric_.default": "aten.geometric.default",
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.bernoulli_.Tensor": "aten.bernoulli.Tensor",
}


class _AttentionByFormulas(TorchFunctionMode):
    """Attention with dropout is computed step by step, as it is captured: a GPU's fused kernels draw their numbers inside."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0.0:
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class EagerRandom(TorchDispatchMode):
    """In here, eager PyTorch on one device draws the very numbers that a captured step draws: the oracle of our tests.

    seed, step: as in `rng_state()`. Random ops are numbered in the order they run, as they are in a captured graph. Dropout on a CPU is a
    product with bernoulli_(1 - p); a captured dropout keeps an element just where that draws one.
    """

    def __init__(self, seed: int, step: int) -> None:
        super().__init__()
        self.seed = torch.tensor([seed, step])
        self.count = 0
        self._attention = _AttentionByFormulas()

    def __enter__(self) -> EagerRandom:
        self._attention.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._attention.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = str(func)
        if target == "aten.native_dropout.default":
            x, p, train = args
            if train is False:
                return func(*args, **kwargs)
            draw = self._next(x)
            return dropout(x, p, draw.seed, draw.op_index, draw.index)
        if target in _IN_PLACE:
            return args[0].copy_(sample(_IN_PLACE[target], self._next(args[0]), args, kwargs))
        if target in SAMPLERS:
            return sample(target, self._next(func(*args, **kwargs)), args, kwargs)
        return func(*args, **kwargs)

    def _next(self, like: Tensor) -> Draw:
        self.count += 1
        index = torch.arange(like.numel(), device=like.device).reshape(like.shape)
        return Draw(self.seed.to(like.device), self.count - 1, index, like.dtype)
