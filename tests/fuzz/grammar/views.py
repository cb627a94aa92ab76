"""Views and what moves data about: transposes, slices, expansions, windows, concatenation; memory formats."""

from __future__ import annotations

import math

from tests.fuzz.draw import Draw, Unable
from tests.fuzz.grammar import bound, production, templates
from tests.fuzz.program import Line

templates(
    "view",
    """
    {a}.transpose({d}, {e})
    {a}.mT
    {a}.transpose({d}, {e}).contiguous()
    {a}.swapaxes({d}, {e}) * 2
    {a}.movedim({d}, {e})
    {a}[:, 0]
    {a}[:, -1:]
    {a}[1:]
    {a}[..., ::2]
    {a}[:, 1:]
    {a}[0]
    {a}[..., 0]
    {a}[..., None]
    {a}[None]
    {a}[..., :-1]
    {a}.select({d}, -1)
    {a}.narrow({d}, 0, 2)
    {a}.narrow({d}, 1, 1)
    {a}.unsqueeze({d})
    {a}.flatten()
    {a}.flatten(0, 1)
    {a}.flatten(-2)
    {a}.reshape(-1)
    {a}.reshape({a}.shape[0], -1)
    {a}.view(-1, {a}.shape[-1])
    {a}.reshape(-1, 2)
    {a}.T
    {a}.repeat_interleave(2, {d})
    {a}.tile(2)
    {a}.unfold({d}, 2, 1)
    {a}.unfold({d}, 2, 2)
    {a}.unfold({d}, 3, 2)
    {a}.chunk(2, {d})[0]
    {a}.chunk(2, {d})[-1]
    {a}.split(2, {d})[0]
    {a}.tensor_split(2, {d})[1]
    {a}.unbind({d})[0]
    {a}.diagonal(0, {d}, {e})
    {a}.diagonal(1, {d}, {e})
    torch.diag_embed({a})
    torch.tril({a})
    torch.triu({a}, 1)
    torch.stack([{a}, {s}], {d})
    torch.cat([{a}, {s}], {d})
    torch.cat([{a}, {a}], {d})
    torch.cat([{a}.narrow({d}, 0, 1), {s}], {d})
    torch.stack([{a}, {a} * 2, {s}], 0).sum(0)
    torch.hstack([{a}, {s}])
    torch.vstack([{a}, {s}])
    torch.atleast_2d({a})
    {a}.squeeze()
    {a}.squeeze({d})
    {a}.view_as({s})
    {a}.clone()
    {a}.contiguous()
    {a}.alias() if hasattr({a}, "alias") else {a}
    {a}.expand(3, *{a}.shape)
    {a}.expand_as({s})
    {a}.rot90()
    {a}.fliplr()
    torch.broadcast_to({a}, (2, *{a}.shape))
    torch.block_diag({a}[0], {s}[0])
    {a}.detach()
    """,
    4.0,
    least=2,
)


@production("view", 2.0)
def _permute(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 2)
    order = list(range(len(d.shape(a))))
    d.rng.shuffle(order)
    return [bound(d, f"{a}.permute({d.dims(order)}){d.one_of(('', '', '.contiguous()', '.clone()'))}")]


def _factored(d: Draw, n: int) -> list[int]:
    """n as a product of a few sizes, ones among them now and then."""
    out = [1] if d.chance(0.1) else []
    for p in (2, 3, 2, 5, 7):
        while n % p == 0 and d.chance(0.6):
            out.append(p)
            n //= p
    if n > 1:
        out.append(n)
    if len(out) > 3:
        out = [math.prod(out[:-2]), *out[-2:]]
    return out or [1]


@production("view", 3.0)
def _reshape(d: Draw) -> list[Line]:
    """Dims are cut into factors, neighbours are joined: in any way, also across what was one dim."""
    a = d.float()
    shape = d.shape(a)
    if d.chance(0.3):
        new = _factored(d, math.prod(shape))
        d.rng.shuffle(new)
    else:
        flat = [f for n in shape for f in (_factored(d, n) if d.chance(0.6) else [n])]
        new = []
        for f in flat:
            if new and d.chance(0.35):
                new[-1] *= f
            else:
                new.append(f)
    how = d.one_of(("view", "reshape", "reshape"))
    if d.chance(0.2) and new:
        new[d.rng.randrange(len(new))] = -1
    return [bound(d, f"{a}.{how}({d.dims(new) or '()'})")]


@production("view", 1.0)
def _expand(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.numel() <= 512 and t.dim() <= 4)
    shape = [n if n != 1 else d.one_of((2, 4)) for n in d.shape(a)]
    lead = [d.one_of((2, 3))] if d.chance(0.6) else []
    if d.chance(0.3):
        return [bound(d, f"{a}.repeat({d.dims([d.one_of((1, 2)) for _ in shape] or [2])})")]
    return [bound(d, f"{a}.expand({d.dims([*lead, *shape]) or '()'})")]


@production("view", 1.5)
def _split(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 1 and max(t.shape) >= 4)
    shape = d.shape(a)
    dim = d.one_of([i for i, n in enumerate(shape) if n >= 4])
    n = shape[dim]
    how = d.rng.random()
    if how < 0.4 and n % 2 == 0:
        return [bound(d, f"{a}.chunk(2, {dim})", 2)]
    if how < 0.6:
        k = d.rng.randrange(1, n)
        return [bound(d, f"torch.split({a}, [{k}, {n - k}], dim={dim})", 2)]
    if how < 0.8:
        k = d.rng.randrange(1, n - 1)
        return [bound(d, f"{a}.narrow({dim}, {k}, {d.rng.randrange(1, n - k + 1)})")]
    step = d.one_of((2, 3))
    text = ", ".join([":"] * dim + [f"{d.rng.randrange(0, 2)}::{step}"])
    return [bound(d, f"{a}[{text}]")]


@production("view", 1.0)
def _rotate_half(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 1 and t.shape[-1] % 2 == 0)
    h = d.shape(a)[-1] // 2
    texts = (
        f"torch.cat([-{a}[..., {h}:], {a}[..., :{h}]], dim=-1)",
        f"torch.stack([-{a}[..., 1::2], {a}[..., ::2]], dim=-1).flatten(-2)",
        f"{a}.unflatten(-1, (2, {h})).transpose(-1, -2)",
    )
    return [bound(d, d.one_of(texts))]


@production("view", 0.6)
def _windows(d: Draw) -> list[Line]:
    """As in Swin: an image in windows, maybe shifted."""
    a = d.float(lambda t: t.dim() == 4 and t.shape[1] % 2 == 0 and t.shape[2] % 2 == 0)
    b, h, w, c = d.shape(a)
    v = d.fresh()
    shift = d.one_of(("", "torch.roll({a}, (-1, -1), (1, 2))"))
    x = shift.format(a=a) or a
    return [Line(f"{v} = {x}.view({b}, {h // 2}, 2, {w // 2}, 2, {c}).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, {c})", (v,))]


@production("view", 0.4)
def _strided(d: Draw) -> list[Line]:
    if "strided" not in d.features:
        raise Unable
    a = d.float(lambda t: t.dim() == 2 and t.is_contiguous())
    n, m = d.shape(a)
    return [bound(d, f"{a}.as_strided(({n}, {m - 1}), ({m}, 1), 1)")]


@production("formats", 2.0)
def _format(d: Draw) -> list[Line]:
    if "formats" not in d.features:
        raise Unable
    a = d.float(lambda t: t.dim() == 4)
    texts = (
        "{a}.contiguous(memory_format=torch.channels_last)",
        "{a}.to(memory_format=torch.channels_last) * 2",
        "{a}.clone(memory_format=torch.contiguous_format)",
        "torch.empty_like({a}, memory_format=torch.channels_last).copy_({a})",
    )
    return [bound(d, d.one_of(texts).format(a=a))]


@production("formats", 0.7)
def _format_input(d: Draw) -> list[Line]:
    if "formats" not in d.features:
        raise Unable
    c = d.one_of((2, 4))
    x = d.input(f"randn({d.seed()}, {d.batch}, {c}, 4, 4, dtype=D).to(memory_format=torch.channels_last)", d.chance(0.3))
    return [bound(d, f"{x} * {d.constant()}")]


@production("formats", 0.5)
def _format_module(d: Draw) -> list[Line]:
    if "formats" not in d.features:
        raise Unable
    a = d.float(lambda t: t.dim() == 4 and min(t.shape[2:]) >= 2)
    m = d.submodule(f"nn.Conv2d({d.shape(a)[1]}, 4, 2).to(memory_format=torch.channels_last)")
    return [bound(d, f"{m}({a})")]
