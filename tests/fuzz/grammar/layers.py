"""Normalisations, dropout, embeddings and other layers with a state."""

from __future__ import annotations

import torch

from tests.fuzz.draw import Draw, Unable
from tests.fuzz.grammar import bound, production, templates
from tests.fuzz.program import Line


@production("norm", 2.0)
def _layer_norm(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 2)
    shape = d.shape(a)
    k = d.one_of((1, 1, 1, 2)) if len(shape) > 2 else 1
    last = list(shape[-k:])
    how = d.rng.random()
    if how < 0.4:
        extra = d.one_of(("", ", elementwise_affine=False", ", bias=False", ", eps=1e-2"))
        return [bound(d, f"{d.submodule(f'nn.LayerNorm({last}{extra})')}({a})")]
    if how < 0.6:
        return [bound(d, f"F.layer_norm({a}, {last})")]
    if how < 0.8:
        return [bound(d, f"{d.submodule(f'nn.RMSNorm({last}, eps=1e-3)')}({a})")]
    return [bound(d, f"{a} * torch.rsqrt({a}.pow(2).mean(-1, keepdim=True) + 1e-3) * {d.parameter([last[-1]])}")]


@production("norm", 1.0)
def _group_norm(d: Draw) -> list[Line]:
    if "formats" not in d.features:
        raise Unable  # its kernels depend on them
    a = d.float(lambda t: t.dim() >= 2)
    c = d.shape(a)[1]
    g = d.one_of([g for g in (1, 2, 3, 4, c) if c % g == 0])
    if d.chance(0.4):
        return [bound(d, f"F.group_norm({a}, {g}, {d.parameter([c])}, {d.parameter([c])})")]
    return [bound(d, f"{d.submodule(f'nn.GroupNorm({g}, {c}, eps=1e-2' + d.one_of((')', ', affine=False)')))}({a})")]


@production("norm", 1.0)
def _batch_norm(d: Draw) -> list[Line]:
    a = d.float(lambda t: 2 <= t.dim() <= 5)
    shape = d.shape(a)
    k = max(1, len(shape) - 2)
    kind = d.one_of(("BatchNorm", "BatchNorm", "InstanceNorm")) if len(shape) > 2 else "BatchNorm"
    extra = d.one_of(("", ", affine=False", ", track_running_stats=False", ", momentum=0.3", ", momentum=None", ", eps=1e-2"))
    if kind == "InstanceNorm":
        extra = d.one_of(("", ", affine=True", ", affine=True, track_running_stats=True"))
    m = d.submodule(f"nn.{kind}{k}d({shape[1]}{extra})")
    if d.chance(0.15):
        return [bound(d, f"{m}({m}({a}))")]
    return [bound(d, f"{m}({a})")]


@production("norm", 0.3)
def _weight_norm(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 1)
    n = d.shape(a)[-1]
    m = d.submodule(f"nn.utils.parametrizations.weight_norm(nn.Linear({n}, {d.size()}))")
    return [bound(d, f"{m}({a})")]


templates("norm", "F.local_response_norm({a}, 2)\nF.instance_norm({a})", 0.3, least=3)


@production("random")
def _dropout(d: Draw) -> list[Line]:
    if "dropout" not in d.features:
        raise Unable
    a = d.float(lambda t: t.dim() >= 1)
    texts = (
        f"F.dropout({a}, 0.3, self.training)",
        f"{d.submodule('nn.Dropout(0.5)')}({a})",
        f"F.dropout({a}, 0.0, True)",
        f"{a} * torch.rand_like({a})",
        f"{a} + 0.1 * torch.randn({d.dims(d.shape(a))}, dtype=D)",
    )
    return [bound(d, d.one_of(texts))]


@production("random", 0.4)
def _idle_dropout(d: Draw) -> list[Line]:
    return [bound(d, f"{d.submodule('nn.Dropout(0.0)')}({d.float()})")]


@production("state")
def _counter(d: Draw) -> list[Line]:
    """A buffer that forward changes."""
    a = d.float(lambda t: t.dim() >= 1)
    n = d.shape(a)[-1]
    b = d.buffer(f"torch.ones({n}, dtype=D)")
    lead = tuple(range(len(d.shape(a)) - 1))
    mean = f"{a}.detach().mean({lead})" if lead else f"{a}.detach()"
    update = d.one_of((
        f"{b}.mul_(0.9).add_({mean}, alpha=0.1)", f"with torch.no_grad():\n    {b}.copy_(0.9 * {b} + 0.1 * {mean})", f"{b} += 1", f"{b}[0] = 0.5", f"{b}.copy_({mean})", f"{b}.lerp_({mean}, 0.2)",
    ))  # fmt: skip
    v = d.fresh()
    use = Line(f"{v} = {a} * {b}.clone()" if d.chance(0.7) else f"{v} = {a} + {b}.detach().clone()", (v,))
    change = Line(update, (), True)
    return [use, change] if d.chance(0.5) else [change, use]


@production("state")
def _number(d: Draw) -> list[Line]:
    """An integer that counts calls."""
    b = d.buffer("torch.zeros((), dtype=torch.long)")
    v = d.fresh()
    return [Line(f"{b}.add_(1)" if d.chance(0.7) else f"{b} += 1", (), True), Line(f"{v} = {d.float()} / ({b} + 1)", (v,))]


@production("state")
def _constant(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 1)
    b = d.buffer(f"randn({d.seed()}, {d.shape(a)[-1]}, dtype=D)")
    return [bound(d, f"{a} {d.one_of(('*', '+', '-'))} {b}")]


def _is_index(t: torch.Tensor) -> bool:
    return t.dtype == torch.int64 and t.dim() >= 1 and int(t.min()) >= 0 and int(t.max()) < 12


@production("index", 2.0)
def _embedding(d: Draw) -> list[Line]:
    e = d.one_of((4, 8, 6))
    i = d.some(_is_index) if d.chance(0.5) else d.indices(12, d.batch, d.one_of((4, 6, 8)))
    rows = d.one_of((12, 16))
    extra = d.one_of(("", "", ", padding_idx=0", ", scale_grad_by_freq=True"))
    how = d.rng.random()
    if how < 0.5:
        return [bound(d, f"{d.submodule(f'nn.Embedding({rows}, {e}{extra})')}({i})")]
    w = d.parameter([rows, e])
    if how < 0.8:
        return [bound(d, f"F.embedding({i}, {w}{extra})")]
    return [bound(d, f"{w}[{i}]")]


@production("index", 0.6)
def _positions(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() == 3)
    _, s, e = d.shape(a)
    w = d.parameter([max(s, 8), e])
    texts = (f"{a} + {w}[:{s}]", f"{a} + {w}[torch.arange({s})]", f"{a} + F.embedding(torch.arange({s}).expand({a}.shape[0], -1), {w})")
    return [bound(d, d.one_of(texts))]


@production("index", 0.5)
def _one_hot(d: Draw) -> list[Line]:
    i = d.indices(5, d.batch)
    return [bound(d, f"F.one_hot({i}, 5).to(D)")]
