"""Products, attention, memory-bound ops and the optimizer, as one process of all runs them.

Products are timed in the three orientations of a linear layer: forward x w^T, backward g w and g^T x. Operands rotate and
results stay for a while, so that a call does not find memory in cache only because the last one used it. Memory-bound work is timed for a typical op or two of every kind that prices know.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from autopar.cost.compute import ATTENTION_BACKWARD
from autopar.cost.model import ADAMW_BYTES
from autopar.hardware.calibrate.timing import Clock, Sample
from autopar.kernels import attention  # noqa: F401  (registers the ops)

aten = torch.ops.aten
PRODUCTS = (  # m, k, n of the forward product
    (16, 64, 64), (64, 64, 64), (64, 256, 256), (256, 256, 256), (32, 1024, 1024), (256, 512, 512), (512, 512, 512), (256, 512, 2048),
    (512, 2048, 512), (1024, 1024, 1024), (512, 512, 8192),
)  # fmt: skip
GPU_PRODUCTS = tuple((s * m, s * k, s * n) for s, (m, k, n) in itertools.product((1, 8), PRODUCTS))
ATTENTIONS = ((2, 4, 64, 32), (8, 8, 128, 32), (4, 8, 256, 64), (2, 8, 512, 64), (1, 8, 1024, 64))  # batch, heads, tokens, width of a head
ELEMENTS = tuple(1 << i for i in (8, 12, 15, 17, 19, 21, 23, 24))
DTYPES = (torch.float32, torch.bfloat16)
ROTATED_BYTES, SETS = 1 << 26, 4
KEPT_BYTES, KEPT = 1 << 28, 8


def samples(clock: Clock, seconds: float, on_progress: Callable[[str], None], dtypes: tuple[torch.dtype, ...] = DTYPES) -> Iterator[Sample]:
    """seconds: for all of it. Sizes rise; when a part's time is over its larger ones are left out."""
    parts: list[tuple[str, Callable[[], Iterator[Sample]]]] = [
        ("memory-bound operators", lambda: memory_bound(clock)),
        ("optimizer", lambda: optimizer(clock)),
    ]
    for dtype in dtypes:
        parts.append((f"products, {_name(dtype)}", functools.partial(products, clock, dtype)))
        parts.append((f"attention, {_name(dtype)}", functools.partial(attentions, clock, dtype)))
    end = time.monotonic() + seconds
    for i, (name, part) in enumerate(parts):
        on_progress(name)
        now = time.monotonic()
        clock.until = now + max(0.0, end - now) / (len(parts) - i)
        yield from part()


def products(clock: Clock, dtype: torch.dtype) -> Iterator[Sample]:
    for m, k, n in PRODUCTS if clock.device.type == "cpu" else GPU_PRODUCTS:
        nbytes = dtype.itemsize * (m * k + k * n + m * n)
        for rows, inner, columns, orientation in ((m, k, n, "nt"), (m, n, k, "nn"), (n, m, k, "tn")):
            a, b = _shaped(rows, inner, orientation[0] == "t"), _shaped(inner, columns, orientation[1] == "t")
            call = _rotating(lambda x, y: aten.mm.default(x, y), functools.partial(_made, (a, b), clock, dtype), nbytes)
            yield from (Sample("matmul", 2.0 * m * k * n, s, _name(dtype), nbytes) for s in clock.windows(call))
        if clock.late():
            return


def attentions(clock: Clock, dtype: torch.dtype) -> Iterator[Sample]:
    forward, backward = torch.ops.autopar.attention_v2.default, torch.ops.autopar.attention_backward_v3.default
    for (b, h, s, e), causal in itertools.product(ATTENTIONS, (False, True)):
        # Heads lie beside each other, as projections leave them.
        q, k, v, g = (torch.randn(b, s, h, e, device=clock.device).to(dtype).transpose(1, 2) for _ in range(4))
        nbytes = 4 * q.nbytes
        scale = 1 / math.sqrt(e)
        flops = 4.0 * b * h * s * s * e * (0.5 if causal else 1)
        kind = "causal_attention" if causal else "attention"
        run = _keeping(functools.partial(forward, q, k, v, None, causal, scale, None), nbytes)
        yield from (Sample(kind, flops, t, _name(dtype)) for t in clock.windows(run))
        out, lse = run()
        run = _keeping(functools.partial(backward, g, q, k, v, out, lse, None, causal, scale, None, False), nbytes)
        yield from (Sample(f"{kind}_backward", ATTENTION_BACKWARD * flops, t, _name(dtype)) for t in clock.windows(run))
        if causal and clock.late():  # both kinds of a size, or neither
            return


def memory_bound(clock: Clock) -> Iterator[Sample]:
    """In float32. amounts: what `autopar.cost.memory` counts of them."""
    for n in ELEMENTS:
        width = min(512, n)
        rows, classes = n // width, min(4096, n)
        new = _filled(clock, n)

        def norm(x: torch.Tensor, width: int = width) -> Any:
            return aten.native_layer_norm.default(x.view(-1, width), [width], None, None, 1e-5)

        mean, rstd = torch.zeros(rows, 1, device=clock.device), torch.ones(rows, 1, device=clock.device)

        def norm_backward(g: torch.Tensor, x: torch.Tensor, width: int = width, mean: Any = mean, rstd: Any = rstd) -> Any:
            args = g.view(-1, width), x.view(-1, width), [width], mean, rstd, None, None, [True, False, False]
            return aten.native_layer_norm_backward.default(*args)

        def loss(x: torch.Tensor, classes: int = classes) -> Any:
            return aten._log_softmax.default(x.view(-1, classes), 1, False)

        def loss_backward(g: torch.Tensor, x: torch.Tensor, classes: int = classes) -> Any:
            return aten._log_softmax_backward_data.default(g.view(-1, classes), x.view(-1, classes), 1, torch.float32)

        cases: tuple[tuple[str, Callable[..., Any], int], ...] = (
            ("cheap", aten.add.Tensor, 2), ("cheap", lambda x: aten.mul.Tensor(x, 2.0), 1), ("cheap", aten.gelu.default, 1),
            ("norm", norm, 1), ("norm", norm_backward, 2), ("loss", loss, 1), ("loss", loss_backward, 2),
        )  # fmt: skip
        for kind, call, reads in cases:
            moved = 4.0 * n * (reads + 1)
            run = _rotating(call, functools.partial(_times, new, reads), int(moved))
            yield from (Sample(kind, moved, s) for s in clock.windows(run))
        if clock.late():
            return


def optimizer(clock: Clock) -> Iterator[Sample]:
    """Fused AdamW on one parameter. amounts: the bytes that prices count for it."""
    for n in ELEMENTS[:-1]:
        p = torch.nn.Parameter(torch.zeros(n, device=clock.device))
        p.grad = torch.zeros_like(p)
        step = torch.optim.AdamW([p], fused=True).step
        yield from (Sample("optimizer", ADAMW_BYTES * n, s) for s in clock.windows(step))
        if clock.late():
            return


# ---- operands ------------------------------------------------------------------------------------------------------


def _shaped(rows: int, columns: int, transposed: bool) -> Callable[[Clock, torch.dtype], torch.Tensor]:
    def make(clock: Clock, dtype: torch.dtype) -> torch.Tensor:
        size = (columns, rows) if transposed else (rows, columns)
        x = torch.randn(size, device=clock.device).to(dtype)
        return x.t() if transposed else x

    return make


def _filled(clock: Clock, n: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.ones(n, device=clock.device)


def _keeping(call: Callable[[], Any], nbytes: int) -> Callable[[], Any]:
    """`call`, whose last results stay, as a step's do: memory that was just freed is in cache and needs no new pages, which a step seldom has."""
    kept: collections.deque[Any] = collections.deque(maxlen=max(1, min(KEPT, KEPT_BYTES // max(nbytes, 1))))

    def run() -> Any:
        kept.append(call())
        return kept[-1]

    return run


def _made(make: Sequence[Callable[[Clock, torch.dtype], torch.Tensor]], clock: Clock, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(f(clock, dtype) for f in make)


def _times(new: Callable[[], torch.Tensor], n: int) -> tuple[torch.Tensor, ...]:
    return tuple(new() for _ in range(n))


def _rotating(call: Callable[..., Any], new: Callable[[], tuple[torch.Tensor, ...]], nbytes: int) -> Callable[[], Any]:
    sets = itertools.cycle([new() for _ in range(max(1, min(SETS, ROTATED_BYTES // max(nbytes, 1))))])
    return _keeping(lambda: call(*next(sets)), nbytes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
