"""Products of sorted tokens with their experts' matrices, and masked scatters, on simulated ranks against the whole op.

Experts without tokens, tokens behind the last offset (of no expert), experts split at any digit, rows of no whole 16-byte unit; sources
longer than what is masked, masks that broadcast.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from autopar import rules
from autopar.passes import local
from tests.spmd.ops import call
from tests.spmd.recorded import Recorded, check_all, f, fails, record, registered

transformers_moe = pytest.importorskip("transformers.integrations.moe")
TARGETS = registered(rules._RULES, "moe")
COUNTS = {
    "uneven": [3, 0, 5, 1, 0, 0, 7, 2, 4, 1, 1, 0],
    "one expert": [0, 0, 0, 0, 24, 0, 0, 0, 0, 0, 0, 0],
    "the last": [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 24],
    "none": [0] * 12,
    "sentinels": [3, 0, 5, 1, 0, 0, 2, 2, 0, 1, 1, 0],
    "21 rows": [3, 0, 5, 1, 0, 0, 7, 2, 1, 1, 1, 0],
}


def _offsets(name: str) -> torch.Tensor:
    return torch.tensor(COUNTS[name]).cumsum(0).to(torch.int32)


def _fallback(name: str) -> list[Recorded]:
    return record(TARGETS, torch.ops.transformers.grouped_mm_fallback, f(24, 12), f(12, 12, 24), _offsets(name))


def _grouped(name: str, dtype: torch.dtype, k: int, n: int) -> list[Recorded]:
    """torch's kernel has no float64; in its place whole numbers, whose products every type here has exactly. What it leaves in rows
    behind the last offset is undefined: every row has an expert."""
    rows = sum(COUNTS[name])
    x, w = (torch.randint(-2, 3, s).to(dtype).requires_grad_() for s in ((rows, k), (12, n, k)))
    grad = torch.randint(-2, 3, (rows, n)).to(dtype)
    calls = record(TARGETS, lambda: F.grouped_mm(x, w.mT, offs=_offsets(name)))
    return [(op, tuple(_whole(a, grad) for a in args), kwargs) for op, args, kwargs in calls]


def _whole(a: object, grad: torch.Tensor) -> object:
    """The gradient that the recorder sent down, random numbers, made whole as well."""
    if not isinstance(a, torch.Tensor) or not a.is_floating_point() or torch.equal(a, a.round()):
        return a
    return grad if a.shape == grad.shape else grad.mT


def _masked(source: int, *mask: int, true: float = 0.5) -> list[Recorded]:
    where = torch.rand(mask, generator=torch.Generator().manual_seed(0)) < true
    return record(TARGETS, torch.masked_scatter, f(4, 6, 12), where, f(source, 12))


PRODUCTS: dict[str, Callable[[], list[Recorded]]] = {
    **{f"fallback, {name}": lambda name=name: _fallback(name) for name in COUNTS},
    **{f"float32, {name}": lambda name=name: _grouped(name, torch.float32, 24, 48) for name in COUNTS if sum(COUNTS[name]) in (21, 24)},
    "bfloat16": lambda: _grouped("uneven", torch.bfloat16, 96, 192),
    "bfloat16, 21 rows": lambda: _grouped("21 rows", torch.bfloat16, 96, 192),
}
SCATTERS: dict[str, Callable[[], list[Recorded]]] = {
    "all": lambda: _masked(24, 4, 6, 12, true=1.0),
    "a longer source": lambda: _masked(30, 4, 6, 12),
    "a mask of rows": lambda: _masked(24, 6, 1),
    "none": lambda: _masked(2, 4, 6, 1, true=0.0),
    "none, no source": lambda: _masked(0, 4, 6, 12, true=0.0),
}
CASES = {**PRODUCTS, **SCATTERS}


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_strategy(name: str) -> None:
    for reports in check_all(PRODUCTS[name]()).values():
        assert all(r.letters == {"k", "n", "e"} and r.rule.kind == "moe" for r in reports)


@pytest.mark.parametrize("name", SCATTERS)
def test_a_masked_scatter_splits_in_every_dim(name: str) -> None:
    for reports in check_all(SCATTERS[name]()).values():
        assert all(r.letters == {"d0", "d1", "d2"} for r in reports)


def test_every_rule_is_tried() -> None:
    assert TARGETS - {str(c[0]) for case in CASES.values() for c in case()} == set()


@pytest.mark.parametrize("target", sorted(registered(local._LOCAL, "moe")))
def test_without_its_lowering_an_op_fails(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [c for case in CASES.values() for c in case() if str(c[0]) == target]
    monkeypatch.delitem(local._LOCAL, target)
    assert fails(calls, target)


def test_rows_of_no_whole_unit_stay_whole() -> None:
    """The kernel refuses rows that are no multiple of 16 bytes, so such splits are not offered."""
    args = (torch.zeros(8, 12), torch.zeros(4, 12, 8), torch.tensor([2, 4, 6, 8], dtype=torch.int32))
    rule = rules.lookup(call("aten._grouped_mm.default", args).op)
    assert {x: rule.factors[x].size for x in ("k", "n")} == {"k": 3, "n": 2}
    assert not rule.factors["u"].split and not rule.factors["v"].split
