"""What plans say of kernels, and what prices say that they move: beside the bodies as they run, and beside every load and store of the interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autopar.cost import experts as experts_cost
from autopar.cost import loss_head as loss_head_cost
from autopar.cost.compute import local_sizes
from autopar.cost.ring import merging
from autopar.cost.triton import uses
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.kernels import attention, experts, gates, loss_head  # noqa: F401 (operators)
from autopar.kernels.triton import combine, gate, merge, scores
from autopar.rules import lookup
from tests.kernels.where import DEVICE, INTERPRETED, only, random
from tests.spmd.ops import call
from tests.unit.test_loss_head import most_allocated

MODULES = {"combine": combine, "gate": gate, "merge": merge, "scores": scores}
H100 = Cluster.of("h100").device
WHOLE = Mesh(())


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that are launched, in turn."""
    found: list[str] = []
    with only(True):
        for name, module in MODULES.items():

            def told(*args: Any, name: str = name, launch: Any = module.launch, **kwargs: Any) -> None:
                found.append(name)
                launch(*args, **kwargs)

            monkeypatch.setattr(module, "launch", told)
        yield found


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every load and store that a mask lets through."""
    if not INTERPRETED:
        pytest.skip("a GPU does not say what its kernels load")
    found: list[int] = []
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    for name in ("create_masked_load", "create_masked_store"):
        real = getattr(builder, name)

        def counted(self: Any, ptrs: Any, *args: Any, real: Any = real, at: int = name.endswith("store"), **kwargs: Any) -> Any:
            found.append(int(args[at].data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8)
            return real(self, ptrs, *args, **kwargs)

        monkeypatch.setattr(builder, name, counted)
    return found


def head(
    dtype: torch.dtype,
    backward: bool,
    wanted: tuple[bool, bool, bool] = (True, True, False),
    tile: int = 2**24,
    sizes: tuple[int, int, int] = (16, 1000, 16),
    cap: float = 0.0,
) -> tuple[Any, tuple[Any, ...]]:
    """sizes: tokens, words, features."""
    tokens, words, features = sizes
    h, w = random(tokens, features, seed=0, dtype=dtype), random(words, features, seed=1, dtype=dtype)
    target = torch.arange(tokens, device=DEVICE)
    row = torch.ones(tokens, dtype=torch.promote_types(dtype, torch.float32), device=DEVICE)
    if backward:
        return torch.ops.autopar.linear_log_prob_backward_v1.default, (
            row,
            None,
            row,
            h,
            w,
            None,
            target,
            row,
            1.0,
            cap,
            tile,
            list(wanted),
        )
    return torch.ops.autopar.linear_log_prob_v1.default, (h, w, None, target, False, 1.0, cap, tile)


def routed(
    dtype: torch.dtype, backward: bool, fn: Callable[[torch.Tensor], torch.Tensor], scores: torch.dtype | None = None
) -> tuple[Any, tuple[Any, ...]]:
    tokens, chosen, number, features, inner = 12, 2, 3, 64, 48
    name = gates.named(fn, dtype)
    assert name is not None
    x, index = random(tokens, features, seed=0, dtype=dtype), torch.arange(tokens * chosen, device=DEVICE).view(tokens, chosen) % number
    w1, w2 = random(number, 2 * inner, features, seed=1, dtype=dtype), random(number, features, inner, seed=2, dtype=dtype)
    s = random(tokens, chosen, seed=3, dtype=scores or dtype)
    rest = (x, index, s, w1, w2, None, None, False, False, name, "", 1, [])
    return (torch.ops.autopar.experts_backward_v1.default, (x, *rest)) if backward else (torch.ops.autopar.experts_v1.default, rest)


def swiglu(h: torch.Tensor) -> torch.Tensor:
    return F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]


def twice(h: torch.Tensor) -> torch.Tensor:
    """Of no form that a kernel has."""
    return F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[0]


CALLS = {
    **{f"head, {d}, {b}": (lambda d=d, b=b: head(getattr(torch, d), b)) for d in ("float32", "bfloat16", "float64") for b in (False, True)},
    **{f"experts, {d}, {b}": (lambda d=d, b=b: routed(getattr(torch, d), b, swiglu)) for d in ("float32", "float64") for b in (False, True)},
    **{f"experts of another gate, {b}": (lambda b=b: routed(torch.float32, b, twice)) for b in (False, True)},
    **{f"experts, wide scores, {b}": (lambda b=b: routed(torch.float32, b, swiglu, torch.float64)) for b in (False, True)},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_a_plan_says_is_what_runs(name: str, launched: list[str]) -> None:
    fn, args = CALLS[name]()
    op = call(fn, args).op
    said = list(uses(op, {}, WHOLE, H100.why_no_triton))
    assert said and {u.kernel for u in said if not u.why_not} == set(launched)
    assert all(u.why_not == "kernels are for GPUs" for u in uses(op, {}, WHOLE, Cluster.of("cpu").device.why_no_triton))
    for u in said:
        assert not u.why_not or ("float64" in u.why_not) == ("float64" in name or "wide" in name), u


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_queries_that_a_rank_has_some_of(dtype: torch.dtype, launched: list[str]) -> None:
    q, k = random(1, 2, 8, 16, seed=0, dtype=dtype), random(1, 2, 8, 16, seed=1, dtype=dtype)
    op = call(torch.ops.autopar.attention_v2.default, (q, k, k, None, True, 0.25, None)).op
    assert not launched and not list(uses(op, {}, WHOLE, H100.why_no_triton)), "one set of keys"
    attention.attention(q[:, :, 4:], k, k, None, True, 0.25, torch.arange(4, 8, device=DEVICE))
    (said,) = uses(op, {"cp": ("q", 4)}, Mesh.of({"cp": 2}), H100.why_no_triton)
    assert said.kernel == "merge" and (["merge"] if not said.why_not else []) == launched


# ---- prices --------------------------------------------------------------------------------------------------------


def scores_moved(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Bytes of scores that products write and read, and how many kernels these are."""
    nbytes, kernels = list[int](), list[int]()
    products, add = loss_head._products, loss_head._add_product

    def product(*args: Any) -> torch.Tensor:
        made = products(*args)
        nbytes.append(made.nbytes)
        kernels.append(1)
        return made

    def added(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        nbytes.append(a.nbytes)
        kernels.append(1 if into.dtype == a.dtype else 2)
        add(into, a, b)

    monkeypatch.setattr(loss_head, "_products", product)
    monkeypatch.setattr(loss_head, "_add_product", added)
    return nbytes, kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile", [2**24, 2**14], ids=["one tile", "tiles"])
@pytest.mark.parametrize("wanted", [None, (True, True, False), (False, True, False), (False, False, False)], ids=str)
def test_a_head_moves_what_is_priced(
    wanted: tuple[bool, bool, bool] | None,
    tile: int,
    dtype: torch.dtype,
    launched: list[str],
    moved: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every pass over scores; numbers of a row are besides, and of sums over tiles what is added up elsewhere."""
    nbytes, kernels = scores_moved(monkeypatch)
    op = call(*head(dtype, wanted is not None, wanted or (False, False, False), tile)).op
    n = local_sizes(lookup(op), {}, WHOLE)
    assert loss_head_cost.launches(op, n, True) == sum(kernels) + len(launched)
    at = 7 if wanted is None else 10
    whole = replace(op, args=(*op.args[:at], 2**24, *op.args[at + 1 :]))  # of which nothing is added up
    expected = loss_head_cost.passes_bytes(whole, n, True)
    assert expected <= sum(moved) + sum(nbytes) <= 1.03 * expected
    assert expected < 0.6 * loss_head_cost.passes_bytes(whole, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile", [2**18, 2**16], ids=["blocks", "chunks and blocks"])
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_a_head_takes_up_what_is_planned_for(cap: float, tile: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of products and what the body makes besides. Kernels and a GPU's products allocate no more; the interpreter does, and a CPU's in bfloat16."""
    if DEVICE != "cpu":
        pytest.skip("allocations are counted on a CPU")
    monkeypatch.setattr(scores, "launch", lambda *args, **kwargs: None)
    monkeypatch.setattr(loss_head, "_products", lambda h, w, b: h.new_empty(len(h), len(w)))
    monkeypatch.setattr(loss_head, "_add_product", lambda into, a, b: a.new_empty(into.shape if into.dtype != a.dtype else 0))
    with only(True):
        for wanted in ((True, True, False), (True, False, False), (False, True, False), None):
            fn, args = head(dtype, wanted is not None, wanted or (False, False, False), tile, (700, 3000, 64), cap)
            op = call(fn, args).op
            expected = loss_head_cost.workspace_bytes(op, local_sizes(lookup(op), {}, WHOLE), True)
            took = most_allocated(lambda fn=fn, args=args: fn(*args)) - sum(t.nbytes for t in op.outputs if t is not None)
            late = op.outputs[0].nbytes if wanted is not None and dtype != torch.float32 and op.outputs[0] is not None else 0
            assert 0.95 * expected - late <= took <= 1.05 * expected, (wanted, took, expected)  # dh is made at the end, of its sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_move_what_is_priced(dtype: torch.dtype, launched: list[str], moved: list[int]) -> None:
    """Forward. Beside what kernels load and store: what gathers rows, and products, read and write; the result is counted with the operands."""
    made = call(*routed(dtype, False, swiglu))
    n, size = local_sizes(lookup(made.op), {}, WHOLE), dtype.itemsize
    rows, d, f = n["t"] * n["k"], n["d"], n["f"]
    beside = rows * (3 * d + n["u"] * f + f) * size
    result = made.op.outputs[0]
    assert result is not None and launched == ["gate", "combine"]
    expected = experts_cost.moved_bytes(made.op, n, True)
    assert expected <= sum(moved) - result.nbytes + beside <= 1.05 * expected
    assert experts_cost.moved_bytes(made.op, n) - expected == 2 * rows * d * size


def test_merging_moves_what_is_priced(launched: list[str], moved: list[int]) -> None:
    """A block's results in bfloat16 into float32."""
    b, h, q, d = 1, 2, 16, 64
    out, other = random(b, h, q, d, seed=0), random(b, h, q, d, seed=1, dtype=torch.bfloat16)
    lse, its = random(b, h, q, seed=2), random(b, h, q, seed=3)
    attention.merge(out, lse, out, lse, other, its)
    k = random(b, h, q, d, seed=4, dtype=torch.bfloat16)
    op = call(torch.ops.autopar.attention_v2.default, (k, k, k, None, False, 0.1, None)).op
    rule, mesh, ring = lookup(op), Mesh.of({"cp": 2}), {"cp": ("s", 8)}
    of_two = merging(op, rule, ring, local_sizes(rule, ring, mesh), mesh, True)  # blocks of half the queries each
    assert launched == ["merge"] and of_two[0] <= sum(moved) <= 1.05 * of_two[0] and of_two[1] == 2.0
    assert merging(op, rule, ring, local_sizes(rule, ring, mesh), mesh)[1] == 4.0
