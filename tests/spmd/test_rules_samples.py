"""Every rule of pointwise, view, factory, reduction, matmul and index on sample calls, on simulated ranks."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autopar import rules
from autopar.graph.mesh import Mesh
from autopar.passes import local
from autopar.passes.local.context import Local
from autopar.passes.local.sizes import SIZE_ARG
from autopar.rules.strategy import is_legal, placements
from tests.spmd.op_samples import EMPTY, SAMPLES
from tests.spmd.ops import MismatchError, call, check

FILES = ("pointwise", "view", "factory", "reduction", "matmul", "index")
HF_OPS = Path(__file__).resolve().parents[1] / "data" / "hf_ops.csv"
NOTHING_TO_SPLIT = {"aten.scalar_tensor.default": "it has no dims", "aten.prod.default": "products do not combine"}


def _ours(registry: dict[str, Any]) -> list[str]:
    return [t for t, fn in registry.items() if fn.__module__.rsplit(".", 1)[1] in FILES]


def _lowered() -> list[str]:
    rules.targets()
    local.lookup("")
    return _ours(local._LOCAL)


def test_every_rule_has_a_sample() -> None:
    rules.targets()
    matmuls = {"aten.mm.default", "aten.bmm.default", "aten.mv.default", "aten.dot.default", "aten.vdot.default"}
    assert (set(_ours(rules._RULES)) | matmuls) - set(SAMPLES) - set(EMPTY) == set()


@pytest.mark.parametrize("target", SAMPLES)
def test_sample(target: str) -> None:
    reports = [check(target, args, kwargs) for args, kwargs in SAMPLES[target]]
    for report in reports:
        assert not report.rule.is_fallback
        assert report.partials == set(report.rule.linear), "a linear set was not tried"
    assert reports[0].letters or target in NOTHING_TO_SPLIT


@pytest.mark.parametrize("target", EMPTY)
def test_empty(target: str) -> None:
    for args, kwargs in EMPTY[target]:
        assert check(target, args, kwargs, values=False).letters


def _hf_ops() -> list[str]:
    with HF_OPS.open() as f:
        return [row["op"] for row in csv.DictReader(f) if int(row["n_models"]) >= 3]


@pytest.mark.parametrize("target", _hf_ops())
def test_ops_of_real_models_split(target: str) -> None:
    """No fallback, and something to split, on the first sample of every op that three models or more use."""
    args, kwargs = {**SAMPLES, **EMPTY}[target][0]
    rule = rules.lookup(call(target, args, kwargs).op)
    assert not rule.is_fallback
    assert any(x.split and x.size > 1 for x in rule.factors.values()) or target in NOTHING_TO_SPLIT


# --- a test that cannot fail is a defect ------------------------------------------------------------------------


def _fails(target: str) -> bool:
    for args, kwargs in {**SAMPLES, **EMPTY}[target]:
        try:
            check(target, args, kwargs, values=target not in EMPTY)
        except MismatchError:
            return True
    return False


@pytest.mark.parametrize("target", _lowered())
def test_without_its_lowering_an_op_fails(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _fails(target)
    monkeypatch.delitem(local._LOCAL, target)
    assert _fails(target)


@pytest.mark.parametrize("target", [t for t in SIZE_ARG if t in SAMPLES or t in EMPTY])
def test_without_a_local_size_an_op_fails(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SIZE_ARG, target)
    assert _fails(target)


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("aten.relu.default", rules.Line("a b -> a b", "0")),
        ("aten.add.Tensor", rules.Line("a b, a b -> a b", "0")),
        ("aten.logsumexp.default", rules.Line("a b+ -> a")),
        ("aten.sort.default", rules.Line("a b -> a b, a b")),
        ("aten.cumsum.default", rules.Line("a b -> a b")),
        ("aten.amax.default", rules.Line("a b:min c -> a c")),
        ("aten.flip.default", rules.Line("a b c -> a b c")),
        ("aten.t.default", rules.Line("a b -> b! a!", "0")),
    ],
)
def test_a_wrong_rule_fails(target: str, line: rules.Line, monkeypatch: pytest.MonkeyPatch) -> None:
    args, kwargs = SAMPLES[target][0]
    check(target, args, kwargs)
    rules.targets()
    monkeypatch.setitem(rules._RULES, target, lambda op: line)
    if target == "aten.t.default":
        assert check(target, args, kwargs).letters == set()
        return
    with pytest.raises(MismatchError):
        check(target, args, kwargs)


# --- tracing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", _lowered())
def test_a_lowering_traces_to_one_text(target: str) -> None:
    """Under fake tensors no rank's coordinate can be read: every rank's graph is the same."""
    mesh = Mesh.of({"a": 2})
    args, kwargs = {**SAMPLES, **EMPTY}[target][0]
    c = call(target, args, kwargs)
    rule = rules.lookup(c.op)
    tried = 0
    for letter, factor in rule.factors.items():
        strategy = {"a": (letter, factor.size // 2)}
        if factor.size % 2 or not is_legal(rule, strategy, mesh):
            continue
        ins, outs = placements(rule, strategy, tuple(t.shape for t in c.op.inputs), tuple(o and o.shape for o in c.op.outputs))

        def run(coordinate: torch.Tensor, *tensors: torch.Tensor, ins: Any = ins, outs: Any = outs, strategy: Any = strategy) -> Any:
            mine = iter(tensors)
            ctx = Local(c.op, rule, mesh, strategy, ins, outs, lambda axis: coordinate, lambda axes: "group", lambda: coordinate)
            swapped = torch.utils._pytree.tree_map_only(torch.Tensor, lambda _: next(mine), (c.args, c.kwargs))
            return local.apply(ctx, c.fn, *swapped)

        pieces = [torch.zeros(p.local_shape(mesh), dtype=t.dtype) for p, t in zip(ins, c.tensors, strict=True)]
        graph = make_fx(run, tracing_mode="fake")(torch.tensor(0), *pieces)
        found = next(n for n in graph.graph.nodes if n.op == "output").args[0]
        for node, p in zip(found if isinstance(found, (list, tuple)) else [found], outs, strict=True):
            assert tuple(node.meta["val"].shape) == p.local_shape(mesh)
        tried += 1
    assert tried


# --- what the rules say -----------------------------------------------------------------------------------------


def _splittable(target: str, *args: Any, **kwargs: Any) -> set[str]:
    """Placements, over one axis of two, that operands and outputs may have: "S(0), R -> P(sum)"."""
    mesh = Mesh.of({"a": 2})
    c = call(target, args, kwargs)
    rule = rules.lookup(c.op)
    found = set()
    for letter, factor in rule.factors.items():
        strategy = {"a": (letter, factor.size // 2)}
        if factor.size % 2 == 0 and is_legal(rule, strategy, mesh):
            ins, outs = placements(rule, strategy, tuple(t.shape for t in c.op.inputs), tuple(o and o.shape for o in c.op.outputs))
            found.add(f"{', '.join(map(str, ins))} -> {', '.join(map(str, outs))}".replace("a:", ""))
    return found


T = torch.zeros
CASES: list[tuple[set[str], str, tuple[Any, ...]]] = [
    ({"S(0/2), R -> S(0/2)", "S(1/2), S(0/2) -> P(sum)", "R, S(1/2) -> S(1/2)"}, "aten.mm.default", (T(4, 4), T(4, 4))),
    # A bias is whole where the inner dim is split, and split with the columns.
    (
        {"R, S(0/2), R -> S(0/2)", "R, S(1/2), S(0/2) -> P(sum)", "S(0/2), R, S(1/2) -> S(1/2)"},
        "aten.addmm.default", (T(4), T(4, 4), T(4, 4)),
    ),
    # (b s) d with s split keeps s split inside the rows; heads come from the major part of the columns.
    ({"S(0/4) -> S(0)", "S(0/2) -> S(1/2)", "S(1/4) -> S(2/4)"}, "aten.view.default", (T(8, 8), [2, 4, 8])),
    ({"S(0) -> S(0/4)", "S(1/2) -> S(0/2)", "S(2/4) -> S(1/4)"}, "aten.view.default", (T(2, 4, 8), [8, 8])),
    ({"S(0/2) -> S(0/2)", "S(1/6) -> S(1)", "S(1/3) -> S(2/3)"}, "aten.view.default", (T(4, 12), [4, 2, 6])),
    # Incompatible in the middle alone.
    ({"S(0/3) -> S(0/2)", "S(1) -> S(1)"}, "aten.view.default", (T(6, 4), [4, 6])),
    # A fused q, k, v: every third split alike; of unequal parts, their common block.
    ({"S(0/2) -> S(0/2), S(0/2), S(0/2)", "S(1/4) -> S(1/4), S(1/4), S(1/4)"}, "aten.split.Tensor", (T(4, 24), 8, 1)),
    ({"S(0/2) -> S(0/2), S(0/2), S(0/2)"}, "aten.split_with_sizes.default", (T(24), [16, 4, 4])),
    ({"S(0/2), S(0/2) -> S(0/2)", "S(1/4), S(1/4) -> S(1/4)"}, "aten.cat.default", ([T(4, 8), T(4, 8)], 1)),
    ({"S(0/2) -> S(0/2)", "S(1/2) -> S(1/2)"}, "aten.slice.Tensor", (T(4, 8), 1, 4, 8)),
    ({"S(0/2) -> S(0/2)"}, "aten.slice.Tensor", (T(4, 8), 1, 1, 8)),
    ({"S(0/2) -> S(0/2)", "S(1/4) -> S(1/2)"}, "aten.slice.Tensor", (T(4, 8), 1, 0, 8, 2)),
    ({"S(0/2) -> S(0/2)", "S(1/2) -> S(1/2)"}, "aten.slice_backward.default", (T(4, 4), [4, 8], 1, 0, 4, 1)),
    ({"S(0/2) -> P(sum)", "S(1/2) -> S(0/2)"}, "aten.select.int", (T(4, 4), 0, 1)),
    # The table split: a masked lookup, summed. Its gradient: the batch is summed.
    ({"S(0/2), R -> P(sum)", "S(1/2), R -> S(1/2)", "R, S(0/2) -> S(0/2)"}, "aten.embedding.default", (T(4, 4), T(4, dtype=torch.int64))),
    (
        {"R, R -> S(0/2)", "S(1/2), R -> S(1/2)", "S(0/2), S(0/2) -> P(sum)"},
        "aten.embedding_dense_backward.default", (T(4, 4), T(4, dtype=torch.int64), 4, -1, False),
    ),
    ({"S(0/2) -> S(0/2)", "S(1/2) -> P(sum)"}, "aten.mean.dim", (T(4, 4), [1])),
    ({"S(0/2) -> S(0/2)", "S(1/2) -> P(max)"}, "aten.amax.default", (T(4, 4), [1])),
    ({"S(0/2) -> S(0/2)"}, "aten.var.correction", (T(4, 4), [1])),
    ({"S(0/2) -> S(0/2)", "S(1/2) -> S(1/2)"}, "aten._log_softmax.default", (T(4, 4), 1, False)),
    ({" -> S(0/2)"}, "aten.arange.default", (4,)),
]  # fmt: skip


@pytest.mark.parametrize(("want", "target", "args"), CASES)
def test_what_may_be_split(want: set[str], target: str, args: tuple[Any, ...]) -> None:
    assert _splittable(target, *args) == want


def test_what_is_linear() -> None:
    def linear(target: str, *args: Any) -> set[frozenset[int]]:
        return set(rules.lookup(call(target, args).op).linear)

    x, mask = T(4, 4), T(4, 4, dtype=torch.bool)
    first, second, both = frozenset({0}), frozenset({1}), frozenset({0, 1})
    assert linear("aten.mul.Tensor", x, x) == {first, second}
    assert linear("aten.add.Tensor", x, x) == {both}
    assert linear("aten.add.Tensor", x, 1.0) == set()
    assert linear("aten.div.Tensor", x, x) == {first}
    assert linear("aten.where.self", mask, x, x) == {frozenset({1, 2})}
    assert linear("aten.masked_fill.Scalar", x, mask, 0) == {first}
    assert linear("aten.masked_fill.Scalar", x, mask, -1.0) == set()
    assert linear("aten._to_copy.default", mask) == set()
    assert linear("aten.gelu_backward.default", x, x) == {first}
    assert linear("aten.sum.dim_IntList", mask, [1]) == set()
