"""In-place ops, out=, aliases that are written through, casts."""

from __future__ import annotations

import torch

from tests.fuzz.draw import Draw
from tests.fuzz.grammar import bound, production
from tests.fuzz.program import Line

_CHANGES = """
    {a}.mul_({b})
    {a}.add_({b})
    {a}.add_({b}, alpha=0.5)
    {a}.sub_(0.3)
    {a}.div_(2)
    {a}.tanh_()
    {a}.sigmoid_()
    {a}.relu_()
    {a}.clamp_(-0.7, 0.7)
    {a}.neg_()
    {a}.zero_()
    {a}.fill_(0.5)
    {a}.copy_({b})
    {a}.masked_fill_({m}, 0.1)
    {a}[0] = 0.5
    {a}[:, 1:] = 0.25
    {a}[..., 0] += 1
    {a}[..., 0].mul_(0.5)
    {a}[..., :2] *= 2
    {a}[0] = {a}[1]
    {a}.t().mul_(0.5)
    {a}.view(-1)[1:].add_(0.3)
    {a}.flatten()[0] = 0.2
    {a}.transpose(0, 1)[1].zero_()
    {a} += {b}
    {a} *= 0.5
    {a} -= {b}
    F.relu({a}, inplace=True)
    {a}.lerp_({s}, 0.3)
    {a}.addcmul_({b}, {b})
    {a}.exp_().mul_(0.1)
    {a}.cumsum_(0)
    {a}.squeeze_()
    {a}.unsqueeze_(0)
    {a}.transpose_(0, 1)
    {a}.diagonal().add_(1)
    {a}[{m}] = 0.4
"""
_TEXTS = [t.strip() for t in _CHANGES.strip().splitlines()]


def _change(d: Draw, a: str) -> str:
    text = d.one_of(_TEXTS)
    found = {
        "a": a,
        "b": d.beside(a) if "{b}" in text else "",
        "s": d.alike(a) if "{s}" in text else "",
        "m": d.mask(a) if "{m}" in text else "",
    }
    return text.format(**found)


@production("inplace", 3.0)
def _on_value(d: Draw) -> list[Line]:
    """A value changed in place; the names it had keep what they see."""
    a = d.float(lambda t: not t.is_leaf)
    return [Line(_change(d, a), (), True)]


@production("inplace", 3.0)
def _on_copy(d: Draw) -> list[Line]:
    a = d.float()
    v = d.fresh()
    d.values[v] = d.space[v] = d.values[a] * 1.0
    first = Line(f"{v} = {a}{d.one_of(('.clone()', ' * 1.0', '.contiguous().clone()', ' + 0.1'))}", (v,))
    return [first, Line(_change(d, v), (), True)]


@production("inplace", 1.0)
def _through_view(d: Draw) -> list[Line]:
    """A view written through; the base is read after."""
    a = d.float(lambda t: t.dim() >= 2)
    v, w, r = d.fresh(), d.fresh(), d.fresh()
    view = d.one_of(
        (
            f"{v}[0]",
            f"{v}[:, 0]",
            f"{v}.transpose(0, 1)",
            f"{v}.view(-1)",
            f"{v}[1:]",
            f"{v}.unbind(0)[0]",
            f"{v}.chunk(2, -1)[0]",
            f"{v}.narrow(0, 0, 1)",
        )
    )
    change = d.one_of((f"{w}.mul_(0.5)", f"{w}.add_(1)", f"{w}.zero_()", f"{w} *= {w}.detach()", f"{w}.copy_({w} * 2)", f"{w}.tanh_()"))
    return [Line(f"{v} = {a} * 1.0", (v,)), Line(f"{w} = {view}", (w,)), Line(change, (), True), Line(f"{r} = {v} * 2", (r,))]


@production("inplace", 0.6)
def _on_input(d: Draw) -> list[Line]:
    """The caller sees it."""
    if "mutated_inputs" not in d.features:
        return []
    x = d.one_of([n for n, _ in d.inputs if n not in d.grads and d.values[n].is_floating_point()])
    return [Line(_change(d, x), (), True)]


@production("inplace", 0.8)
def _out(d: Draw) -> list[Line]:
    a, v = d.float(), d.fresh()
    op = d.one_of(
        ("torch.mul({a}, 2, out={v})", "torch.add({a}, {a}, out={v})", "torch.sin({a}, out={v})", "torch.cumsum({a}, 0, out={v})")
    )
    inside = [f"{v} = torch.empty_like({a})", op.format(a=a, v=v)]
    return [Line("with torch.no_grad():\n" + "\n".join("    " + t for t in inside), (v,))]


@production("inplace", 0.6)
def _fill_slices(d: Draw) -> list[Line]:
    """A result that is put together piece by piece."""
    a = d.float(lambda t: t.dim() >= 2 and t.shape[0] >= 2)
    v = d.fresh()
    n = d.shape(a)[0]
    texts = (
        f"{v} = torch.zeros_like({a})\nfor i in range({n}):\n    {v}[i] = {a}[{n - 1} - i] * (i + 1) * 0.2",
        f"{v} = {a}.new_zeros({a}.shape)\n{v}[:1] = {a}[1:2]\n{v}[1:] += {a}[1:]",
        f"{v} = []\nfor i in range({n}):\n    {v}.append({a}[i] * {d.constant()})\n{v} = torch.stack({v})",
        f"{v} = torch.zeros_like({a})\n{v}[..., 1:] = {a}[..., :-1]",
    )
    return [Line(d.one_of(texts), (v,))]


@production("dtypes", 1.0)
def _cast(d: Draw) -> list[Line]:
    a = d.float()
    d.rough = d.rough or "rough" in d.features
    if "rough" in d.features:
        return [bound(d, d.one_of(("{a}.to(torch.bfloat16).to(D)", "{a}.bfloat16()", "({a}.bfloat16() * 2).to(D)")).format(a=a))]
    return [
        bound(
            d,
            d.one_of(
                (
                    "{a}.to(D)",
                    "{a}.to({a})",
                    "{a}.type_as({a})",
                    "({a} > 0.2).to(D)",
                    "{a}.detach().mul(3).long()",
                    "{a}.detach().mul(3).int().to(D)",
                    "({a} > 0).int()",
                    "{a}.double()",
                )
            ).format(a=a),
        )
    ]


@production("dtypes", 1.0)
def _promote(d: Draw) -> list[Line]:
    a = d.float()
    other = d.some(lambda t: t.dtype in (torch.int64, torch.bool, torch.int32) and t.numel() < 3000)
    return [bound(d, f"{a} {d.one_of(('*', '+', '-'))} {other}")]


@production("dtypes", 0.5)
def _mixed(d: Draw) -> list[Line]:
    if "rough" not in d.features:
        return []
    a = d.float(lambda t: t.dim() >= 2)
    k = d.shape(a)[-1]
    d.rough = True
    w = d.parameter([k, 4])
    return [bound(d, f"({a}.bfloat16() @ {w}.bfloat16()){d.one_of(('', '.to(D)', '.float()'))}")]
