"""Attention's rules and lowerings on simulated ranks, against torch's own attention and its autograd on one device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import autopar.kernels.attention  # noqa: F401  (registers the operators)
from autopar import rules
from autopar.graph.mesh import Mesh
from autopar.passes import local
from autopar.rules.strategy import is_legal, placements
from tests.spmd.ops import MismatchError, call, check

FORWARD, BACKWARD = "autopar.attention_v2.default", "autopar.attention_backward_v3.default"
B, H, Q, S, E, D = 4, 12, 12, 8, 6, 4
SCALE = 0.3


def _attend(q: Any, k: Any, v: Any, bias: Any, is_causal: bool) -> Any:
    """torch's attention; causality and bias are both in the mask it is given."""
    mask = torch.zeros(1, 1, q.shape[2], k.shape[2], dtype=q.dtype) if bias is None else bias
    if is_causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        mask = mask + torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, mask.expand(*q.shape[:3], k.shape[2]), scale=SCALE, enable_gqa=True), mask


def _forward(q: Any, k: Any, v: Any, bias: Any, is_causal: bool, *rest: Any) -> Any:
    out, mask = _attend(q, k, v, bias, is_causal)
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return out, (q @ keys.mT * SCALE + mask).logsumexp(-1)


def _backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bias: Any, is_causal: bool, scale: float, index: Any, wanted: bool
) -> Any:
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (q, k, v, *([bias] if wanted else []))]
        out, _ = _attend(*leaves[:3], leaves[3] if wanted else bias, is_causal)
        found = torch.autograd.grad(out, leaves, grad)
    return (*found, *([] if wanted else [grad.new_empty((0,))]))


def _args(
    groups: int = H, bias: tuple[int, ...] | None = None, is_causal: bool = False, heads: int = H, width: int = E, keys: int = S
) -> Any:
    g = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=g)

    mask = None
    if bias is not None:
        mask = random(*bias).masked_fill(torch.rand(bias, generator=g) < 0.3, -math.inf)
        mask[0, 0, 0] = -math.inf  # a row that sees nothing
    return (random(B, heads, Q, E), random(B, groups, keys, E), random(B, groups, keys, width), mask, is_causal, SCALE, None)


def _grad_args(args: Any, wanted: bool) -> Any:
    q, k, v, bias, is_causal, scale, index = args
    out, lse = _forward(*args)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    return (grad, q, k, v, out, lse, bias, is_causal, scale, index, wanted)


CASES: dict[str, tuple[Any, set[str]]] = {
    "heads": (_args(), {"b", "g", "q"}),
    "causal": (_args(is_causal=True), {"b", "g", "q"}),
    "grouped, causal": (_args(groups=4, is_causal=True), {"b", "g", "r", "q"}),
    "one key head": (_args(groups=1), {"b", "r", "q"}),
    "head sizes differ": (_args(groups=2, width=D, is_causal=True), {"b", "g", "r", "q"}),
    "mask of samples": (_args(groups=2, bias=(B, 1, Q, S)), {"b", "g", "r", "q"}),
    "mask of keys": (_args(bias=(B, 1, 1, S)), {"b", "g", "q"}),
    "mask of positions": (_args(groups=4, bias=(1, 1, Q, S)), {"b", "g", "r", "q"}),
    "bias of heads": (_args(bias=(1, H, Q, S)), {"b", "g", "q"}),
    "bias of grouped heads, causal": (_args(groups=4, bias=(1, H, Q, S), is_causal=True), {"b", "g", "r", "q"}),
    "whole bias": (_args(groups=4, bias=(B, H, Q, S)), {"b", "g", "r", "q"}),
    # of as many keys as queries, which may go round
    "ring": (_args(groups=4, keys=Q), {"b", "g", "r", "q", "s"}),
    "ring, causal": (_args(groups=4, is_causal=True, keys=Q), {"b", "g", "r", "q", "s"}),
    "ring, mask of samples": (_args(groups=2, bias=(B, 1, Q, Q), keys=Q), {"b", "g", "r", "q", "s"}),
    "ring, mask of keys, causal": (_args(bias=(B, 1, 1, Q), is_causal=True, keys=Q), {"b", "g", "q", "s"}),
    "ring, bias of heads": (_args(groups=4, bias=(1, H, Q, Q), keys=Q, width=D), {"b", "g", "r", "q", "s"}),
}


@pytest.mark.parametrize("case", CASES)
def test_forward(case: str) -> None:
    args, letters = CASES[case]
    report = check(FORWARD, args, reference=_forward)
    assert report.letters == letters
    assert report.rule.kind == "attention"


@pytest.mark.parametrize("case", CASES)
def test_backward(case: str) -> None:
    args, letters = CASES[case]
    report = check(BACKWARD, _grad_args(args, False), reference=_backward)
    assert report.letters == letters
    assert report.partials == {frozenset({0})}


@pytest.mark.parametrize("case", [c for c, (args, _) in CASES.items() if args[3] is not None])
def test_backward_with_the_gradient_of_the_bias(case: str) -> None:
    """Whose keys stay together."""
    args, letters = CASES[case]
    report = check(BACKWARD, _grad_args(args, True), reference=_backward)
    assert report.letters == letters - {"s"}
    assert report.partials == {frozenset({0})}


# --- a test that cannot fail is a defect ------------------------------------------------------------------------


@pytest.mark.parametrize("target", [FORWARD, BACKWARD])
def test_without_its_lowering_causal_attention_fails(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = CASES["grouped, causal"][0]
    args, reference = (args, _forward) if target == FORWARD else (_grad_args(args, False), _backward)
    local.lookup(target)
    monkeypatch.delitem(local._LOCAL, target)
    with pytest.raises(MismatchError):
        check(target, args, reference=reference)


WRONG = {
    "keys split": (FORWARD, "b (g r) q e!, b g s+ e!, b g s+ d!, b 1 q s+ -> b (g r) q d!, b (g r) q"),
    "channels split": (FORWARD, "b (g r) q e+, b g s! e+, b g s! d, b 1 q s! -> b (g r) q d, b (g r) q"),
    "key heads minor": (FORWARD, "b (r g) q e!, b g s! e!, b g s! d!, b 1 q s! -> b (r g) q d!, b (r g) q"),
    "a mask that is not cut": (FORWARD, "b (g r) q e!, b g s! e!, b g s! d!, b 1 x! s! -> b (g r) q d!, b (g r) q"),
    "key gradients not summed": (
        BACKWARD,
        "b+ (g+ r:all) q:all d!, b (g r) q e!, b g s! e!, b g s! d!, b (g r) q d!, b (g r) q, b 1 q s! "
        "-> b (g r) q e!, b g s! e!, b g s! d!, b 1 q s!",
    ),
    "bias gradients not summed": (
        BACKWARD,
        "b+ (g:all r+) q+ d!, b (g r) q e!, b g s! e!, b g s! d!, b (g r) q d!, b (g r) q, b 1 q s! "
        "-> b (g r) q e!, b g s! e!, b g s! d!, b 1 q s!",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, line = WRONG[name]
    args = CASES["mask of samples"][0]
    args, reference = (args, _forward) if target == FORWARD else (_grad_args(args, True), _backward)
    rules.targets()
    monkeypatch.setitem(rules._RULES, target, lambda op: rules.Line(line, kind="attention", sizes={"g": 2, "r": H // 2}))
    with pytest.raises(MismatchError):
        check(target, args, reference=reference)


# --- what the rules say -----------------------------------------------------------------------------------------


def _placements(target: str, args: Any) -> dict[str, str]:
    """letter -> placements over one axis of two."""
    mesh = Mesh.of({"a": 2})
    op = call(target, args).op
    rule = rules.lookup(op)
    found = {}
    for letter, factor in rule.factors.items():
        strategy = {"a": (letter, factor.size // 2)}
        if factor.size % 2 == 0 and is_legal(rule, strategy, mesh):
            ins, outs = placements(rule, strategy, tuple(t.shape for t in op.inputs), tuple(o and o.shape for o in op.outputs))
            found[letter] = f"{', '.join(map(str, ins))} -> {', '.join(map(str, outs))}".replace("a:", "")
    return found


def test_what_may_be_split() -> None:
    args = _args(groups=2, bias=(B, 1, Q, S))
    assert _placements(FORWARD, args) == {
        "b": "S(0/2), S(0/2), S(0/2), S(0/2) -> S(0/2), S(0/2)",
        "g": "S(1/6), S(1), S(1), R -> S(1/6), S(1/6)",
        "r": "S(1/3), R, R, R -> S(1/3), S(1/3)",
        "q": "S(2/6), R, R, S(2/6) -> S(2/6), S(2/6)",
    }
    assert _placements(BACKWARD, _grad_args(args, True)) == {
        "b": "S(0/2), S(0/2), S(0/2), S(0/2), S(0/2), S(0/2), S(0/2) -> S(0/2), S(0/2), S(0/2), S(0/2)",
        "g": "S(1/6), S(1/6), S(1), S(1), S(1/6), S(1/6), R -> S(1/6), S(1), S(1), P(sum)",
        "r": "S(1/3), S(1/3), R, R, S(1/3), S(1/3), R -> S(1/3), P(sum), P(sum), P(sum)",
        "q": "S(2/6), S(2/6), R, R, S(2/6), S(2/6), S(2/6) -> S(2/6), P(sum), P(sum), S(2/6)",
    }


def test_a_ring_has_all_columns_of_its_mask() -> None:
    """Of the queries that are here, where it tells them apart."""
    args = _args(groups=2, bias=(B, 1, Q, Q), keys=Q)
    assert _placements(FORWARD, args)["s"] == "S(2/6), S(2/6), S(2/6), S(2/6) -> S(2/6), S(2/6)"
    assert _placements(BACKWARD, _grad_args(args, False))["s"] == (
        "S(2/6), S(2/6), S(2/6), S(2/6), S(2/6), S(2/6), S(2/6) -> S(2/6), S(2/6), S(2/6), R"
    )
    args = _args(groups=2, bias=(B, 1, 1, Q), keys=Q)
    assert _placements(FORWARD, args)["s"] == "S(2/6), S(2/6), S(2/6), R -> S(2/6), S(2/6)"
