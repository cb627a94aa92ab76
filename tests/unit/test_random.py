"""The counter's numbers look random, are what torch's ops promise, and are the same compiled; eager runs number their draws as captures do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar import _torch
from autopar.capture.ops import captured_ops
from autopar.kernels.random import SAMPLERS, Draw, EagerRandom, bits, dropout, keep_mask, normal, randint, sample, uniform
from tests.wide import cases

N = 1 << 16
INDEX = torch.arange(N)
SEEDS = [0, 1, 2, (1 << 62) - 1]


def _seed(seed: int = 0, step: int = 0) -> torch.Tensor:
    return torch.tensor([seed, step])


def _is_uniform(words: torch.Tensor) -> None:
    """Chi-square over 256 classes of the high and of the low byte: within 6 sigma of its 255 degrees of freedom."""
    assert words.dtype == torch.int64 and int(words.min()) >= 0 and int(words.max()) < 1 << 32
    words = words.flatten()
    for byte in (words >> 24, words & 255):
        counts = torch.bincount(byte, minlength=256).double()
        expected = words.numel() / 256
        assert abs(float(((counts - expected) ** 2 / expected).sum()) - 255) < 6 * math.sqrt(2 * 255)


def _are_independent(a: torch.Tensor, b: torch.Tensor) -> None:
    """Every bit of a against every bit of b: correlations within 6 sigma, and as many equal words as chance gives: none or few."""
    x, y = ((w.unsqueeze(1) >> torch.arange(32) & 1).double() - 0.5 for w in (a, b))
    assert float((x.T @ y).abs().max()) * 4 < 6 * math.sqrt(a.numel())
    assert int((a == b).sum()) <= 3


@pytest.mark.parametrize("seed", SEEDS)
def test_uniform_and_independent_of_neighbours(seed: int) -> None:
    here = bits(_seed(seed), 0, INDEX)
    _is_uniform(here)
    for stride in (1, 2, 64, 1 << 31, 1 << 32, 1 << 40):
        _are_independent(here, bits(_seed(seed), 0, INDEX + stride))
        _is_uniform(bits(_seed(seed), 0, INDEX * min(stride, 1 << 40)))
    others = [(_seed(seed ^ 1), 0, 0), (_seed(seed, 1), 0, 0), (_seed(seed, 1 << 33), 0, 0), (_seed(seed), 1, 0), (_seed(seed), 0, 1)]
    for other, op, stream in others:
        _are_independent(here, bits(other, op, INDEX, stream))


def test_steps_and_ops_do_not_collide() -> None:
    """As (step, op) runs, the words of one element repeat as rarely as random ones; those of two elements together, never."""
    pairs = torch.stack([bits(_seed(3, step), op, torch.arange(2)) for step in range(64) for op in range(32)])
    assert pairs[:, 0].unique().numel() >= len(pairs) - 2
    assert pairs.unique(dim=0).shape[0] == len(pairs)
    _is_uniform(pairs)


def test_indices_beyond_32_bits() -> None:
    index = torch.tensor([5, 5 + (1 << 32), 5 + (1 << 33), 5 + (1 << 45), (1 << 62) + 5])
    words = bits(_seed(), 0, index)
    assert words.unique().numel() == len(index)
    assert torch.equal(words, torch.stack([bits(_seed(), 0, i) for i in index]))


def test_no_product_leaves_63_bits() -> None:
    """The same words from Python's integers, which do not overflow."""

    def mix(x: int) -> int:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x2C1B3C6D), (12, 0x297A2D39)):
            x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
            assert factor < 1 << 31
        return x ^ (x >> 15)

    def key(seed: int, step: int, op: int, stream: int, salt: int) -> int:
        k = mix(mix((seed & 0xFFFFFFFF) ^ salt) ^ (seed >> 32))
        k = mix(mix((k + (step & 0xFFFFFFFF)) & 0xFFFFFFFF) ^ (step >> 32))
        return mix((k + op * 4 + stream) & 0xFFFFFFFF)

    for seed, step, op, stream, i in [(0, 0, 0, 0, 0), (2**62 - 1, 2**61 + 3, 10**6, 3, 2**63 - 1), (5, 2**32 - 1, 7, 1, 2**32 - 1)]:
        word = mix((i & 0xFFFFFFFF) ^ key(seed, step, op, stream, 0x9E3779B9))
        want = mix((word + ((i >> 32) * 0x3C6EF372 & 0xFFFFFFFF) + key(seed, step, op, stream, 0x5BD1E995)) & 0xFFFFFFFF)
        assert int(bits(_seed(seed, step), op, torch.tensor(i), stream)) == want


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout(p: float) -> None:
    x = torch.ones(N)
    y, mask = dropout(x, p, _seed(), 0, INDEX)
    assert torch.equal(mask, keep_mask(_seed(), 0, INDEX, p))
    assert abs(float(mask.double().mean()) - (1 - p)) <= 6 * math.sqrt(p * (1 - p) / N)
    assert torch.equal(y != 0, mask)
    assert torch.equal(y[mask], torch.full_like(y[mask], 1 / (1 - p) if p < 1 else 0.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_and_normal(dtype: torch.dtype) -> None:
    u = uniform(_seed(), 0, INDEX, dtype)
    assert u.dtype == dtype and float(u.min()) >= 0 and float(u.max()) < 1
    assert abs(float(u.double().mean()) - 0.5) < 6 / math.sqrt(12 * N) + torch.finfo(dtype).eps
    z = normal(_seed(), 0, INDEX, dtype)
    assert z.dtype == dtype
    _has_moments(z.double(), 0.0, 1.0, 3 * torch.finfo(dtype).eps)
    assert abs(float((z.double() ** 4).mean()) - 3) < 6 * math.sqrt(96 / N) + 12 * torch.finfo(dtype).eps
    if dtype == torch.float64:
        assert u.unique().numel() == N  # all 53 bits are drawn


def _has_moments(x: torch.Tensor, mean: float, std: float, slack: float = 0.0) -> None:
    assert abs(float(x.mean()) - mean) < 6 * std / math.sqrt(N) + slack
    fourth = float((x - x.mean()).pow(4).mean()) / std**4
    assert abs(float(x.std()) / std - 1) < 6 * math.sqrt(fourth / N) + slack


def test_randint() -> None:
    k = randint(_seed(), 0, INDEX, -3, 7)
    counts = torch.bincount(k + 3, minlength=10)
    assert len(counts) == 10
    assert float((counts - N / 10).abs().max()) < 6 * math.sqrt(N / 10)


@pytest.mark.parametrize("span", [(1 << 31) - 1, 1 << 31, 3 << 40, (1 << 63) - 1])
def test_randint_of_wide_ranges(span: int) -> None:
    """Sixteenths of the range are equally likely, and no number leaves it."""
    k = randint(_seed(), 0, INDEX, -5, span - 5)
    assert int(k.min()) >= -5 and int(k.max()) < span - 5
    sixteenths = torch.bincount((k.double() + 5).div(span / 16).long().clamp(max=15), minlength=16)
    assert float((sixteenths - N / 16).abs().max()) < 6 * math.sqrt(N / 16)
    assert k.unique().numel() > N - 10  # chance gives N^2 / 2^32 equal pairs, or fewer


def _draw(shape: tuple[int, ...] = (N,), dtype: torch.dtype = torch.float64) -> Draw:
    return Draw(_seed(1, 2), 3, torch.arange(math.prod(shape)).reshape(shape), dtype)


X = torch.zeros(N, dtype=torch.float64)
MOMENTS: dict[str, tuple[tuple[Any, ...], float, float]] = {
    "aten.rand.default": (([N],), 0.5, math.sqrt(1 / 12)),
    "aten.rand_like.default": ((X,), 0.5, math.sqrt(1 / 12)),
    "aten.uniform.default": ((X, -1.0, 3.0), 1.0, 4 * math.sqrt(1 / 12)),
    "aten.randn.default": (([N],), 0.0, 1.0),
    "aten.randn_like.default": ((X,), 0.0, 1.0),
    "aten.normal_functional.default": ((X, 2.0, 3.0), 2.0, 3.0),
    "aten.normal.Tensor_Tensor": ((X + 2, X + 3), 2.0, 3.0),
    "aten.normal.Tensor_float": ((X + 2, 3.0), 2.0, 3.0),
    "aten.normal.float_Tensor": ((2.0, X + 3), 2.0, 3.0),
    "aten.normal.float_float": ((2.0, 3.0, [N]), 2.0, 3.0),
    "aten.log_normal.default": ((X, 0.5, 0.25), math.exp(0.5 + 0.03125), math.exp(0.5 + 0.03125) * math.sqrt(math.expm1(0.0625))),
    "aten.exponential.default": ((X, 2.0), 0.5, 0.5),
    "aten.geometric.default": ((X, 0.3), 1 / 0.3, math.sqrt(0.7) / 0.3),
    "aten.bernoulli.default": ((X + 0.3,), 0.3, math.sqrt(0.21)),
    "aten.bernoulli.Tensor": ((X, X + 0.3), 0.3, math.sqrt(0.21)),
    "aten.bernoulli.p": ((X, 0.3), 0.3, math.sqrt(0.21)),
    "aten.randint.default": ((11, [N]), 5.0, math.sqrt(10)),
    "aten.randint.low": ((-5, 6, [N]), 0.0, math.sqrt(10)),
    "aten.randint_like.default": ((X, 11), 5.0, math.sqrt(10)),
    "aten.randint_like.low_dtype": ((X, -5, 6), 0.0, math.sqrt(10)),
}


@pytest.mark.parametrize("target", sorted(SAMPLERS))
def test_samplers_have_the_moments_of_torch_s_ops(target: str) -> None:
    if target == "aten.cauchy.default":  # it has none: quartiles
        c = sample(target, _draw(), (X, 1.0, 2.0), {})
        assert torch.allclose(c.quantile(torch.tensor([0.25, 0.5, 0.75]).double()), torch.tensor([-1.0, 1.0, 3.0]).double(), atol=0.1)
        return
    args, mean, std = MOMENTS[target]
    _has_moments(sample(target, _draw(), args, {}), mean, std)
    # The expected moments are right: torch's own numbers have them.
    _, name, overload = target.split(".")
    torch.manual_seed(0)
    kwargs = {"dtype": torch.float64} if isinstance(args[-1], list) else {}
    _has_moments(getattr(getattr(torch.ops.aten, name), overload)(*args, **kwargs), mean, std)


COMPILED: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "bits": lambda seed, index, x: bits(seed, 3, index),
    "dropout": lambda seed, index, x: dropout(x, 0.3, seed, 4, index)[0],
    "uniform": lambda seed, index, x: uniform(seed, 5, index),
    "uniform in double precision": lambda seed, index, x: uniform(seed, 6, index, torch.float64),
}


@pytest.mark.parametrize("name", cases(COMPILED, ["dropout"]))
def test_the_same_compiled(name: str) -> None:
    args = (_seed(17, 1 << 35), INDEX[:1000] + (1 << 40) - 500, torch.randn(1000))
    assert torch.equal(torch.compile(COMPILED[name], fullgraph=True)(*args), COMPILED[name](*args))


# --- eager runs draw what captured steps draw -------------------------------------------------------------------

Fn = Callable[[torch.Tensor], torch.Tensor]
CALLS: dict[str, Fn] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "dropout of all": lambda x: F.dropout(x, 1.0),
    "no dropout": lambda x: F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False),
    "dropout in place": lambda x: F.dropout(x * 2, 0.3, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "dropout2d": lambda x: F.dropout2d(x[None], 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda x: x * torch.empty_like(x).bernoulli_(x.detach().sigmoid()),
    "rand": lambda x: x * torch.rand(8) + torch.rand(6, 8, dtype=torch.float64),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x * torch.randn(6, 8) + torch.randn_like(x),
    "randint": lambda x: x * torch.randint(50, (8,)) * torch.randint(-5, 50, (8,)),
    "randint_like": lambda x: x * torch.randint_like(x, 50) + torch.randint_like(x, 2, 50),
    "normal": lambda x: x * torch.normal(2.0, 3.0, (8,)) + torch.normal(x.detach(), 2.0),
    "normal_": lambda x: x * torch.empty_like(x).normal_(1, 2),
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(1, 2),
    "exponential_": lambda x: x * torch.empty_like(x).exponential_(2),
    "log_normal_": lambda x: x * torch.empty_like(x).log_normal_(),
    "cauchy_": lambda x: x * torch.empty_like(x).cauchy_(),
    "geometric_": lambda x: x * torch.empty_like(x).geometric_(0.3),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3),
    "attention, causal": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3, is_causal=True),
    "attention, mask": lambda x: F.scaled_dot_product_attention(
        x[None], x[None], x[None], attn_mask=torch.arange(36).reshape(6, 6) % 5 != 0, dropout_p=0.3
    ),
    "attention, grouped": lambda x: F.scaled_dot_product_attention(x[None], x[None, :2], x[None, :2], dropout_p=0.3, enable_gqa=True),
}


class _Twice(nn.Module):
    """The call between two others: the numbering goes on."""

    def __init__(self, fn: Fn) -> None:
        super().__init__()
        self.fn, self.weight = fn, nn.Parameter(torch.linspace(-1, 1, 4 * 6 * 8).reshape(4, 6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fn(F.dropout(x * self.weight, 0.1))
        return (F.dropout(y, 0.2) * torch.linspace(0, 1, y.shape[-1])).sum()


class _Interpreter(torch.fx.Interpreter):
    """A captured graph on one device whose random ops, counted in its order, draw from the counter."""

    count = 0

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if str(target) != "aten.native_dropout.default" and str(target) not in SAMPLERS:
            return super().call_function(target, args, kwargs)
        like = super().call_function(target, args, kwargs)
        like = like[0] if isinstance(like, tuple) else like
        draw = Draw(_seed(9, 4), self.count, torch.arange(like.numel()).reshape(like.shape), like.dtype)
        self.count += 1
        if "dropout" in str(target):
            return dropout(args[0], args[1], draw.seed, draw.op_index, draw.index)
        return sample(str(target), draw, args, kwargs)


@pytest.mark.parametrize("name", CALLS)
def test_eager_draws_what_a_captured_step_draws(name: str) -> None:
    model, x = _Twice(CALLS[name]), torch.linspace(1, 3, 4 * 6 * 8).reshape(4, 6, 8)
    with EagerRandom(9, 4):
        loss = model(x)
    gradient = torch.autograd.grad(loss, model.weight)[0]
    mode = _torch.new_fake_mode()
    with mode:
        fake = _Twice(CALLS[name])
    with mode, captured_ops():
        graph = _torch.export_joint(fake, (torch.empty(4, 6, 8),))[0]
    assert torch.ops.autopar.attention_v2.default not in {n.target for n in graph.graph.nodes}
    with torch.no_grad():
        outputs, gradients = _Interpreter(graph).run(model.weight.detach(), x, torch.ones(()))
    torch.testing.assert_close(outputs[0], loss.detach(), rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(gradients[0], gradient, rtol=2e-6, atol=1e-6)
    with EagerRandom(9, 5):
        assert name in ("no dropout", "dropout of all") or not torch.equal(model(x), loss)


def test_nothing_in_a_module_escapes() -> None:
    """Dropout inside torch's own modules is drawn from the counter, whatever torch's generator stands at."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)

    def run(torch_seed: int, step: int) -> torch.Tensor:
        torch.manual_seed(torch_seed)
        with EagerRandom(0, step) as mode:
            out = layer(torch.linspace(-1, 1, 2 * 5 * 8).reshape(2, 5, 8))
        assert mode.count == 4
        return out.detach()

    assert torch.equal(run(0, 0), run(1, 0))
    assert not torch.equal(run(0, 0), run(0, 1))


class _FusedKernels(TorchFunctionMode):
    """Whether attention may take a fused kernel, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            enabled = (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled())
            self.allowed.append(any((*enabled, torch.backends.cuda.cudnn_sdp_enabled())))
        return func(*args, **(kwargs or {}))


def test_attention_with_dropout_takes_no_fused_kernel() -> None:
    """Those draw from torch's own generator, where no mode sees it."""
    x = torch.randn(1, 2, 4, 8)
    with _FusedKernels() as seen, EagerRandom(0, 0):
        F.scaled_dot_product_attention(x, x, x)
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        F.scaled_dot_product_attention(x, x, x, None, 0.1)
    assert seen.allowed == [True, False, False]
