"""Lookups by all numbers of a dim become copies in another order of dims: the same values, no memory shared, and split like anything pointwise."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.capture.capture import Call, capture
from autopar.capture.describe import describe
from autopar.capture.identity_index import plain_indices
from autopar.rules import lookup

LOOKUP = torch.ops.aten.index.Tensor


def rewritten(f: Callable[..., Tensor], *given: Tensor) -> tuple[int, list[Any], Tensor]:
    """How many lookups were rewritten, the operators that are left, and what they compute."""
    gm = make_fx(f, tracing_mode="fake")(*given)
    mode = next(n for n in gm.graph.nodes if n.op == "placeholder").meta["val"].fake_mode
    assert isinstance(mode, FakeTensorMode)
    found = plain_indices(gm, mode)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    out = gm(*given)
    (result,) = gm.graph.output_node().args
    val = result.meta["val"]
    assert val.shape == out.shape and val.stride() == out.stride()
    return found, [n.target for n in gm.graph.nodes if n.op == "call_function"], out


X = torch.randn(3, 5, 4)
IDS = torch.tensor([2, 0, 4, 1])
WHOLE = [
    lambda x, j: x[torch.arange(3)],
    lambda x, j: x[torch.arange(3)[:, None, None, None], torch.arange(5)[None, None, None, :]],  # a mask, as transformers looks it up
    lambda x, j: x[torch.full((2, 1), 2), (torch.arange(5) + 0)[None, :]],
    lambda x, j: x[:, torch.arange(5)[:, None], torch.arange(4)],
    lambda x, j: x[torch.arange(3)[None, :], torch.arange(5)[:, None]],  # in the other order
    lambda x, j: x[torch.arange(3)[:, None], :, torch.arange(4)],  # not side by side
    lambda x, j: x[torch.arange(3)[:, None], j],
    lambda x, j: x[torch.arange(3), :, j[:, None] % 4],
    lambda x, j: x[:, j, torch.arange(4)[:, None]],
    lambda x, j: x[torch.arange(0, 3, 1).view(3, 1, 1).to(torch.int32).long(), torch.arange(5)[:, None], j[:, None, None, None] % 4],
]
OTHER = [
    lambda x, j: x[torch.arange(2)],
    lambda x, j: x[torch.arange(2, -1, -1).flip(0) + 1 - 1],
    lambda x, j: x[torch.arange(1, 4) - 1],
    lambda x, j: x[torch.arange(3) + 0 * j[:3]],
    lambda x, j: x[torch.arange(3), torch.arange(3)],  # a diagonal
    lambda x, j: x[torch.arange(3), j[:3]],
    lambda x, j: x[torch.arange(3).expand(2, 3)],  # twice
    lambda x, j: x[torch.arange(3).bool().long()],  # no longer counts
    lambda x, j: x[torch.arange(0, 6, 2) % 3],
    lambda x, j: x[x[:, 0, 0] > 0],
]


@pytest.mark.parametrize("f", WHOLE)
def test_the_same_values(f: Callable[..., Tensor]) -> None:
    found, left, out = rewritten(f, X, IDS)
    assert found == 1 and torch.equal(out, f(X, IDS))
    assert left.count(LOOKUP) <= 1


@pytest.mark.parametrize("f", OTHER[:-1])
def test_what_does_not_count_a_whole_dim_stays(f: Callable[..., Tensor]) -> None:
    found, left, out = rewritten(f, X, IDS)
    assert found == 0 and LOOKUP in left and torch.equal(out, f(X, IDS))


@pytest.mark.parametrize("seed", range(60))
def test_any_indices(seed: int) -> None:
    """Dims that are counted, looked up by others, or left alone, in any order and place."""
    draw = random.Random(seed)
    ndim = draw.randint(1, 4)
    shape = [draw.randint(1, 4) for _ in range(ndim)]
    x = torch.randn(shape)
    of_indices = draw.randint(1, 4)
    axes = list(range(of_indices))
    draw.shuffle(axes)
    wide = {p: draw.randint(1, 3) for p in range(of_indices)}
    indices: list[Any] = []
    for n in shape:
        kind = draw.choice(["whole", "other", "slice"])
        if kind == "whole" and axes:
            p = axes.pop()
            wide[p] = n
            view = [1] * of_indices
            view[p] = n
            indices.append(("whole", n, view))
        elif kind == "other":
            some = [p for p in range(of_indices) if draw.random() < 0.5]
            indices.append(("other", n, some))
        else:
            indices.append(("slice", n, []))
    counted = {p for kind, n, view in indices if kind == "whole" for p, m in enumerate(view) if m == n and m > 1}
    others = [
        torch.randint(0, n, [wide[p] if p in some and p not in counted else 1 for p in range(of_indices)])
        for kind, n, some in indices
        if kind == "other"
    ]

    def f(x: Tensor, *others: Tensor) -> Tensor:
        each = iter(others)
        at = {"whole": lambda n, v: torch.arange(n).view(v), "other": lambda n, v: next(each), "slice": lambda n, v: slice(None)}
        return x[tuple(at[kind](n, view) for kind, n, view in indices)] * 2

    found, _, out = rewritten(f, x, *others)
    assert torch.equal(out, f(x, *others))
    assert found == any(kind == "whole" and n > 1 for kind, n, _ in indices)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        seen = mask.bool()[torch.arange(len(mask))[:, None, None], torch.arange(mask.shape[1])[None, None, :]]
        return torch.where(seen.squeeze(1).unsqueeze(-1), self.lin(x), 0.0).square().mean()


def test_a_mask_of_the_batch_may_be_split() -> None:
    given = torch.randn(8, 6, 4), torch.ones(8, 6, dtype=torch.int64)
    call = Call.of(given, {})
    graph = describe(capture(Masked(), call, tuple((tuple(t.shape), t.dtype) for t in call.tensors)))
    assert not [op for op in graph.ops if op.target.startswith("aten.index")]
    batch = [op for op in graph.ops if op.out is not None and op.out.dtype == "bool" and op.out.shape[0] == 8]
    assert batch and all("!" not in str(lookup(op)) for op in batch)
