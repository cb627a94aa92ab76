"""The head without logits against the plain one: a linear layer, its scores in memory, and torch's cross-entropy. On a GPU too, where there is one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from autopar.cost import loss_head as cost
from autopar.kernels.loss_head import linear_log_prob, linear_log_prob_backward
from autopar.kernels.tiles import TILE, sides
from tests.spmd.ops import call

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
# Relative to the largest element, of the operands' dtype against float64.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
IGNORED = -100


@dataclass(frozen=True)
class Case:
    tokens: int = 13
    words: int = 29
    features: int = 7
    tile: int = 24  # 13 tokens in chunks of 5, 29 words in blocks of 4
    bias: bool = False
    total: bool = False
    scale: float = 1.0
    cap: float = 0.0


CASES = {
    "tiles that do not divide": Case(),
    "one tile": Case(tile=TILE),
    "a tile of one score": Case(tile=1),
    "tiles of all tokens": Case(tokens=3, tile=30),
    "tiles of all words": Case(tokens=40, words=3, tile=20),
    "one token": Case(tokens=1),
    "one word": Case(words=1),
    "no tokens": Case(tokens=0),
    "bias": Case(bias=True),
    "cap": Case(cap=2.5),
    "scale": Case(scale=0.3),
    "all of it": Case(bias=True, total=True, scale=1.7, cap=3.0),
    "all of it, one tile": Case(bias=True, total=True, scale=1.7, cap=3.0, tile=TILE),
}


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _operands(c: Case, dtype: torch.dtype, device: str) -> tuple[list[Tensor | None], Tensor]:
    made = [_random(c.tokens, c.features, seed=0), _random(c.words, c.features, seed=1), _random(c.words, seed=2) if c.bias else None]
    target = torch.randint(0, c.words, (c.tokens,), generator=torch.Generator().manual_seed(3))
    target[::4] = IGNORED
    return [None if t is None else t.to(device, dtype).requires_grad_() for t in made], target.to(device)


def _plain(h: Tensor, w: Tensor, b: Tensor | None, target: Tensor, c: Case) -> tuple[Tensor, Tensor, Tensor]:
    z = F.linear(h, w, b) * c.scale
    z = c.cap * torch.tanh(z / c.cap) if c.cap else z
    there = (target >= 0) & (target < c.words)
    picked = z.gather(1, torch.where(there, target, 0).unsqueeze(1)).squeeze(1) * there
    return picked, z.sum(1), z.logsumexp(1)


def _close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape
    if want.numel():
        assert float((got.double().cpu() - want.cpu()).abs().max()) <= TOLERANCE[dtype] * max(1e-30, float(want.abs().max()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_layer(case: str, dtype: torch.dtype, device: str) -> None:
    c = CASES[case]
    operands, target = _operands(c, dtype, device)
    h, w, b = operands
    assert h is not None and w is not None
    got = linear_log_prob(h, w, b, target, c.total, c.scale, c.cap, c.tile)
    exact = [None if t is None else t.detach().double().requires_grad_() for t in operands]
    assert exact[0] is not None and exact[1] is not None
    want = _plain(exact[0], exact[1], exact[2], target, c)
    weights = [_random(c.tokens, seed=10 + i).to(device) for i in range(3)]
    for i, (g, x) in enumerate(zip(got, want, strict=True)):
        assert g.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        if i != 1 or c.total:
            _close(g.detach(), x.detach(), dtype)
        else:
            assert g.shape == (0,)
    used = (0, 1, 2) if c.total else (0, 2)
    torch.autograd.backward(sum((got[i] * weights[i]).sum() for i in used))  # type: ignore[arg-type]
    torch.autograd.backward(sum((want[i] * weights[i]).sum() for i in used))  # type: ignore[arg-type]
    for t, e in zip(operands, exact, strict=True):
        if t is not None and e is not None:
            assert t.grad is not None and e.grad is not None and t.grad.dtype == dtype
            _close(t.grad, e.grad, dtype)


@pytest.mark.parametrize("case", ["tiles that do not divide", "all of it", "cap"])
def test_gradients_are_those_of_differences(case: str) -> None:
    c = CASES[case]
    operands, target = _operands(c, torch.float64, "cpu")
    given = [t for t in operands if t is not None]

    def fn(h: Tensor, w: Tensor, b: Tensor | None = None) -> Any:
        found = linear_log_prob(h, w, b, target, c.total, c.scale, c.cap, c.tile)
        return found if c.total else (found[0], found[2])

    assert torch.autograd.gradcheck(fn, given)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True), (False, False, False)], ids=str)
def test_only_wanted_gradients_are_made(wanted: tuple[bool, ...]) -> None:
    c = CASES["all of it"]
    (h, w, b), target = _operands(c, torch.float64, "cpu")
    assert h is not None and w is not None and b is not None
    with torch.no_grad():
        lse = linear_log_prob(h, w, b, target, True, c.scale, c.cap, c.tile)[2]
        grads = [_random(c.tokens, seed=10 + i) for i in range(3)]
        rest = (h, w, b, target, lse, c.scale, c.cap, c.tile)
        every = linear_log_prob_backward(*grads, *rest, (True, True, True))
        some = linear_log_prob_backward(*grads, *rest, wanted)
    for got, want, is_wanted in zip(some, every, wanted, strict=True):
        assert torch.equal(got, want) if is_wanted else got.shape == (0,)


def test_its_fake_is_like_it() -> None:
    for c in CASES.values():
        operands, target = _operands(c, torch.bfloat16, "cpu")
        h, w, b = operands
        assert h is not None and w is not None
        torch.library.opcheck(
            linear_log_prob, (h, w, b, target, c.total, c.scale, c.cap, c.tile), test_utils=("test_schema", "test_faketensor")
        )


def test_a_head_that_is_one_product_rounds_as_one() -> None:
    """In bfloat16, the gradient of the weight is the plain layer's but for how scores' gradients were rounded, though it is made tile by tile."""
    c = Case(tokens=64, words=96, features=32, tile=512)
    (h, w, _), target = _operands(c, torch.bfloat16, "cpu")
    assert h is not None and w is not None
    picked, _, lse = linear_log_prob(h, w, None, target, False, 1.0, 0.0, c.tile)
    (lse - picked).mul(target != IGNORED).sum().backward()
    mine = w.grad
    plain_h, plain_w = (t.detach().clone().requires_grad_() for t in (h, w))
    F.cross_entropy(F.linear(plain_h, plain_w).float(), target, reduction="sum").backward()
    exact_h, exact_w = (t.detach().double().requires_grad_() for t in (h, w))
    F.cross_entropy(F.linear(exact_h, exact_w), target, reduction="sum").backward()
    assert mine is not None and plain_w.grad is not None and exact_w.grad is not None
    error, theirs = (float((g.double() - exact_w.grad).norm()) for g in (mine, plain_w.grad))
    assert error <= 1.2 * theirs


# ---- what it takes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 7, 4096, 8192, 70_000])
@pytest.mark.parametrize("words", [1, 50_257, 262_144])
def test_tiles_cover_all_and_are_no_larger_than_said(tokens: int, words: int) -> None:
    for tile in (1, 24, TILE):
        chunk, block = sides(tokens, words, tile)
        assert 1 <= chunk <= max(tokens, 1) and 1 <= block <= words and chunk * block <= max(tile, chunk)
        assert chunk <= math.isqrt(2 * tile) or chunk == 1


def most_allocated(fn: Callable[[], Any]) -> int:
    """Bytes that `fn` has at most at a time, of what it allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        kept = fn()
    del kept
    now = most = 0
    for e in sorted((e for e in p.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += e.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile", [2**16, 2**18], ids=["chunks and blocks", "blocks"])
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_it_takes_up_what_is_planned_for(dtype: torch.dtype, tile: int, cap: float) -> None:
    c = Case(tokens=700, words=3000, features=64, tile=tile, cap=cap)
    (h, w, _), target = _operands(c, dtype, "cpu")
    assert h is not None and w is not None
    with torch.no_grad():
        lse = linear_log_prob(h, w, None, target, False, 1.0, cap, tile)[2]
        given = torch.ones_like(lse)
        rest = (h, w, None, target)
        for wanted in ((True, True, False), (True, False, False), (False, True, False), None):
            if wanted is None:
                args: tuple[Any, ...] = (*rest, False, 1.0, cap, tile)
                fn = torch.ops.autopar.linear_log_prob_v1.default
            else:
                args = (given, None, given, *rest, lse, 1.0, cap, tile, list(wanted))
                fn = torch.ops.autopar.linear_log_prob_backward_v1.default
            op = call(fn, args).op
            results = sum(t.nbytes for t in op.outputs if t is not None)
            expected = cost.workspace_bytes(op, {"t": c.tokens, "v": c.words, "d": c.features})
            took = most_allocated(lambda fn=fn, args=args: fn(*args)) - results
            assert 0.85 * expected <= took <= 1.05 * expected, (wanted, took, expected)
