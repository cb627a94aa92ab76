"""Pointwise ops: those of the rules' table that torch has by name, and the ways people write them."""

from __future__ import annotations

import torch

from autopar.rules import pointwise
from tests.fuzz.draw import Draw
from tests.fuzz.grammar import bound, production, templates
from tests.fuzz.program import Line

_STEPS = {
    "ceil",
    "floor",
    "round",
    "trunc",
    "frac",
    "sign",
    "sgn",
    "signbit",
    "isfinite",
    "isinf",
    "isnan",
    "isneginf",
    "isposinf",
    "logical_not",
}
_SKIPPED = {"bitwise_not", "fill", "frexp", "polygamma", "log_sigmoid_forward", "positive", "digamma", "nan_to_num"}


def _names(table: str) -> list[str]:
    names = dict.fromkeys(n.split(".")[0] for n in table.split())
    return [n for n in names if n not in _SKIPPED and callable(getattr(torch, n, None))]


_UNARY = [n for n in _names(pointwise._UNARY) if n not in _STEPS]
_BINARY = ["atan2", "maximum", "minimum", "fmax", "fmin", "hypot", "logaddexp", "logaddexp2", "copysign", "xlogy"]
_COMPARED = ["eq", "ge", "gt", "le", "lt", "ne"]

templates("pointwise", [f"torch.{n}({{a}})" for n in _UNARY], 2.0)
templates("pointwise", [f"torch.{n}({{a}}.detach())" for n in _STEPS], 0.3)
templates("pointwise", [f"torch.{n}({{a}}, {{b}})" for n in _BINARY], 0.8)
templates("pointwise", [f"torch.{n}({{a}}, {{b}})" for n in _COMPARED], 0.4)
templates(
    "pointwise",
    """
    {a} + {b}
    {a} - {b}
    {a} * {b}
    {a} * {w}
    {a} + {w}
    {b} - {a}
    {a} / (2.0 + {b}.square())
    {a} / 3
    1 - {a}
    {a} * {c}
    {a} + {c}
    -{a}
    {a} ** 2
    {a}.abs().clamp(min=0.05) ** {c}
    {a}.clamp(-0.8, 0.9)
    {a}.clamp(min=0.2)
    {a}.clamp(max={b})
    torch.where({m}, {a}, {b})
    torch.where({m}, {a}, 0.0)
    torch.where({a} > 0.1, {a}, {b})
    {a}.masked_fill({m}, 0.0)
    {a}.masked_fill({m}, {c})
    torch.lerp({a}, {s}, 0.3)
    torch.lerp({a}, {s}, {s})
    torch.addcmul({a}, {b}, {b}, value=0.5)
    torch.addcdiv({a}, {s}, 2.0 + {s}.square())
    torch.add({a}, {b}, alpha=0.4)
    torch.sub({a}, {b}, alpha=0.4)
    torch.rsub({a}, {c})
    torch.sqrt({a}.square() + 0.1)
    torch.rsqrt({a}.square() + 0.3)
    torch.log({a}.square() + 0.2)
    torch.log1p({a}.abs())
    torch.exp(-{a}.square())
    torch.pow(1.5, {a})
    torch.remainder({a}, 0.7)
    torch.fmod({a}, 0.9)
    torch.heaviside({a}.detach(), {b}.detach())
    torch.floor_divide({a}.detach(), 0.37)
    torch.div({a}.detach(), 0.37, rounding_mode="floor")
    torch.nan_to_num({a})
    torch.polygamma(1, {a}.abs() + 1.0)
    {a}.float().double().to({a}.dtype)
    {a} * (3 if self.training else 2)
    {a}.new_tensor([0.5, 1.5]).sum() * {a}
    {a} * {a}.shape[0]
    {a} * {m}
    {a} + {m}.to({a}.dtype)
    """,
    4.0,
)
templates(
    "pointwise",
    """
    F.relu({a})
    F.gelu({a})
    F.gelu({a}, approximate="tanh")
    F.silu({a})
    F.elu({a})
    F.celu({a}, 0.7)
    F.selu({a})
    F.mish({a})
    F.softplus({a})
    F.softplus({a}, 2.0)
    F.hardtanh({a}, -0.6, 0.6)
    F.relu6({a})
    F.leaky_relu({a}, 0.1)
    F.logsigmoid({a})
    F.hardsigmoid({a})
    F.hardswish({a})
    F.tanhshrink({a})
    F.softsign({a})
    F.threshold({a}, 0.1, 0.5)
    F.hardshrink({a}, 0.3)
    F.softshrink({a}, 0.3)
    """,
    1.5,
)


@production("pointwise", 0.5)
def _glu(d: Draw) -> list[Line]:
    a = d.float(lambda t: any(n % 2 == 0 for n in t.shape))
    dim = d.one_of([i for i, n in enumerate(d.shape(a)) if n % 2 == 0])
    return [bound(d, f"F.glu({a}, {dim})")]


@production("pointwise", 0.4)
def _prelu(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 2)
    return [bound(d, f"F.prelu({a}, {d.parameter([d.one_of((1, d.shape(a)[1]))])})")]


@production("pointwise", 0.3)
def _integers(d: Draw) -> list[Line]:
    i = d.indices(5, *d.shape(d.float()))
    text = d.one_of(
        ("{i} + 1", "{i} * 2 % 3", "{i} // 2", "({i} > 1)", "{i} & 1", "{i}.clamp(max=2)", "{i} ^ 3", "-{i}", "{i}.bool()", "{i} << 1")
    )
    return [bound(d, text.format(i=i))]


@production("pointwise", 0.5)
def _logic(d: Draw) -> list[Line]:
    m = d.some(lambda t: t.dtype == torch.bool)
    return [
        bound(
            d, d.one_of(("~{m}", "{m} & {m}", "{m}.logical_not()", "{m}.long()", "{m} | ~{m}", "{m}.to(D)", "{m}.cumsum(-1)")).format(m=m)
        )
    ]


@production("factory")
def _new(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 1)
    n = d.shape(a)[-1]
    texts = (
        f"torch.zeros_like({a})", f"torch.ones_like({a}) * {a}", f"torch.full_like({a}, 0.3)", f"{a}.new_zeros(2, {n})", f"{a}.new_ones({n}) * {a}",
        f"torch.arange({n}, dtype=D) * {a}", f"torch.linspace(0, 1, {n}, dtype=D) + {a}", f"torch.eye({n}, dtype=D)", f"torch.full(({n},), 2.0, dtype=D) * {a}",
        f"torch.ones({n}, {n}, dtype=torch.bool).tril()", f"torch.tensor(0.5, dtype=D) * {a}", "torch.tensor([0.5, 1.0], dtype=D)", f"{a}.new_full({a}.shape, 0.2)",
        f"torch.zeros({a}.shape[0], dtype=D)", f"torch.arange({a}.shape[-1])", f"torch.empty_like({a}).fill_(0.5)", f"torch.ones({n}, dtype=D).cumsum(0)",
    )  # fmt: skip
    return [bound(d, d.one_of(texts))]
