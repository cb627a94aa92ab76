"""Attention whose keys go round equals attention over all of them, forward and backward, on ranks side by side."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.cost.compute import local_sizes
from autopar.cost.ring import hops
from autopar.graph import runs
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.graph.runs import runs_of, visited
from autopar.kernels.attention import attention, attention_backward
from autopar.kernels.exchange import Body
from autopar.kernels.ring import Part, backward_body, forward_body, parts
from autopar.rules import lookup
from tests.spmd.exchange import side_by_side
from tests.spmd.ops import call

RANKS, SEQ, SCALE = 4, 48, 0.3


def operands(heads: int, groups: int, dtype: torch.dtype, e: int = 8, d: int = 8, seq: int = SEQ) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    torch.manual_seed(0)
    shapes = (2, heads, seq, e), (2, groups, seq, e), (2, groups, seq, d), (2, heads, seq, d)
    return [torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes]


def dealt(blocks: int, seq: int = SEQ) -> list[Tensor]:
    """Which positions each rank has, of so many blocks that are split over all ranks."""
    return [torch.arange(seq).view(blocks, RANKS, -1)[:, r].reshape(-1) for r in range(RANKS)]


def starts(blocks: int, seq: int = SEQ) -> tuple[list[int], int]:
    run = seq // blocks // RANKS
    return [int(i) for rank in dealt(blocks, seq) for i in rank[::run]], run


def whole(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, bias: Tensor | None, is_causal: bool) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    out, lse = attention(q, k, v, bias, is_causal, SCALE, None)
    return (out, lse), attention_backward(grad, q, k, v, out, lse, bias, is_causal, SCALE, None, False)[:3]


def joined(found: Sequence[Tensor], where: list[Tensor]) -> Tensor:
    out = torch.empty_like(torch.cat(list(found), 2))
    out[:, :, torch.cat(where)] = torch.cat(list(found), 2)
    return out


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("heads", "groups", "d"), [(4, 4, 8), (8, 2, 8), (4, 1, 16)])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_equals_whole_attention(blocks: int, heads: int, groups: int, d: int, is_causal: bool) -> None:
    """In double precision, to its last digits."""
    _check(blocks, operands(heads, groups, torch.float64, d=d), is_causal, 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_equals_whole_attention_in_less_precision(dtype: torch.dtype, tolerance: float) -> None:
    _check(2, operands(8, 2, dtype), True, tolerance)


def _check(
    blocks: int, given: list[Tensor], is_causal: bool, tolerance: float, bias: Tensor | None = None, before: int = -1, after: int = -1
) -> None:
    q, k, v, grad = given
    (out, lse), gradients = whole(q, k, v, grad, bias, is_causal)
    forward, backward, where = ring(blocks, given, is_causal, bias, before, after)
    for i, want in enumerate((out, lse)):
        torch.testing.assert_close(joined([f[i] for f in forward], where), want, rtol=tolerance, atol=tolerance)
    for i, want in enumerate(gradients):
        torch.testing.assert_close(joined([b[i] for b in backward], where), want, rtol=tolerance, atol=tolerance)


def ring(
    blocks: int,
    given: list[Tensor],
    is_causal: bool,
    bias: Tensor | None,
    before: int,
    after: int,
    sent: tuple[list[int], list[int]] | None = None,
) -> tuple[Any, Any, list[Tensor]]:
    """Forward's and backward's results of every rank, and which positions it has. sent: filled with the bytes that the first rank sends in each exchange, by
    halves."""
    q, k, v, grad = given
    where, (firsts, run) = dealt(blocks, q.shape[2]), starts(blocks, q.shape[2])
    visits = visited(tuple(firsts), run, RANKS, before, after)
    told = is_causal or before >= 0 or after >= 0
    rest = [(at if told else None, before, after, torch.tensor(r), firsts, run, visits, "ring", RANKS) for r, at in enumerate(where)]
    masks = [bias if bias is None or bias.shape[2] == 1 else bias[:, :, at] for at in where]
    mine = [[t[:, :, at] for t in (q, k, v)] for at in where]
    bodies = [forward_body(*a, m, is_causal, SCALE, *b) for a, m, b in zip(mine, masks, rest, strict=True)]
    forward = side_by_side(bodies if sent is None else [counted(bodies[0], sent[0]), *bodies[1:]], [range(RANKS)])
    bodies = [
        backward_body(grad[:, :, at], *a, *f, m, is_causal, SCALE, *b)
        for a, f, m, b, at in zip(mine, forward, masks, rest, where, strict=True)
    ]
    return forward, side_by_side(bodies if sent is None else [counted(bodies[0], sent[1]), *bodies[1:]], [range(RANKS)]), where


def masks() -> dict[str, Tensor]:
    """Of 8 query heads, two samples. Some rows see no key at all, in some blocks others see none."""
    g = torch.Generator().manual_seed(1)
    at = torch.arange(SEQ)
    hidden = torch.rand(2, 1, SEQ, SEQ, generator=g) < 0.4
    hidden[0, 0, [0, 13, SEQ - 1]] = True
    hidden[1, 0, 5, : SEQ // 2] = True
    documents = (torch.tensor([11, 24, 41]).unsqueeze(1) <= at).sum(0)
    length = torch.tensor([SEQ, 29]).reshape(2, 1, 1, 1)
    return {
        "of samples": _hiding(hidden),
        "additive, of heads": torch.randn(1, 8, SEQ, SEQ, generator=g, dtype=torch.float64) + _hiding(hidden[:1]),
        "additive, of samples and heads": torch.randn(2, 8, SEQ, SEQ, generator=g, dtype=torch.float64) + _hiding(hidden),
        "padding": _hiding(at >= length),
        "documents": _hiding((documents.unsqueeze(1) != documents) | (at > at.unsqueeze(1)))[None, None],
        "left padding, causal": _hiding((at < SEQ - length) | (at > at.unsqueeze(1))),
        "nothing is seen": _hiding(torch.ones(2, 1, 1, SEQ, dtype=torch.bool)),
    }


def _hiding(hidden: Tensor, by: float = -math.inf) -> Tensor:
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, by)


@pytest.mark.parametrize(("heads", "groups", "d"), [(8, 8, 8), (8, 2, 8), (8, 2, 16)])
@pytest.mark.parametrize("name", masks())
def test_masks(name: str, heads: int, groups: int, d: int) -> None:
    """Rows that see no key give zeros, and gradients of zeros."""
    bias = masks()[name]
    for blocks in (1, 2):
        _check(blocks, operands(heads, groups, torch.float64, d=d), False, 1e-12, bias)
    _check(1, operands(heads, groups, torch.float32, d=d), False, 1e-5, bias.float())


def test_a_mask_beside_causality() -> None:
    for name in ("of samples", "padding"):
        _check(2, operands(8, 2, torch.float64), True, 1e-12, masks()[name])


@pytest.mark.parametrize("name", masks())
def test_a_row_that_sees_nothing(name: str) -> None:
    """Whatever is in its key blocks, nothing is NaN."""
    forward, backward, where = ring(2, operands(8, 2, torch.float32), False, masks()[name].float(), -1, -1)
    bias = masks()[name].expand(2, 8, SEQ, SEQ)
    empty = (bias == -math.inf).all(-1)
    out, lse = (joined([f[i] for f in forward], where) for i in range(2))
    assert torch.equal(out[empty], torch.zeros_like(out[empty])) and bool((lse[empty] == -math.inf).all())
    assert bool(lse[~empty].isfinite().all())
    dq, dk, dv = (joined([b[i] for b in backward], where) for i in range(3))
    assert torch.equal(dq[empty], torch.zeros_like(dq[empty]))
    assert all(bool(t.isfinite().all()) for t in (out, dq, dk, dv))


@pytest.mark.parametrize("by", [-1e9, None], ids=["-1e9", "the lowest"])
@pytest.mark.parametrize("d", [8, 16])
def test_rows_hidden_by_a_large_number(d: int, by: float | None) -> None:
    """Scores are lost beside it, and a row that sees nothing else is even over its keys, as torch's attention is; its log-sum-exp does not tell of how many."""
    hidden = masks()["of samples"] == -math.inf
    bias = _hiding(hidden, torch.finfo(torch.float32).min if by is None else by).float()
    bias[:, :, :, 7] = -math.inf
    _check(2, operands(8, 2, torch.float32, d=d), False, 1e-5, bias)


WINDOWS = {
    "causal window": (5, 0),
    "window": (4, 3),
    "window as long as a block": (12, 0),
    "window of several blocks": (17, 2),
    "window of all": (SEQ, SEQ),
    "what comes is bounded": (-1, 2),
    "what was is bounded": (3, -1),
    "itself": (0, 0),
}


def window(before: int, after: int) -> Tensor:
    ahead = torch.arange(SEQ) - torch.arange(SEQ).unsqueeze(1)
    return ((ahead < -before) if before >= 0 else torch.zeros_like(ahead).bool()) | ((ahead > after) if after >= 0 else False)


@pytest.mark.parametrize("rows", [3, 512])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that none sees are not visited, keys out of reach not computed; with padding, some rows see no key of theirs. rows: of a strip, at least."""
    monkeypatch.setattr(runs, "STRIP", rows)
    before, after = WINDOWS[name]
    hidden = window(before, after) | (torch.arange(SEQ) >= torch.tensor([SEQ, 29]).reshape(2, 1, 1, 1))
    runs.rounds.cache_clear()
    for blocks in (1, 2, 4):
        _check(blocks, operands(8, 2, torch.float64), False, 1e-12, _hiding(hidden), before, after)
    _check(2, operands(8, 2, torch.float32), False, 1e-5, _hiding(hidden).float(), before, after)


def test_only_blocks_in_reach_are_visited() -> None:
    """12 keys a rank."""
    firsts, run = starts(1)
    of = functools.partial(visited, tuple(firsts), run, RANKS)
    assert of(-1, -1) == of(-1, 0) == (0, 1, 2, 3)
    assert of(12, 0) == (0, 1) and of(13, 0) == (0, 1, 2) and of(0, 12) == (0, 3) and of(5, 5) == (0, 1, 3) and of(0, 0) == (0,)
    firsts, run = starts(2)  # the first rank's second run follows the last rank's first
    assert visited(tuple(firsts), run, RANKS, 5, 0) == (0, 1)


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("name", WINDOWS)
def test_rounds_are_what_is_computed(name: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs and kernels of the busiest rank, its blocks' shares."""
    monkeypatch.setattr(runs, "STRIP", 3)
    before, after = WINDOWS[name]
    firsts, run = starts(blocks)
    runs.rounds.cache_clear()
    found = runs.rounds(tuple(firsts), run, RANKS, before, after)
    runs.rounds.cache_clear()
    each, all_ranks = len(firsts) // RANKS, []
    for r in range(RANKS):
        here = [(f, slice(i * run, (i + 1) * run)) for i, f in enumerate(firsts[r * each : (r + 1) * each])]
        rows = list(runs.strips(here, runs.strip(run, before, after)))
        pairs, kernels = {}, 0
        for hop in range(RANKS):
            block = (r - hop) % RANKS
            some = parts(rows, firsts[block * each : (block + 1) * each], run, run * each, before, after, True)
            pairs[hop] = sum((p.rows.stop - p.rows.start) * (p.keys.stop - p.keys.start) for p in some)
            kernels += len(some)
        all_ranks.append((sum(pairs.values()), kernels, {h: n for h, n in pairs.items() if n}))
    assert found.pairs == max(n for n, _, _ in all_ranks)
    shares = {v.hop: round(v.share * found.pairs) for v in found.visits if v.share}
    assert (found.pairs, found.kernels, shares) in all_ranks
    assert {v.hop for v in found.visits} == {0, *(h for _, _, theirs in all_ranks for h in theirs)}


@pytest.mark.parametrize("name", [*WINDOWS, "causal", "all", "padding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_priced_are_those_sent(name: str, dtype: torch.dtype) -> None:
    """Of a rank, forward and backward; key/value heads as they are."""
    q, k, v, grad = operands(8, 2, dtype, d=16)
    before, after = WINDOWS.get(name, (-1, -1))
    bias = (
        _hiding(window(before, after)).to(dtype)[None, None]
        if name in WINDOWS
        else masks()["padding"].to(dtype)
        if name == "padding"
        else None
    )
    is_causal = name == "causal"
    out, lse = attention(q, k, v, bias, is_causal, SCALE, None)
    mesh = Mesh.of({"a": RANKS})
    calls = (
        call("autopar.attention_v2.default", (q, k, v, bias, is_causal, SCALE, None, before, after)),
        call("autopar.attention_backward_v3.default", (grad, q, k, v, out, lse, bias, is_causal, SCALE, None, False, before, after)),
    )
    sent: tuple[list[int], list[int]] = ([], [])
    ring(2, [q, k, v, grad], is_causal, bias, before, after, sent)
    for c, bytes_ in zip(calls, sent, strict=True):
        rule, strategy = lookup(c.op), {"a.0": ("s", SEQ // 4), "a.1": ("s", SEQ // 8)}
        priced = hops(c.op, rule, strategy, local_sizes(rule, strategy, mesh), mesh)
        assert sum(w.sent for w in priced) == sum(bytes_) and all(0 <= w.beside <= 1 for w in priced)
    assert len(sent[0]) == len(visited(tuple(starts(2)[0]), starts(2)[1], RANKS, before, 0 if is_causal else after)) - 1


def counted(body: Body, sent: list[int]) -> Body:
    """`body`, and the bytes of each of its exchanges."""
    answer = None
    while True:
        try:
            ask = next(body) if answer is None else body.send(answer)
        except StopIteration as e:
            return e.value
        assert sum(ask.send) == len(ask.rows)
        sent.append(ask.rows.numel() * ask.rows.element_size())
        answer = yield ask


def test_two_rings_do_not_meet() -> None:
    """Ranks of two groups, each with a sequence of its own."""
    q, k, v, _ = operands(4, 4, torch.float64)
    where, (firsts, run) = dealt(1), starts(1)
    bodies = [
        forward_body(
            *(t[s : s + 1, :, at] for t in (q, k, v)),
            None,
            True,
            SCALE,
            at,
            -1,
            -1,
            torch.tensor(r),
            firsts,
            run,
            range(RANKS),
            "ring",
            RANKS,
        )
        for s, (r, at) in itertools.product(range(2), enumerate(where))
    ]
    found = side_by_side(bodies, [range(RANKS), range(RANKS, 2 * RANKS)])
    want = attention(q, k, v, None, True, SCALE, None)[0]
    for s in range(2):
        torch.testing.assert_close(joined([f[0] for f in found[s * RANKS : (s + 1) * RANKS]], where), want[s : s + 1])


def test_what_causality_hides_is_not_computed() -> None:
    """Queries 8 to 11 of a block with keys 0 to 3, 8 to 11 and 16 to 19: the first without a mask, the second causal, the third not at all."""

    def causal(rows: Any, at: list[int], keys: int) -> list[Part]:
        return parts(rows, at, 4, keys, -1, 0, False)

    here = slice(4, 8)
    assert causal([(8, here)], [0, 8, 16], 12) == [Part(here, slice(0, 4), False), Part(here, slice(4, 8), True)]
    assert causal([(0, slice(0, 4))], [8], 4) == []
    assert causal(None, [8], 4) == [Part(slice(None), slice(0, 4), False)]
    assert parts([(8, here)], [0, 8, 16], 4, 12, -1, 0, True) == [Part(here, slice(0, 8), False)]  # with a bias, in one


def test_runs_of_keys() -> None:
    """Two blocks of 24 positions, split over a, each part of which over b: rank (a, b) has positions 12 a + 6 b on, and those 24 further on."""
    mesh = Mesh.of({"a": 2, "b": 2})
    keys = Placement.of((1, 1, SEQ, 8), {"a": (2, 12), "b": (2, 6)})
    assert runs_of(keys, 2, ("a", "b"), mesh) == ([0, 24, 6, 30, 12, 36, 18, 42], 6)
