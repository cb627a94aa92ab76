"""Products: linear layers, matrices, einsum, attention; convolutions, pools, resampling."""

from __future__ import annotations

from torch import nn

from tests.fuzz.draw import Draw, Unable
from tests.fuzz.grammar import bound, production, templates
from tests.fuzz.program import Line


@production("matmul", 4.0)
def _linear(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 1)
    k, n = d.shape(a)[-1], d.size()
    how = d.rng.random()
    if how < 0.5:
        bias = "" if d.chance(0.7) else ", bias=False"
        m = d.submodule(f"nn.Linear({k}, {n}{bias})", lambda m: isinstance(m, nn.Linear) and m.in_features == k)
        return [bound(d, f"{m}({a})")]
    if how < 0.7:
        return [bound(d, f"{a} @ {d.parameter([k, n])}")]
    if how < 0.85:
        return [bound(d, f"F.linear({a}, {d.parameter([n, k])}, {d.parameter([n])})")]
    return [bound(d, f"{a} @ {d.parameter([n, k])}.t() + {d.parameter([n])}")]


@production("matmul", 0.6)
def _tied(d: Draw) -> list[Line]:
    """Two modules with one weight."""
    a = d.float(lambda t: t.dim() >= 1)
    k = d.shape(a)[-1]
    first = d.submodule(f"nn.Linear({k}, {k})").removeprefix("self.")
    second = d.fresh("m")
    d.member(second, f"self.{second} = nn.Linear({k}, {k})\nself.{second}.weight = self.{first}.weight")
    v = d.fresh()
    return [Line(f"{v} = self.{second}(torch.tanh(self.{first}({a})))", (v,))]


@production("matmul", 0.6)
def _frozen(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 1)
    m = d.fresh("m")
    which = d.one_of(("weight", "bias", None))
    freeze = f"self.{m}.{which}.requires_grad_(False)" if which else f"self.{m}.requires_grad_(False)"
    d.member(m, f"self.{m} = nn.Linear({d.shape(a)[-1]}, {d.size()})\n{freeze}")
    return [bound(d, f"self.{m}({a})")]


@production("matmul", 2.0)
def _products(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 2)
    if d.chance(0.5):
        b = d.alike(a)
        text = d.one_of(
            ("{a} @ {b}.transpose(-1, -2)", "{a}.transpose(-2, -1) @ {b}", "torch.matmul({b}, {a}.mT)", "torch.matmul({a}, {b}.mT) * 0.2")
        )
        return [bound(d, text.format(a=a, b=b))]
    k = d.shape(a)[-1]
    b = d.float(lambda t: t.dim() >= 1 and (t.shape[-2] if t.dim() > 1 else t.shape[0]) == k)
    return [bound(d, f"torch.matmul({a}, {b})")]


@production("matmul", 1.5)
def _einsum(d: Draw) -> list[Line]:
    a = d.float(lambda t: 2 <= t.dim() <= 4)
    shape = d.shape(a)
    left = "abcd"[: len(shape)]
    sizes = dict(zip(left, shape, strict=True)) | {"x": d.size(), "y": 2}
    shared = d.rng.sample(left, d.rng.randrange(1, len(left) + 1))
    right = [*shared, *d.rng.sample("xy", d.rng.randrange(0, 2 if len(shared) > 2 else 3))]
    d.rng.shuffle(right)
    keep = [c for c in dict.fromkeys([*left, *right]) if d.chance(0.6)]
    d.rng.shuffle(keep)
    b = d.parameter([sizes[c] for c in right])
    return [bound(d, f'torch.einsum("{left},{"".join(right)}->{"".join(keep)}", {a}, {b})')]


@production("matmul", 1.0)
def _by_rank(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() in (2, 3))
    s = d.shape(a)
    n = d.size()
    texts: tuple[str, ...]
    if len(s) == 2:
        texts = (
            f"torch.mm({a}, {d.parameter([s[1], n])})", f"torch.addmm({d.parameter([n])}, {a}, {d.parameter([s[1], n])})",
            f"torch.addmm({d.parameter([s[0], n])}, {a}, {d.parameter([s[1], n])}, beta=0.5, alpha=2.0)", f"torch.mv({a}, {d.parameter([s[1]])})",
            f"torch.addmv({d.parameter([s[0]])}, {a}, {d.parameter([s[1]])})", f"torch.outer({a}[0], {a}[:, 0])", f"torch.linalg.multi_dot([{a}, {d.parameter([s[1], n])}, {d.parameter([n, 3])}])",
            f"torch.cdist({a}, {d.parameter([n, s[1]])})", f"F.bilinear({a}, {a}, {d.parameter([n, s[1], s[1]])})", f"torch.tensordot({a}, {d.parameter([s[1], n])}, 1)",
            f"torch.dot({a}[0], {a}[-1])", f"torch.inner({a}, {d.parameter([n, s[1]])})", f"torch.kron({a}[:2], {d.parameter([2, 2])})", f"torch.vdot({a}[:, 0], {a}[:, 1])",
        )  # fmt: skip
    else:
        texts = (
            f"torch.bmm({a}, {d.parameter([s[0], s[2], n])})", f"torch.baddbmm({d.parameter([s[1], n])}, {a}, {d.parameter([s[0], s[2], n])}, alpha=0.5)",
            f"torch.addbmm({d.parameter([s[1], n])}, {a}, {d.parameter([s[0], s[2], n])})", f"torch.bmm({a}, {a}.transpose(1, 2))", f"torch.tensordot({a}, {d.parameter([s[1], s[2], n])}, 2)",
            f"torch.bmm({a}, {d.parameter([1, s[2], n])}.expand({s[0]}, -1, -1))",
        )  # fmt: skip
    return [bound(d, d.one_of(texts))]


@production("attention", 2.0)
def _attention(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() == 3 and t.shape[-1] % 2 == 0)
    b, s, e = d.shape(a)
    h = d.one_of([h for h in (1, 2, 4) if e % h == 0])
    wq, wk, wv = (d.parameter([e, e]) for _ in range(3))
    q, k, v, o = (d.fresh() for _ in range(4))
    heads = f".view({b}, {s}, {h}, {e // h}).transpose(1, 2)"
    extra = d.one_of(
        (
            "",
            ", is_causal=True",
            f", attn_mask={d.input(f'bools({d.seed()}, {s}, {s}) | torch.eye({s}, dtype=torch.bool)')}",
            f", attn_mask={d.parameter([s, s])}",
            ", scale=0.3",
        )
    )
    lines = [Line(f"{n} = ({a} @ {w}){heads}", (n,)) for n, w in ((q, wq), (k, wk), (v, wv))]
    if d.chance(0.3):
        scores = f"({q} @ {k}.transpose(-1, -2) * {1 / (e // h) ** 0.5:.4f})"
        return [*lines, Line(f"{o} = ({scores}.softmax(-1) @ {v}).transpose(1, 2).reshape({b}, {s}, {e})", (o,))]
    out = d.one_of((f".transpose(1, 2).reshape({b}, {s}, {e})", ".transpose(1, 2).contiguous().flatten(2)", "", ".sum(1)"))
    return [*lines, Line(f"{o} = F.scaled_dot_product_attention({q}, {k}, {v}{extra}){out}", (o,))]


@production("attention", 0.6)
def _grouped(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() == 3 and t.shape[-1] % 4 == 0)
    b, s, e = d.shape(a)
    w = d.parameter([e, 2 * e])
    q, k, v, o = (d.fresh() for _ in range(4))
    return [
        Line(f"{q}, {k}, {v} = ({a} @ {w}).split([{e}, {e // 2}, {e // 2}], dim=-1)", (q, k, v)),
        Line(
            f"{o} = F.scaled_dot_product_attention({q}.view({b}, {s}, 4, {e // 4}).transpose(1, 2), {k}.view({b}, {s}, 2, {e // 4}).transpose(1, 2), "
            f"{v}.view({b}, {s}, 2, {e // 4}).transpose(1, 2), is_causal=True, enable_gqa=True)",
            (o,),
        ),
    ]


@production("modules", 0.6)
def _transformer(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() == 3 and t.shape[-1] % 4 == 0)
    e = d.shape(a)[-1]
    if d.chance(0.5):
        m = d.submodule(f"nn.MultiheadAttention({e}, 2, dropout=0.0, batch_first=True)")
        return [bound(d, f"{m}({a}, {a}, {a}{d.one_of(('', ', need_weights=False'))})[0]")]
    m = d.submodule(f"nn.TransformerEncoderLayer({e}, 2, 8, dropout=0.0, batch_first=True{d.one_of(('', ', norm_first=True'))})")
    return [bound(d, f"{m}({a})")]


@production("modules", 0.8)
def _stack(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 2)
    n, h = d.shape(a)[-1], d.size()
    m = d.submodule(
        d.one_of(
            (
                f"nn.Sequential(nn.Linear({n}, {h}), nn.GELU(), nn.LayerNorm({h}), nn.Linear({h}, {n}))",
                f"nn.ModuleList([nn.Linear({n}, {n}) for _ in range(3)])",
                f"nn.ModuleDict(dict(up=nn.Linear({n}, {h}), gate=nn.Linear({n}, {h}), down=nn.Linear({h}, {n})))",
                f"nn.ParameterList([nn.Parameter(torch.zeros({n}, {n})) for _ in range(2)])",
            )
        )
    )
    kind = d.members[-1].text
    v = d.fresh()
    if "ModuleList" in kind:
        return [Line(f"{v} = {a}\nfor layer in {m}:\n    {v} = {v} + torch.tanh(layer({v}))", (v,))]
    if "ModuleDict" in kind:
        return [Line(f'{v} = {m}["down"](F.silu({m}["gate"]({a})) * {m}["up"]({a}))', (v,))]
    if "ParameterList" in kind:
        return [Line(f"{v} = ({a} @ {m}[0]) @ {m}[1]", (v,))]
    return [Line(f"{v} = {m}({a})", (v,))]


# ---- convolutions ------------------------------------------------------------------------------------------------


def image(d: Draw, spatial: int | None = None) -> tuple[str, int]:
    """A value of 1 to 3 spatial dims, with how many they are."""
    a = d.float(lambda t: 3 <= t.dim() <= 5 and (spatial is None or t.dim() == spatial + 2) and min(t.shape[2:]) >= 2)
    return a, len(d.shape(a)) - 2


@production("conv", 2.0)
def _conv(d: Draw) -> list[Line]:
    a, k = image(d)
    c = d.shape(a)[1]
    groups = d.one_of([g for g in (1, 1, 1, 2, c) if c % g == 0])
    out = groups * d.one_of((1, 2, 4))
    size = d.one_of((1, 2, 3))
    extra = d.one_of(
        (
            "",
            ", padding=1",
            ", stride=2, padding=1",
            ", bias=False",
            ", padding=2, dilation=2",
            ', padding="same"',
            ', padding=1, padding_mode="circular"',
            ', padding=1, padding_mode="reflect"',
        )
    )
    kind = "ConvTranspose" if d.chance(0.2) and "mode" not in extra and "same" not in extra and "dilation" not in extra else "Conv"
    return [bound(d, f"{d.submodule(f'nn.{kind}{k}d({c}, {out}, {size}, groups={groups}{extra})')}({a})")]


@production("conv", 2.0)
def _pool(d: Draw) -> list[Line]:
    a, k = image(d)
    texts = [
        f"F.avg_pool{k}d({a}, 2)", f"F.avg_pool{k}d({a}, 2, stride=1)", f"F.adaptive_avg_pool{k}d({a}, 1)", f"F.adaptive_avg_pool{k}d({a}, 2)",
        f"F.pad({a}, (1, 1))", f'F.pad({a}, (1, 1), mode="replicate")' , f"F.pad({a}, (1, 0, 0, 1))", f'F.pad({a}, (1, 0) * {k}, mode="circular")', f"F.lp_pool{k}d({a}.abs() + 0.1, 2, 2)",
    ]  # fmt: skip
    if not d.rough:
        texts += [
            f"F.max_pool{k}d({a}, 2)",
            f"F.max_pool{k}d({a}, 3, stride=1, padding=1)",
            f"F.adaptive_max_pool{k}d({a}, 2)",
            f"F.max_pool{k}d({a}, 2, return_indices=True)[0]",
        ]
    if k == 2:
        texts += [f"F.unfold({a}, 2)", f"F.pixel_shuffle({a}.repeat(1, 4, 1, 1), 2)", f"F.interpolate({a}, scale_factor=2, mode='bilinear')", f"F.interpolate({a}, size=(3, 5), mode='bicubic')",
                  f"F.interpolate({a}, size=(5, 3), mode='bilinear', align_corners=True)", f"F.avg_pool2d({a}, 3, 2, 1, count_include_pad=False)", f"F.pad({a}, (1, 1, 1, 1), mode='reflect')"]  # fmt: skip
        if d.shape(a)[2] % 2 == d.shape(a)[3] % 2 == 0:
            texts.append(f"F.pixel_unshuffle({a}, 2)")
    texts += [f"F.interpolate({a}, scale_factor=2)", f"F.interpolate({a}, size={[3] * k}, mode='nearest-exact')"]
    return [bound(d, d.one_of(texts))]


@production("conv", 0.4)
def _grid(d: Draw) -> list[Line]:
    a, _ = image(d, 2)
    n = d.shape(a)[0]
    if d.chance(0.5):
        return [
            bound(
                d, f"F.grid_sample({a}, F.affine_grid({d.parameter([n, 2, 3])}, [{n}, 1, 3, 3], align_corners=False), align_corners=False)"
            )
        ]
    return [
        bound(d, f"F.grid_sample({a}, torch.tanh({d.parameter([n, 3, 2, 2])}), mode='bilinear', padding_mode='border', align_corners=True)")
    ]


@production("conv", 0.5)
def _functional(d: Draw) -> list[Line]:
    a, k = image(d)
    c = d.shape(a)[1]
    n = d.one_of((2, 4))
    if k > 2:
        raise Unable
    return [bound(d, f"F.conv{k}d({a}, {d.parameter([n, c, *[2] * k])}, {d.parameter([n])})")]


templates(
    "matmul",
    "torch.cross({a}[..., :1].expand(*{a}.shape[:-1], 3), {a}[..., :1] * torch.tensor([1.0, 2.0, 3.0], dtype=D), dim=-1)",
    0.1,
    least=2,
)
