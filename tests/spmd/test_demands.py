"""Every operator that torch's samples call, on operands that lie otherwise: transposed, channels last, with gaps, all of them or all but one. With what
`passes/demands.py` says of it the result is that of contiguous operands. An operator whose kernel trusts its operands' strides, and is not listed there, fails
here (or ends the process: each name of torch's table runs in one of its own).
"""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx import Graph
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from autopar.passes.demands import DEMANDS, guarded
from autopar.tensors.memory_format import channels_last, inverse, strides_of
from tests.spmd.ops import aten_calls

SKIPPED = ("to_sparse", "jiterator", "sparse.", "empty", "new_empty")
NAMES = sorted({o.name for o in op_db if not o.name.startswith(SKIPPED)})
GROUPS = 16
SAMPLES, CALLS = 10, 6
# Outputs that are not defined, or not by the operands' values alone.
UNDEFINED = {
    "aten._ctc_loss": 1,  # scratch for backward, part of it never written
    "aten._embedding_bag": 1,
    "aten._embedding_bag_forward_only": 1,
    "aten._linalg_det": 1,  # a matrix is factored as it lies, or its transpose
    "aten._linalg_slogdet": 2,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": 0,  # called by kernels/attention.py alone, on contiguous operands
}
NOT_AS_RECORDED = ("aten.view.", "aten._unsafe_view.")  # lowered as reshape, or copied before (`passes/lay_out.py`)


def gaps(t: torch.Tensor) -> torch.Tensor:
    return torch.stack([t, torch.zeros_like(t)], -1)[..., 0]


def orders(t: torch.Tensor) -> Iterator[tuple[int, ...]]:
    dims = t.dim()
    if dims >= 2:
        yield tuple(reversed(range(dims)))
    if dims >= 3:
        yield channels_last(dims)
        yield (1, 0, *range(2, dims))


def lay(t: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    return t.permute(order).contiguous().permute(inverse(order))


def single(t: torch.Tensor, order: tuple[int, ...], stride: int) -> torch.Tensor:
    """`t` in `order`, its dims of one element with this stride, which moves nothing."""
    laid = lay(t, order)
    return laid.as_strided(laid.shape, [stride if n == 1 else s for n, s in zip(laid.shape, laid.stride(), strict=True)])


def variants(leaves: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    at = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.layout == torch.strided and x.dim() and x.numel() > 1]

    def but(changed: dict[int, torch.Tensor]) -> list[Any]:
        return [changed.get(i, x) for i, x in enumerate(leaves)]

    for i in at:
        yield f"operand {i} with gaps", but({i: gaps(leaves[i])})
        for order in orders(leaves[i]):
            yield f"operand {i} in {order}", but({i: lay(leaves[i], order)})
        for order, stride in itertools.product(
            (tuple(range(leaves[i].dim())), *orders(leaves[i])), (1, 3, 10**4) if 1 in leaves[i].shape else ()
        ):
            yield f"operand {i} in {order}, dims of one element with stride {stride}", but({i: single(leaves[i], order, stride)})
    for left_out in (-1, *at):
        some = {i: lay(leaves[i], channels_last(leaves[i].dim())) for i in at if i != left_out and leaves[i].dim() >= 3}
        if some:
            yield f"channels last, operand {left_out} not", but(some)


def lays_out(fn: Any) -> Callable[..., Any]:
    return guarded(Graph().call_function(fn)) or fn


def calls_of(name: str) -> Iterator[Any]:
    found: dict[str, Any] = {}
    for info in (o for o in op_db if o.name == name):
        dtype = next((d for d in (torch.float32, torch.float64) if d in info.supported_dtypes("cpu")), None)
        if dtype is None:
            continue
        torch.manual_seed(0)
        random.seed(0)
        samples = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=info.supports_autograd), 40))
        for s in samples[:: max(1, len(samples) // SAMPLES)][:SAMPLES]:
            for c in aten_calls(info.op, (s.input, *s.args), s.kwargs, backward=info.supports_autograd):
                shapes = tree_map_only(torch.Tensor, lambda t: (tuple(t.shape), t.dtype), c[1:])
                found.setdefault(f"{c[0]} {shapes}", c)
    seen: dict[str, int] = {}
    for c in found.values():
        target = str(c[0])
        seen[target] = seen.get(target, 0) + 1
        random_ = torch.Tag.nondeterministic_seeded in c[0].tags or "empty" in target
        if seen[target] <= CALLS and not random_ and not target.startswith(NOT_AS_RECORDED):
            yield c


def wrong(fn: Any, args: Any, kwargs: Any) -> Iterator[str]:
    leaves, spec = tree_flatten((args, kwargs))
    defined = UNDEFINED.get(str(fn).rpartition(".")[0], 99)

    def run(call: Callable[..., Any], values: list[Any]) -> list[torch.Tensor]:
        a, k = tree_unflatten(values, spec)
        return [t for t in tree_leaves(call(*a, **k)) if isinstance(t, torch.Tensor)][:defined]

    try:
        want = run(fn, leaves)
    except (RuntimeError, NotImplementedError):
        return  # a sample that asks for an error
    for how, values in variants(leaves):
        try:
            got = run(lays_out(fn), values)
        except (RuntimeError, ValueError) as e:
            yield f"{fn}, {how}: {type(e).__name__} {str(e)[:100]}"
            continue
        equal = (g.shape == w.shape and torch.allclose(g, w, rtol=1e-3, atol=1e-4, equal_nan=True) for g, w in zip(got, want, strict=True))
        if not all(equal):
            yield f"{fn}, {how}: another result"


def report(name: str) -> Iterator[str]:
    for c in calls_of(name):
        if all(t.layout == torch.strided for t in tree_leaves(c[1:]) if isinstance(t, torch.Tensor)):
            yield from wrong(*c)


def in_a_process(name: str) -> list[str]:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(120)
        try:
            with warnings.catch_warnings(), os.fdopen(write, "w") as out:
                warnings.simplefilter("ignore")
                torch.set_num_threads(1)
                out.write("\n".join(report(name)))
        except BaseException as e:
            os.write(2, f"{name}: {type(e).__name__}: {e}\n".encode())
            os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        lines = [line for line in said.read().splitlines() if line]
    _, status = os.waitpid(pid, 0)
    return lines + ([f"{name}: the process ended with {status}"] if status else [])


@pytest.mark.wide
@pytest.mark.parametrize("group", range(GROUPS))
def test_result_does_not_depend_on_how_operands_lie(group: int) -> None:
    found = [line for name in NAMES[group::GROUPS] for line in in_a_process(name)]
    assert not found, "\n".join(found[:40])


def test_without_its_demand_an_operator_is_wrong() -> None:
    """So that the samples above would find another."""
    x = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    grad = lay(x.flip(0), channels_last(4))
    fn = torch.ops.aten.native_group_norm_backward.default
    mean, rstd = torch.ops.aten.native_group_norm(x, None, None, 2, 4, 9, 2, 1e-5)[1:]
    rest = (mean, rstd, None, 2, 4, 9, 2, [True, False, False])
    want = fn(grad.contiguous(), x, *rest)[0]
    assert not torch.allclose(fn(grad, x, *rest)[0], want)
    assert torch.allclose(lays_out(fn)(grad, x, *rest)[0], want)


@pytest.mark.parametrize("shape", [(1, 8, 4, 4), (2, 8, 4, 1), (2, 8, 1, 4), (1, 8, 4, 1), (1, 8, 2, 3, 3)])
def test_strides_of_dims_of_one_element(shape: tuple[int, ...]) -> None:
    """A batch of one on a rank, or an image of one column: kernels tell channels last by strides that move nothing."""
    n, c, plane = shape[0], shape[1], math.prod(shape[2:])
    g = torch.Generator().manual_seed(0)
    x, grad = torch.randn(shape, generator=g), torch.randn(shape, generator=g)
    aten = torch.ops.aten
    _, mean, rstd = aten.native_group_norm(x, None, None, n, c, plane, 2, 1e-5)
    batch = aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[1:]
    calls: list[tuple[Any, list[Any]]] = [
        (aten.native_group_norm.default, [x, None, None, n, c, plane, 2, 1e-5]),
        (aten.native_group_norm_backward.default, [grad, x, mean, rstd, torch.ones(c), n, c, plane, 2, [True, True, True]]),
        (aten.native_batch_norm_backward.default, [grad, x, None, None, None, *batch, True, 1e-5, [True, True, True]]),
    ]
    for fn, args in calls:
        want = fn(*args)
        for stride, other in itertools.product((1, 3, 8, 10**4), repeat=2):
            laid = [
                single(a, channels_last(a.dim()), k) if a is x or a is grad else a
                for a, k in zip(args, (stride, other) + (0,) * 9, strict=False)
            ]
            for got, w in zip(lays_out(fn)(*laid), want, strict=True):
                torch.testing.assert_close(got, w, rtol=1e-4, atol=1e-5, msg=lambda m, f=fn, s=(stride, other): f"{f} {s}: {m}")


def test_every_demand_is_of_an_operator() -> None:
    for name in DEMANDS:
        namespace, packet, *overload = name.split(".")
        op = getattr(getattr(torch.ops, namespace), packet)
        assert not overload or hasattr(op, overload[0])


def test_formats() -> None:
    assert strides_of((2, 4, 3, 5), channels_last(4)) == torch.empty(2, 4, 3, 5, memory_format=torch.channels_last).stride()
    assert strides_of((2, 4, 3, 5, 6), channels_last(5)) == torch.empty(2, 4, 3, 5, 6, memory_format=torch.channels_last_3d).stride()
