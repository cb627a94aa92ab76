"""Gates of experts in every form: in float64, forward and backward, as traced from models' Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.kernels import gates
from autopar.kernels.triton import gate as kernel
from tests.kernels.where import DTYPES, close, random

Gate = Callable[[Tensor], Tensor]


def gpt_oss(h: Tensor) -> Tensor:
    g, u = h[..., ::2].clamp(max=0.7), h[..., 1::2].clamp(-0.7, 0.7)
    return (u + 1) * g * torch.sigmoid(g * 1.702)


def minimax(h: Tensor) -> Tensor:
    g, u = h.chunk(2, -1)
    g, u = g.clamp(max=0.7), u.clamp(-0.7, 0.7)
    return (u + 1) * (g * torch.sigmoid(g * 1.702))


GATES: dict[str, Gate] = {
    "silu": lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
    "gelu": lambda h: F.gelu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
    "gelu of tanh": lambda h: F.gelu(h.chunk(2, -1)[0], approximate="tanh") * h.chunk(2, -1)[1],
    "relu, gate behind": lambda h: h.chunk(2, -1)[0] * F.relu(h.chunk(2, -1)[1]),
    "minimax": minimax,
}


def form(fn: Gate) -> gates.GateForm | None:
    name = gates.named(fn, torch.float32)
    assert name is not None
    return gates.gate(name).form


def check(fn: Gate, rows: int, features: int, dtype: torch.dtype) -> None:
    found = form(fn)
    assert found is not None
    h = (2 * random(rows, 2 * features + 3, seed=0, dtype=dtype))[:, 2 : 2 + 2 * features]
    r, s = random(rows, features, seed=1, dtype=dtype), random(rows, 1, seed=2, dtype=dtype)
    exact = h.double().requires_grad_()
    a = fn(exact)
    close(kernel.forward(found, h), a.detach())
    (dh,) = torch.autograd.grad(a, exact, r.double() * s.double())
    ds = (r.double() * a.detach()).sum(1, keepdim=True)
    got_h, got_a, got_s = kernel.backward(found, h, r, s)
    assert got_h.data_ptr() == h.data_ptr() and got_a.data_ptr() == r.data_ptr(), "in place"
    close(got_a, a.detach())
    close(got_h, dh)
    if rows:
        assert float((got_s.double() - ds).norm() / ds.norm()) <= {"torch.float32": 1e-5}.get(str(dtype), 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GATES)
def test_gate(name: str, dtype: str) -> None:
    check(GATES[name], 4, 37, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_side_by_side(dtype: str) -> None:
    check(gpt_oss, 4, 37, DTYPES[dtype])


@pytest.mark.parametrize(("rows", "features"), [(2, 1030), (0, 8), (3, 1)])
def test_sizes(rows: int, features: int) -> None:
    check(GATES["silu"], rows, features, torch.bfloat16)


@pytest.mark.parametrize(
    "fn",
    [lambda h: F.silu(h), lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[0], lambda h: F.silu(h.chunk(2, -1)[0]).clamp(max=7.0) * h.chunk(2, -1)[1]],
    ids=["no gate", "one half", "clamped behind"],
)  # fmt: skip
def test_what_is_no_form(fn: Gate) -> None:
    """Those run as they were traced."""
    assert form(fn) is None
