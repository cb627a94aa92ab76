"""What is known of masks that are made from positions: never more than their values say, and all of it for the masks that models have."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.nn.attention import flex_attention

from autopar import _torch
from autopar.capture.bounds import bound_masks
from autopar.capture.ops import captured_ops

FORWARD, BACKWARD = torch.ops.autopar.attention_v2.default, torch.ops.autopar.attention_backward_v3.default
SEQ, INF = 12, float("-inf")
LOWEST = torch.finfo(torch.float32).min


class _Model(torch.nn.Module):
    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.mask(length)).sin().sum()


def traced(mask: Callable[[Tensor], Tensor], queries: int = SEQ) -> fx.GraphModule:
    mode = _torch.new_fake_mode()
    with mode:
        fakes = tuple(torch.empty(2, 4, n, 8, requires_grad=True) for n in (queries, SEQ, SEQ))
        length = torch.empty(2, dtype=torch.int64)
    with captured_ops():
        return _torch.export_joint(_Model(mask), (*fakes, length))[0]


def found(gm: fx.GraphModule) -> tuple[int, int]:
    """What forward is told, and backward alike."""
    bound_masks(gm)
    (forward,) = (n.args for n in gm.graph.nodes if n.target == FORWARD)
    (backward,) = (n.args for n in gm.graph.nodes if n.target == BACKWARD)
    assert forward[7:] == backward[11:]
    return forward[7:] or (-1, -1)


def _at() -> tuple[Tensor, Tensor]:
    return torch.arange(SEQ)[None, None, :, None], torch.arange(SEQ)[None, None, None, :]


def _of(rule: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda length: rule(*_at())


def _padded(rule: Callable[[Tensor, Tensor], Tensor], by: float | None = None) -> Callable[[Tensor], Tensor]:
    def mask(length: Tensor) -> Tensor:
        q, k = _at()
        seen = rule(q, k) & (k < length[:, None, None, None])
        return seen if by is None else torch.zeros(seen.shape).masked_fill(~seen, by)

    return mask


MASKS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, int]]] = {
    "causal": (_of(lambda q, k: k <= q), (-1, 0)),
    "causal, by lengths": (_padded(lambda q, k: q >= k), (-1, 0)),
    "window": (_of(lambda q, k: (k > q - 4) & (k <= q)), (3, 0)),
    "window, by lengths": (_padded(lambda q, k: (k > q - 4) & (k <= q)), (3, 0)),
    "window, by lengths, added": (_padded(lambda q, k: (k > q - 4) & (k <= q), INF), (3, 0)),
    "window both ways": (_of(lambda q, k: (q - k).abs() <= 2), (2, 2)),
    "window both ways, fewer": (_of(lambda q, k: (k - q).abs() < 3), (2, 2)),
    "hidden, where not": (_of(lambda q, k: ~((k > q) | (q - k >= 5))), (4, 0)),
    "two dims": (lambda length: torch.arange(SEQ) - torch.arange(SEQ).unsqueeze(1) < 3, (-1, 2)),
    "from one on": (_of(lambda q, k: (q + 1) - (k + 3) <= 1), (3, -1)),
    "triangle": (lambda length: torch.ones(SEQ, SEQ, dtype=torch.bool).tril(), (-1, 0)),
    "triangles": (lambda length: torch.ones(SEQ, SEQ, dtype=torch.bool).tril(1).triu(-2), (2, 1)),
    "infinite triangle": (lambda length: torch.full((SEQ, SEQ), INF).triu(1), (-1, 0)),
    "infinite triangle, padded": (
        lambda length: torch.full((SEQ, SEQ), INF).triu(1) + torch.where(torch.arange(SEQ) < length[:, None, None, None], 0.0, INF),
        (-1, 0),
    ),
    "chosen": (lambda length: torch.where((_at()[1] <= _at()[0]), 0.0, INF), (-1, 0)),
    "a finite number": (lambda length: torch.where((_at()[1] <= _at()[0]) & (_at()[1] > _at()[0] - 3), 0.0, LOWEST), (2, 0)),
    "from constants": (
        lambda length: torch.arange(SEQ).unsqueeze(1) >= torch.arange(SEQ) - (torch.ones(SEQ, dtype=torch.int64) + 2).unsqueeze(0),
        (-1, 3),
    ),
    "itself": (_of(lambda q, k: k == q), (0, 0)),
    # nothing is known
    "documents": (lambda length: (length[:1, None] < torch.arange(SEQ)) == (length[:1, None] < torch.arange(SEQ)).T, (-1, -1)),
    "padding": (lambda length: torch.arange(SEQ) < length[:, None, None, None], (-1, -1)),
    "either": (_padded(lambda q, k: (k <= q) | (k < 2)), (-1, -1)),
    "prefix, by lengths": (lambda length: (_at()[1] <= _at()[0]) | (_at()[1] < length[:, None, None, None]), (-1, -1)),
    "a finite number, by lengths": (_padded(lambda q, k: k <= q, LOWEST), (-1, -1)),
    "a small number": (lambda length: torch.where(_at()[1] <= _at()[0], 0.0, -100.0), (-1, -1)),
    "twice": (_of(lambda q, k: 2 * k <= q), (-1, -1)),
    "a dim of one": (
        lambda length: torch.arange(SEQ) > torch.arange(1).unsqueeze(1) - 5 + torch.zeros(SEQ, 1, dtype=torch.int64),
        (-1, -1),
    ),
    "the other way round": (lambda length: (_at()[1] <= _at()[0]).mT, (-1, -1)),
    "a finite number, then another mask": (
        lambda length: (
            torch.where(_at()[1] <= _at()[0], 0.0, LOWEST) + torch.where(torch.arange(SEQ) < length[:, None, None, None], 0.0, INF)
        ),
        (-1, -1),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_bounds(name: str) -> None:
    mask, want = MASKS[name]
    assert found(traced(mask)) == want


@pytest.mark.parametrize("name", MASKS)
def test_what_is_beyond_is_hidden(name: str) -> None:
    """By the mask's own values, whatever the lengths."""
    mask, (before, after) = MASKS[name]
    for length in itertools.combinations_with_replacement((1, 5, SEQ), 2):
        value = mask(torch.tensor(length))
        seen = (value if value.dtype == torch.bool else value > -1e30).expand(2, 1, SEQ, SEQ)
        ahead = torch.arange(SEQ) - torch.arange(SEQ).unsqueeze(1)
        if before >= 0:
            assert not bool(seen[..., ahead < -before].any())
        if after >= 0:
            assert not bool(seen[..., ahead > after].any())


def test_flex_attention() -> None:
    """Of its mask function."""

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mask = flex_attention.create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 4), None, None, SEQ, SEQ, device=q.device)
            return flex_attention.flex_attention(q, k, v, block_mask=mask).sin().sum()  # type: ignore[union-attr]

    mode = _torch.new_fake_mode()
    with mode:
        fakes = tuple(torch.empty(2, 4, SEQ, 8, requires_grad=True) for _ in range(3))
    with captured_ops():
        assert found(_torch.export_joint(Model(), fakes)[0]) == (3, 0)


def test_fewer_queries_than_keys_are_told_nothing() -> None:
    gm = traced(lambda length: torch.ones(7, SEQ, dtype=torch.bool).tril(), 7)
    assert found(gm) == (-1, -1)


@pytest.mark.parametrize("op", [FORWARD, BACKWARD], ids=str)
def test_the_operator_takes_bounds(op: Any) -> None:
    q, k, v = (torch.randn(1, 2, SEQ, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    bias = torch.zeros(1, 1, SEQ, SEQ).masked_fill(~torch.ones(SEQ, SEQ, dtype=torch.bool).tril(), INF)
    given: Any = (q, k, v, bias, False, 0.3, None)
    if op is BACKWARD:
        out, lse = FORWARD(*given)
        given = (torch.ones_like(out), q, k, v, out, lse, bias, False, 0.3, None, False)
    for a, b in zip(op(*given), op(*given, -1, 0), strict=True):
        assert torch.equal(a, b)
