"""Reductions, softmax, losses, scans and sorts. What is sensitive to ties gets values of which no two are near each other."""

from __future__ import annotations

import torch

from tests.fuzz.draw import Draw, Unable
from tests.fuzz.grammar import bound, production, templates
from tests.fuzz.program import Line

templates(
    "reduce",
    """
    {a}.sum()
    {a}.mean()
    {a}.sum({d})
    {a}.sum({d}, keepdim=True)
    {a}.mean({d})
    {a}.mean({d}, keepdim=True)
    {a}.sum(({d}, {e}))
    {a}.mean(({d}, {e}), keepdim=True)
    torch.var({a}, {d})
    torch.var({a}, {d}, unbiased=False, keepdim=True)
    torch.std({a}, {d})
    torch.std({a})
    torch.var_mean({a}, {d})[0]
    torch.var_mean({a}, {d}, keepdim=True)[1]
    torch.logsumexp({a}, {d})
    torch.logsumexp({a}, ({d}, {e}), keepdim=True)
    torch.linalg.vector_norm({a})
    torch.linalg.vector_norm({a}, dim={d})
    torch.norm({a}, p=2, dim={d}, keepdim=True)
    torch.norm({a}, p=1)
    torch.linalg.vector_norm({a}, ord=3, dim={d})
    F.normalize({a}, dim={d})
    torch.nansum({a}, {d})
    {a}.prod({d})
    {a}.prod({d}, keepdim=True)
    ({a} > 0.3).any({d})
    ({a} > -0.3).all({d})
    ({a} > 0.3).any()
    ({a} > 0).sum({d})
    ({a} > 0).to(D).mean()
    torch.count_nonzero({a} > 0.2, dim={d})
    {a} - {a}.mean({d}, keepdim=True)
    {a} / (1 + {a}.abs().sum({d}, keepdim=True))
    {a}.square().mean().sqrt() * {a}
    torch.nanmean({a}, {d})
    F.cosine_similarity({a}, {s}, dim={d})
    F.pairwise_distance({a}, {s})
    torch.dist({a}, {s})
    {a}.sum_to_size({a}.shape)
    """,
    4.0,
    least=1,
)
templates(
    "softmax",
    """
    {a}.softmax({d})
    F.softmax({a}, dim={d})
    F.log_softmax({a}, dim={d})
    F.softmin({a}, dim={d})
    torch.softmax({a}, {d}) * {b}
    F.softmax({a}.masked_fill({m}, -20.0), dim={d})
    F.softmax({a}, dim={d}, dtype=torch.float64).to({a}.dtype)
    """,
    2.0,
    least=1,
)
templates(
    "softmax",
    """
    F.mse_loss({a}, {s})
    F.mse_loss({a}, {s}, reduction="none")
    F.mse_loss({a}, {s}.detach(), reduction="sum")
    F.l1_loss({a}, {s})
    F.smooth_l1_loss({a}, {s})
    F.smooth_l1_loss({a}, {s}.detach(), beta=0.5, reduction="none")
    F.huber_loss({a}, {s}, delta=0.7)
    F.binary_cross_entropy({a}.sigmoid(), {s}.sigmoid().detach())
    F.binary_cross_entropy_with_logits({a}, {s}.sigmoid())
    F.binary_cross_entropy_with_logits({a}, {s}.sigmoid().detach(), reduction="none")
    F.kl_div({a}.log_softmax({d}), {s}.softmax({d}), reduction="batchmean")
    F.kl_div({a}.log_softmax({d}), {s}.log_softmax({d}), log_target=True, reduction="none")
    F.soft_margin_loss({a}, {s}.detach().sign())
    F.poisson_nll_loss({a}, {s}.abs())
    F.gaussian_nll_loss({a}, {s}, {s}.square() + 0.3)
    F.hinge_embedding_loss({a}, {s}.detach().sign())
    F.margin_ranking_loss({a}, {s}, {s}.detach().sign(), margin=0.1)
    """,
    2.0,
    least=1,
)


@production("softmax", 2.0)
def _cross_entropy(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 2 and t.shape[1] >= 2)
    shape = d.shape(a)
    target = d.indices(shape[1], shape[0], *shape[2:])
    extra = d.one_of(
        (
            "",
            "",
            ', reduction="sum"',
            ', reduction="none"',
            ", label_smoothing=0.1",
            ", ignore_index=1",
            f", weight={d.parameter([shape[1]])}.detach().square()",
        )
    )
    if d.chance(0.2):
        return [bound(d, f"F.nll_loss(F.log_softmax({a}, dim=1), {target}{extra if 'smooth' not in extra else ''})")]
    if d.chance(0.15):
        return [bound(d, f"F.cross_entropy({a}, {d.alike(a)}.softmax(1).detach())")]
    return [bound(d, f"F.cross_entropy({a}, {target}{extra})")]


@production("softmax", 0.5)
def _masked_mean(d: Draw) -> list[Line]:
    a = d.float(lambda t: t.dim() >= 1)
    m = d.mask(a)
    return [bound(d, f"({a} * {m}).sum() / ({m}.sum() + 1)")]


def distinct(d: Draw) -> str:
    """A value of at least one dim of which no two numbers are near each other."""

    def apart(t: torch.Tensor) -> bool:
        if t.dim() == 0 or not t.is_floating_point() or t.dtype == torch.bfloat16:
            return False
        flat = t.detach().double().flatten().sort().values
        return flat.numel() < 2 or float(flat.diff().min()) > 1e-4

    if d.rough:
        raise Unable
    return d.float(apart)


_PICKS = """
    {a}.amax({d})
    {a}.amin({d}, keepdim=True)
    {a}.max()
    {a}.min()
    {a}.amax(({d}, {e}))
    {a}.argmax({d})
    {a}.argmin({d}, keepdim=True)
    {a}.median({d})[0]
    {a}.sort({d})[0]
    {a}.sort({d}, descending=True)[1]
    {a}.argsort({d})
    torch.msort({a})
    {a}.cummax({d})[0]
    {a}.cummin({d})[1]
    {a}.kthvalue(2, {d})[0]
    {a}.sort({d}, stable=True)[0]
    {a}.argmax()
    torch.aminmax({a}, dim={d})[1]
    {a}.max({d}, keepdim=True).values
    {a}.ge({a}.topk(2, {d})[0][..., -1:])
    torch.quantile({a}, 0.3, dim={d})
    {a} - {a}.amax({d}, keepdim=True)
    torch.searchsorted({a}.detach().flatten().sort()[0], {a}.detach())
    torch.bucketize({a}.detach(), torch.tensor([-1.0, 0.03, 1.0], dtype=D))
"""


@production("scan", 2.0)
def _picked(d: Draw) -> list[Line]:
    a = distinct(d)
    n = len(d.shape(a))
    dim = d.dim(a)
    others = [i for i in range(n) if i != dim % n]
    text = d.one_of(_PICKS.strip().splitlines()).strip()
    if "{e}" in text and not others:
        raise Unable
    return [bound(d, text.format(a=a, d=dim, e=others[0] if others else 0))]


@production("scan")
def _top(d: Draw) -> list[Line]:
    a, k = distinct(d), d.one_of((1, 2, 3))
    pick = d.one_of(("topk", "max", "min", "sort"))
    dim = d.dim(a)
    v, i = d.fresh(), d.fresh()
    call = f"{a}.topk({k}, {dim})" if pick == "topk" else f"{a}.{pick}({dim})"
    return [Line(f"{v}, {i} = {call}", (v, i))]


templates(
    "scan",
    """
    {a}.cumsum({d})
    {a}.cumsum({d}) * 0.3
    {a}.cumprod({d})
    torch.logcumsumexp({a}, {d})
    {a}.flip({d})
    {a}.flip(({d}, {e}))
    torch.roll({a}, {k}, {d})
    torch.roll({a}, ({k}, -1), ({d}, {e}))
    torch.roll({a}, {k})
    torch.diff({a}, dim={d})
    torch.cumulative_trapezoid({a}, dim={d})
    torch.trapezoid({a}, dim={d})
    torch.gradient({a}, dim={d})[0]
    """,
    2.0,
    least=1,
)
