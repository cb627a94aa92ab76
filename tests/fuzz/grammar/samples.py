"""Calls as torch's own tests make them: an operator of op_db with one of its samples, on values of the program where their shapes fit."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.fuzz.draw import Draw, Unable
from tests.fuzz.grammar import bound, production
from tests.fuzz.program import Line

FEW = 24  # samples that are looked at, of one operator
# Random numbers that no counter gives, memory that nobody wrote, sizes that depend on data (refused: see docs/guide.md).
_OTHERS = (
    "bernoulli", "multinomial", "normal", "rand", "dropout", "rrelu", "gumbel", "fractional", "empty", "lowrank", "uniform", "nonzero", "unique", "masked_select",
    "argwhere", "item", "bincount", "histc", "histogram", "sparse", "stft", "to_", "equal", "allclose", "resize", "is_", "jiterator", "__", "polygamma", "view_as_complex",
    "complex", "fft", "combinations", "cartesian_prod", "nanquantile", "quantile", "svd", "eig", "ldl", "lu", "geqrf", "ormqr", "householder", "matrix_rank", "pinv",
    "linear_cross_entropy", "torch_ops", "ops.aten", "special.zeta", "roll_", "ctc",
)  # fmt: skip


@functools.cache
def operators() -> dict[str, tuple[str, Any]]:
    """OpInfo's name -> how a program says it, OpInfo."""
    from torch.testing._internal.common_methods_invocations import op_db

    out: dict[str, tuple[str, Any]] = {}
    for op in op_db:
        said = _path(op.name)
        if said and torch.float64 in op.dtypes and not any(x in op.name for x in _OTHERS):
            out.setdefault(op.name, (said, op))
    return out


def _path(name: str) -> str:
    for root, said, path in (
        (torch.nn.functional, "F", name.removeprefix("nn.functional.")),
        (torch, "torch", name),
        (torch.Tensor, "torch.Tensor", name),
    ):
        try:
            found: Any = functools.reduce(getattr, path.split("."), root)
        except AttributeError:
            continue
        if callable(found):
            return f"{said}.{path}"
    return ""


@functools.cache
def samples(name: str) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        found = operators()[name][1].sample_inputs("cpu", torch.float64, requires_grad=False)
        return [s for s, _ in zip(found, range(FEW), strict=False)]


def _said(d: Draw, x: Any) -> str:
    """An argument as text."""
    if isinstance(x, torch.Tensor):
        return _tensor(d, x)
    if isinstance(x, (bool, int, float, str, type(None), torch.dtype, slice)):
        return repr(x)
    if isinstance(x, (list, tuple)):
        inside = "".join(_said(d, y) + ", " for y in x)
        return f"[{inside}]" if isinstance(x, list) else f"({inside})"
    raise Unable


def _tensor(d: Draw, t: torch.Tensor) -> str:
    """A value like `t`: of the program's, or a new one. Integers are those of the sample, since they mostly point somewhere."""
    if t.layout != torch.strided or t.is_complex():
        raise Unable
    shape = tuple(t.shape)
    if t.dtype == torch.float64:
        try:
            if d.chance(0.3):
                raise Unable
            return d.float(lambda v: tuple(v.shape) == shape)
        except Unable:
            return d.parameter(shape) if d.chance(0.3) and len(shape) else d.input(_random(d, shape), d.chance(0.4))
    if t.dtype == torch.bool:
        return d.input(f"bools({d.seed()}, {d.dims(shape)})")
    if t.dtype == torch.int64 and t.numel() <= 64:
        text = f"torch.tensor({t.tolist()}).reshape({shape})"
        return d.input(text) if d.chance(0.5) else d.buffer(text)
    raise Unable


def _random(d: Draw, shape: Sequence[int]) -> str:
    return f"randn({d.seed()}, {d.dims(shape)}{', ' if shape else ''}dtype=D)"


@production("samples")
def _sample(d: Draw) -> Sequence[Line]:
    name = d.one_of(list(operators()))
    s = d.one_of(samples(name))
    said, _ = operators()[name]
    arguments = [_said(d, s.input), *(_said(d, a) for a in s.args), *(f"{k}={_said(d, v)}" for k, v in s.kwargs.items())]
    text = f"{said}({', '.join(arguments)})"
    function: Callable[[], Any] = eval(f"lambda: {text}", d.space)
    result = function()
    if isinstance(result, torch.Tensor):
        return [bound(d, text)]
    if isinstance(result, (tuple, list)) and 0 < len(result) <= 8 and all(isinstance(t, torch.Tensor) for t in result):
        return [bound(d, f"{text}{'[0]' if len(result) == 1 else ''}", len(result))]
    raise Unable
