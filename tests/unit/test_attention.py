"""The attention op against eager torch, and what capture makes of `scaled_dot_product_attention`. On a GPU too, where there is one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from autopar import _torch
from autopar.capture.ops import captured_ops
from autopar.kernels.attention import attention, attention_backward

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
FORWARD, BACKWARD = torch.ops.autopar.attention_v2.default, torch.ops.autopar.attention_backward_v3.default
SDPA = torch.ops.aten.scaled_dot_product_attention.default
# Relative to the largest element, of the inputs' dtype against float64.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2e-2}


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _qkv(b: int, h: int, g: int, q: int, s: int, e: int, d: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [_random(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(b, h, q, e), (b, g, s, e), (b, g, s, d)])]


def _dead_rows(mask: torch.Tensor) -> torch.Tensor:
    """Some keys hidden everywhere, and from one row all of them."""
    mask = mask.masked_fill(_random(*mask.shape, seed=7) > 0.5, -math.inf)
    mask[0, 0, 0] = -math.inf
    return mask


def _close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    assert torch.equal(got == -math.inf, want == -math.inf)
    got, want = (x.masked_fill(x == -math.inf, 0) for x in (got, want))
    assert float((got - want).abs().max()) <= TOLERANCE[dtype] * float(want.abs().max()), (got - want).abs().max()


def _formulas(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, is_causal: bool, scale: float, index: Any) -> Any:
    """torch's attention in float64 on the CPU, queries taken out of the whole sequence."""
    hidden = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool)
    if is_causal:
        rows = torch.arange(q.shape[2]) if index is None else index
        hidden = rows[:, None] < torch.arange(k.shape[2])
    mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -math.inf)[None, None]
    mask = mask if bias is None else mask + bias
    out = F.scaled_dot_product_attention(q, k, v, mask.expand(*q.shape[:3], -1), scale=scale, enable_gqa=True)
    return out, (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale + mask).logsumexp(-1)


CASES: dict[str, tuple[tuple[int, ...], Any, bool, Any]] = {
    "plain": ((2, 4, 4, 9, 9, 8, 8), None, False, None),
    "causal": ((2, 4, 4, 9, 9, 8, 8), None, True, None),
    "grouped": ((2, 6, 2, 9, 9, 8, 8), None, True, None),
    "fewer queries, causal": ((2, 4, 2, 5, 9, 8, 8), None, True, None),
    "fewer keys, causal": ((2, 4, 2, 9, 5, 8, 8), None, True, None),
    "some queries": ((2, 4, 2, 4, 12, 8, 8), None, True, (1, 4, 7, 10)),
    "neighbouring queries": ((2, 4, 2, 4, 12, 8, 8), None, True, (5, 6, 7, 8)),
    "the first queries": ((2, 4, 2, 4, 12, 8, 8), None, True, (0, 1, 2, 3)),
    "two runs of queries": ((2, 4, 2, 6, 12, 8, 8), None, True, (2, 3, 4, 9, 10, 11)),
    "queries behind the keys": ((2, 4, 2, 6, 4, 8, 16), None, True, (1, 2, 3, 4, 5, 9)),
    "more runs than are worth it": ((1, 2, 1, 20, 40, 8, 8), None, True, tuple(range(1, 40, 2))),
    "head sizes differ": ((2, 4, 2, 9, 11, 8, 16), None, True, None),
    "odd head size": ((2, 4, 2, 9, 11, 5, 5), None, False, None),
    "mask": ((2, 4, 2, 9, 11, 8, 8), (2, 1, 9, 11), False, None),
    "mask of keys": ((2, 4, 2, 9, 11, 8, 8), (2, 1, 1, 11), False, None),
    "mask, head sizes differ": ((2, 4, 2, 9, 11, 8, 16), (2, 1, 9, 11), False, None),
    "bias of heads": ((2, 4, 2, 9, 11, 8, 8), (1, 4, 9, 11), False, None),
    "whole bias, some queries": ((2, 4, 2, 3, 11, 8, 8), (2, 4, 3, 11), True, (0, 5, 10)),
    "long": ((1, 2, 1, 300, 600, 16, 16), (1, 1, 300, 600), True, None),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_torch(case: str, dtype: torch.dtype, device: str) -> None:
    sizes, shape, is_causal, rows = CASES[case]
    tensors = _qkv(*sizes, dtype=dtype)
    if shape is not None:
        tensors.append(_dead_rows(_random(*shape, seed=5)).to(dtype))
    index = None if rows is None else torch.tensor(rows)
    grad = _random(*tensors[0].shape[:3], sizes[-1], seed=6, dtype=dtype)

    def run(fn: Callable[..., Any], to: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Any]:
        leaves = [to(t).requires_grad_() for t in tensors]
        out, lse = fn(
            *leaves[:3], leaves[3] if shape is not None else None, is_causal, 0.3, None if index is None else index.to(to(grad).device)
        )
        return (out, lse), torch.autograd.grad(out, leaves, to(grad))

    want, want_grads = run(_formulas, lambda t: t.detach().double())
    got, got_grads = run(attention, lambda t: t.detach().to(device))
    assert got[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for g in (got[0], *got_grads[:3]):
        assert g.transpose(1, 2).is_contiguous()
    for g, w in zip((*got, *got_grads), (*want, *want_grads), strict=True):
        _close(g, w, dtype)
    if shape is None:
        return
    with torch.no_grad():  # without the bias's gradient another kernel may run
        args = (to_device(grad, device), *(to_device(t, device) for t in tensors[:3]), *got, to_device(tensors[3], device))
        fused = attention_backward(*args, is_causal, 0.3, None if index is None else index.to(device), False)
    assert fused[3].shape == (0,)
    for g, w in zip(fused[:3], want_grads[:3], strict=True):
        _close(g, w, dtype)


def to_device(t: torch.Tensor, device: str) -> torch.Tensor:
    return t.detach().to(device)


@pytest.mark.parametrize("head", [8, 16], ids=["heads alike", "head sizes differ"])
def test_a_row_hidden_by_the_lowest_number(head: int) -> None:
    """Added to any score it gives itself: softmax is even over the row, as models that mask so expect of padding."""
    q, k, v = (t.requires_grad_() for t in _qkv(2, 4, 4, 9, 11, 8, head))
    bias = torch.zeros(2, 1, 9, 11, dtype=torch.float64)
    bias[0, 0, 2] = torch.finfo(torch.float64).min
    bias.requires_grad_()
    grad = _random(2, 4, 9, head, seed=6)
    out = attention(q, k, v, bias, False, 0.3, None)[0]
    want = F.scaled_dot_product_attention(q, k, v, bias, scale=0.3)
    _close(out, want, torch.float64)
    leaves = (q, k, v, bias)
    for g, w in zip(torch.autograd.grad(out, leaves, grad), torch.autograd.grad(want, leaves, grad), strict=True):
        _close(g, w, torch.float64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("case", "bias_grad"),
    [
        ("plain", False),
        ("odd head size", False),
        *((c, b) for c in ("mask", "mask, head sizes differ", "bias of heads") for b in (False, True)),
    ],
)
def test_parts_of_the_keys(case: str, dtype: torch.dtype, bias_grad: bool, device: str) -> None:
    """Backward over some of the keys, with out and lse of all: parts of dq add up, dk, dv and the bias's gradient are those of the keys."""
    sizes, shape, is_causal, _ = CASES[case]
    q, k, v = (to_device(t, device) for t in _qkv(*sizes, dtype=dtype))
    bias = None if shape is None else to_device(_dead_rows(_random(*shape, seed=5)).to(dtype), device)
    if bias is not None:
        bias[-1, :, 1, :4] = -math.inf  # a row that sees keys of the second part alone
    grad = to_device(_random(*q.shape[:3], sizes[-1], seed=6, dtype=dtype), device)
    out, lse = attention(q, k, v, bias, is_causal, 0.3, None)
    parts = []
    for a, b in ((0, 4), (4, k.shape[2])):
        mine = None if bias is None else bias[..., a:b]
        parts.append(attention_backward(grad, q, k[:, :, a:b], v[:, :, a:b], out, lse, mine, is_causal, 0.3, None, bias_grad))
    dq, *rest = (torch.stack(x).sum(0) if i == 0 else torch.cat(x, 2 if i < 3 else -1) for i, x in enumerate(zip(*parts, strict=True)))
    leaves = [t.detach().cpu().double().requires_grad_() for t in (q, k, v, *([] if bias is None else [bias]))]
    whole = _formulas(*leaves[:3], leaves[3] if bias is not None else None, is_causal, 0.3, None)[0]
    want = torch.autograd.grad(whole, leaves, grad.cpu().double())
    for g, w in zip((dq, *rest), want[: 4 if bias_grad else 3], strict=False):
        _close(g, w, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["grouped", "mask", "bias of heads"])
def test_op_contract(case: str, device: str) -> None:
    """Schema (nothing aliased or mutated), fakes and autograd, by torch's own checker; operands need not be contiguous."""
    sizes, shape, is_causal, _ = CASES[case]
    q, k, v = (t.to(device, torch.float32).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in _qkv(*sizes))
    bias = None if shape is None else _random(*shape, seed=5, dtype=torch.float32).to(device).requires_grad_(case == "bias of heads")
    torch.library.opcheck(FORWARD, (q, k, v, bias, is_causal, 0.3, None))
    out, lse = (t.detach() for t in attention(q, k, v, bias, is_causal, 0.3, None))
    leaves = [t.detach() for t in (q, k, v)]
    tests = ("test_schema", "test_faketensor")
    args = (torch.ones_like(out), *leaves, out, lse, None if bias is None else bias.detach(), is_causal, 0.3, None, case == "bias of heads")
    torch.library.opcheck(BACKWARD, args, test_utils=tests)


@pytest.mark.parametrize("empty", [(2, 4, 2, 0, 9, 8, 8), (2, 4, 2, 9, 0, 8, 8), (0, 4, 2, 9, 9, 8, 8)], ids=str)
def test_nothing_to_attend(empty: tuple[int, ...]) -> None:
    q, k, v = (t.requires_grad_() for t in _qkv(*empty))
    out, lse = attention(q, k, v, None, False, 0.3, None)
    assert torch.equal(out, torch.zeros(*q.shape[:3], 8, dtype=torch.float64))
    assert bool((lse == -math.inf).all())
    for g in torch.autograd.grad(out, (q, k, v), torch.ones_like(out)):
        assert bool((g == 0).all())


# --- capture ----------------------------------------------------------------------------------------------------


class _Attend(torch.nn.Module):
    def __init__(self, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.kwargs = kwargs

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, *mask, **self.kwargs).sin().sum()


def _joint(inputs: list[torch.Tensor], kwargs: dict[str, Any]) -> fx.GraphModule:
    mode = _torch.new_fake_mode()
    with mode:
        fakes = tuple(torch.empty(t.shape, dtype=t.dtype).requires_grad_(t.requires_grad) for t in inputs)
    return _torch.export_joint(_Attend(kwargs), fakes)[0]


def _captured(inputs: list[torch.Tensor], kwargs: dict[str, Any]) -> fx.GraphModule:
    with captured_ops():
        return _joint(inputs, kwargs)


def _run(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Loss and gradients of the joint graph."""
    leaves = [t.detach() for t in inputs]
    found = fx.Interpreter(gm).run(*leaves, torch.ones((), dtype=inputs[0].dtype), enable_io_processing=False)
    return list(found)


def _eager(inputs: list[torch.Tensor], kwargs: dict[str, Any]) -> list[torch.Tensor | None]:
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
    loss = _Attend(kwargs)(*leaves)
    loss.backward()
    return [loss, *(t.grad for t in leaves if t.requires_grad)]


def _ops(gm: fx.GraphModule) -> list[Any]:
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


def _sdpa_args(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> list[torch.Tensor]:
    return [_random(*s, seed=i).requires_grad_() for i, s in enumerate((q, k, v))]


_BOOL = _random(2, 1, 5, 7, seed=9) > -0.5
_BOOL[0, 0, 2] = False  # a row that sees nothing
Q, K = (2, 4, 5, 8), (2, 4, 7, 8)
CALLS: dict[str, tuple[list[torch.Tensor], dict[str, Any]]] = {
    "plain": (_sdpa_args(Q, K, K), {}),
    "scale": (_sdpa_args(Q, K, K), {"scale": 0.1}),
    "causal": (_sdpa_args(Q, K, K), {"is_causal": True}),
    "bool mask": ([*_sdpa_args(Q, K, K), _BOOL], {}),
    "bool mask of two dims": ([*_sdpa_args(Q, K, K), _BOOL[1, 0]], {}),
    "mask with a gradient": ([*_sdpa_args(Q, K, K), _random(1, 4, 5, 7, seed=5).requires_grad_()], {}),
    "mask of queries": ([*_sdpa_args(Q, K, K), _random(5, 1, seed=5)], {}),
    "mask of keys": ([*_sdpa_args(Q, K, K), _random(1, 7, seed=5).requires_grad_()], {}),
    "grouped": (_sdpa_args(Q, (2, 2, 7, 8), (2, 2, 7, 8)), {"enable_gqa": True}),
    "one key head": (_sdpa_args(Q, (2, 1, 7, 8), (2, 1, 7, 8)), {}),
    "one query head": (_sdpa_args((2, 1, 5, 8), K, K), {}),
    "one sample of keys": (_sdpa_args(Q, (1, 4, 7, 8), (1, 4, 7, 8)), {}),
    "one sample of queries": (_sdpa_args((1, 4, 5, 8), K, K), {}),
    "keys broadcast, values not": (_sdpa_args(Q, (1, 1, 7, 8), K), {}),
    "head sizes differ": (_sdpa_args(Q, K, (2, 4, 7, 6)), {}),
    "three dims": ([*_sdpa_args(Q[1:], K[1:], K[1:]), _random(4, 5, 7, seed=5).requires_grad_()], {}),
    "three dims, bool mask": ([*_sdpa_args(Q[1:], K[1:], K[1:]), _BOOL[1, 0]], {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_capture(name: str) -> None:
    """One op and one backward, and eager's values; the very gradients that eager has."""
    inputs, kwargs = CALLS[name]
    gm = _captured(inputs, kwargs)
    ops = _ops(gm)
    assert ops.count(FORWARD) == 1 and ops.count(BACKWARD) == 1
    assert not any("softmax" in str(op) or "attention" in str(op) for op in ops if op not in (FORWARD, BACKWARD))
    wants = next(n for n in gm.graph.nodes if n.target == BACKWARD).args[10]
    assert wants == (len(inputs) > 3 and inputs[3].requires_grad)
    found = [t for t in _run(gm, inputs) if t is not None]
    for got, want in zip(found, _eager(inputs, kwargs), strict=True):
        assert want is not None
        _close(got, want, torch.float64)


@pytest.mark.parametrize(
    ("shapes", "kwargs"), [((Q[2:], K[2:], K[2:]), {}), (((3, *Q), (3, *K), (3, *K)), {"is_causal": True})], ids=["two dims", "five dims"]
)
def test_other_ranks_are_torchs_formulas(shapes: Any, kwargs: dict[str, Any]) -> None:
    inputs = _sdpa_args(*shapes)
    gm = _captured(inputs, kwargs)
    assert FORWARD not in _ops(gm)
    for got, want in zip([t for t in _run(gm, inputs) if t is not None], _eager(inputs, kwargs), strict=True):
        assert want is not None
        _close(got, want, torch.float64)


@pytest.mark.parametrize("name", ["plain", "bool mask", "grouped"])
def test_dropout_draws_what_eager_draws(name: str) -> None:
    inputs, kwargs = CALLS[name]
    kwargs = {**kwargs, "dropout_p": 0.3}
    gm = _captured(inputs, kwargs)
    drops = [n for n in gm.graph.nodes if n.target == torch.ops.aten.native_dropout.default]
    assert [tuple(n.meta["val"][0].shape) for n in drops] == [(2, 4, 5, 7)]
    # Eager on a CPU draws a bernoulli mask instead, from the same generator: its draw takes the place of the graph's.
    torch.manual_seed(3)
    kept = torch.empty(2, 4, 5, 7, dtype=torch.float64).bernoulli_(0.7)
    drops[0].target = lambda x, p, train: (x * kept / 0.7, kept.bool())
    gm.recompile()
    found = [t for t in _run(gm, inputs) if t is not None]
    torch.manual_seed(3)
    for got, want in zip(found, _eager(inputs, kwargs), strict=True):
        assert want is not None
        _close(got, want, torch.float64)


@pytest.mark.parametrize(
    ("shapes", "kwargs"),
    [((Q, (2, 2, 7, 8), (2, 2, 7, 8)), {}), ((Q, (2, 3, 7, 8), (2, 3, 7, 8)), {"enable_gqa": True}), ((Q, (3, 4, 7, 8), (3, 4, 7, 8)), {})],
    ids=["groups not asked for", "groups that do not divide", "batches"],
)
def test_what_torch_refuses_is_refused(shapes: Any, kwargs: dict[str, Any]) -> None:
    inputs = _sdpa_args(*shapes)
    with pytest.raises(RuntimeError):
        _eager(inputs, kwargs)
    with pytest.raises(RuntimeError):
        _captured(inputs, kwargs)


def test_torch_is_left_as_it_was() -> None:
    def traced() -> bool:
        return FORWARD in _ops(_joint(*CALLS["plain"]))

    assert not traced()
    with captured_ops():
        assert traced()
        with captured_ops():
            assert traced()
        assert traced()
    assert not traced()
    with pytest.raises(ZeroDivisionError), captured_ops():
        _ = 1 / 0
    assert not traced()
    assert not SDPA.py_kernels
