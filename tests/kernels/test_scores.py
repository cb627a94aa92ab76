"""Passes over the loss head's tiles: sums and gradients in float64, and the whole operator, its words on one rank and on two."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.kernels import loss_head
from autopar.kernels.loss_head import linear_log_prob
from autopar.kernels.triton import scores
from tests.kernels.where import DTYPES, close, only, random

IGNORED = -100
FORMS = {"plain": (1.0, 0.0, False), "scaled": (0.3, 0.0, False), "capped, scaled, with totals": (1.7, 3.0, True)}


def exact(x: Tensor, scale: float, cap: float) -> Tensor:
    z = x.double() * scale
    return cap * torch.tanh(z / cap) if cap else z


def tile(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A tile that is part of a wider tensor, and that."""
    wide = 3 * random(rows, columns + 5, seed=seed, dtype=dtype)
    return wide[:, 2 : columns + 2], wide


def targets(rows: int, first: int, columns: int) -> Tensor:
    """Of a tile from `first` on: its first and last column, some between, those next to it on either side, and none."""
    some = [first, first + columns - 1, first - 1, first + columns, first + columns + 1, IGNORED, first + columns // 2]
    return torch.tensor([some[i % len(some)] for i in range(rows)], dtype=torch.int64)


def empty_statistics(rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    zeros = [torch.zeros(rows, device=device) for _ in range(3)]
    return zeros[0], zeros[1], torch.full((rows,), -math.inf, device=device), zeros[2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", [1, 37, 4100])
def test_statistics(columns: int, form: str, dtype: str) -> None:
    """Of two tiles, one after the other: the second's columns come after the first's."""
    scale, cap, with_total = FORMS[form]
    rows, first = 7, 11
    (x, _), (y, _) = tile(rows, columns, DTYPES[dtype]), tile(rows, 3, DTYPES[dtype], seed=1)
    target = targets(rows, first, columns).to(x.device)
    picked, total, largest, rest = empty_statistics(rows, x.device)
    for part, at in ((x, first), (y, first + columns)):
        scores.add_statistics(part, target, at, scale, cap, picked, total if with_total else None, largest, rest)
    z = exact(torch.cat([x, y], 1), scale, cap)
    here = (target >= first) & (target < first + z.shape[1])
    close(picked, z.gather(1, torch.where(here, target - first, 0).unsqueeze(1)).squeeze(1) * here)
    close(largest + rest.log(), z.logsumexp(1))
    assert torch.equal(largest.double(), largest.double().maximum(z.amax(1) - 1e-5)), "what is largest is"
    close(total, z.sum(1) if with_total else torch.zeros_like(z[:, 0]), times=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", [1, 37, 4100])
def test_gradient(columns: int, form: str, dtype: str) -> None:
    """In place, and nothing beside the tile is written."""
    scale, cap, with_total = FORMS[form]
    rows, first = 7, 11
    x, wide = tile(rows, columns, DTYPES[dtype])
    before = wide.clone()
    target = targets(rows, first, columns).to(x.device)
    z = exact(x, scale, cap)
    lse = z.logsumexp(1).float()
    p, q, n = (random(rows, seed=10 + i) for i in range(3))
    d = n.double().unsqueeze(1) * (z - lse.double().unsqueeze(1)).exp()
    here = (target >= first) & (target < first + columns)
    d.scatter_add_(1, torch.where(here, target - first, 0).unsqueeze(1), (p.double() * here).unsqueeze(1))
    d = (d + q.double().unsqueeze(1)) if with_total else d
    d = d * (1 - (z / cap) ** 2) if cap else d
    got = scores.gradient(x, target, first, scale, cap, lse, p, q if with_total else None, n[:1].expand(rows) if columns == 1 else n)
    if columns > 1:
        close(got, d * scale)
    assert got.data_ptr() == x.data_ptr() and torch.equal(wide[:, :2], before[:, :2]) and torch.equal(wide[:, -3:], before[:, -3:])


def test_words_that_are_hidden() -> None:
    """A tile of which all is -inf, as a bias makes it, adds nothing, first or last."""
    x = random(4, 9, seed=0)
    hidden = torch.full_like(x, -math.inf)
    for tiles in ((hidden, x), (x, hidden), (hidden, hidden)):
        picked, _, largest, rest = empty_statistics(4, x.device)
        for i, part in enumerate(tiles):
            scores.add_statistics(part, torch.full((4,), IGNORED, device=x.device), 9 * i, 1.0, 0.0, picked, None, largest, rest)
        close(largest + rest.log(), torch.cat(tiles, 1).double().logsumexp(1))


def test_what_is_no_number_is_told() -> None:
    x = random(2, 9, seed=0)
    x[0, 4] = math.nan
    picked, _, largest, rest = empty_statistics(2, x.device)
    scores.add_statistics(x, torch.zeros(2, dtype=torch.int64, device=x.device), 0, 1.0, 0.0, picked, None, largest, rest)
    assert (largest + rest.log()).isnan().tolist() == [True, False]


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_nothing(shape: tuple[int, int]) -> None:
    x = random(*shape, seed=0)
    target = torch.zeros(shape[0], dtype=torch.int64, device=x.device)
    picked, total, largest, rest = empty_statistics(shape[0], x.device)
    scores.add_statistics(x, target, 0, 1.0, 0.0, picked, total, largest, rest)
    assert scores.gradient(x, target, 0, 1.0, 0.0, picked, picked, None, picked).shape == shape
    assert not picked.any() and not rest.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_head(dtype: str, bias: bool) -> None:
    """The operator by kernels, and by torch, with the same products: label smoothing, a z-loss and a cap, tokens that are ignored, tiles that do not divide."""
    tokens, words, features = 9, 45, 6
    found = []
    for kernels in (True, False):
        h, w, b = (
            random(*s, seed=i, dtype=DTYPES[dtype]).requires_grad_()
            for i, s in enumerate([(tokens, features), (words, features), (words,)])
        )
        target = torch.randint(0, words, (tokens,), generator=torch.Generator().manual_seed(0)).to(h.device)
        target[::4] = IGNORED
        with only(kernels):
            picked, total, lse = linear_log_prob(h, w, b if bias else None, target, True, 0.7, 5.0, 60)
            there = target != IGNORED
            loss = ((lse - 0.9 * picked - 0.1 * total / words + 0.01 * lse**2) * there).sum() / there.sum()
            loss.backward()
        found.append((loss.detach(), h.grad, w.grad, b.grad if bias else h.grad))
    for got, want in zip(*found, strict=True):
        assert got is not None and want is not None
        worst = float((got.double() - want.double()).abs().max() / want.double().abs().max())
        assert worst <= {"float32": 3e-6, "bfloat16": 2e-2, "float16": 2e-3}[dtype], worst


@pytest.mark.parametrize("words", [(23, 22), (64, 1)])
def test_words_of_two_ranks(words: tuple[int, int]) -> None:
    """Each has a part, neither of them a multiple of a block; targets of the other one's are none of its own. Together: torch's cross-entropy."""
    h, w = random(11, 5, seed=0), random(sum(words), 5, seed=1)
    target = torch.arange(11, device=h.device) * 6 % sum(words)
    with only(kernels=True):
        one = linear_log_prob(h, w[: words[0]], None, target, False, 1.0, 0.0, 100)
        two = linear_log_prob(h, w[words[0] :], None, target - words[0], False, 1.0, 0.0, 100)
    lse = torch.logaddexp(one[2], two[2])
    close(lse - one[0] - two[0], F.cross_entropy(h.double() @ w.double().t(), target, reduction="none"))


def test_torch_forms_mean_the_same() -> None:
    """What other devices run has the same arguments and results."""
    x, target = random(5, 8, seed=0), torch.tensor([3, 4, 12, 11, IGNORED])
    target = target.to(x.device)
    one, two = empty_statistics(5, x.device), empty_statistics(5, x.device)
    for add, into in ((loss_head.add_statistics, one), (scores.add_statistics, two)):
        add(x.clone(), target, 4, 0.5, 2.0, *into)
    lse, rows = one[2] + one[3].log(), [random(5, seed=i) for i in range(3)]
    found = [f(x.clone(), target, 4, 0.5, 2.0, lse, *rows) for f in (loss_head.gradient, scores.gradient)]
    for got, want in zip([*two, found[1]], [*one, found[0]], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
