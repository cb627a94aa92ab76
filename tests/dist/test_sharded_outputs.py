"""Large outputs, of which each rank holds its samples: every expression gives what it gives of a plain tensor, and so do gradients; common losses never gather them."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.distributed.groups import Groups
from autopar.runtime import sharded_output
from autopar.runtime.rows import Rows
from autopar.runtime.sharded_output import ShardedOutput
from tests.dist.launch import run
from tests.models import ZOO
from tests.wide import cases

# x: 8 x 6 x 12, a model's logits. Of these no operation needs the whole.
BY_ROWS = """
F.cross_entropy(x.view(-1, 12), labels.view(-1))
F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="sum")
F.cross_entropy(x[:, :-1].reshape(-1, 12), labels[:, 1:].reshape(-1))
F.cross_entropy(x[..., :-1, :].contiguous().view(-1, x.size(-1)), ids[..., 1:].contiguous().view(-1), ignore_index=3)
F.cross_entropy(x.transpose(1, 2), labels, reduction="none").mean()
F.cross_entropy(x.transpose(1, 2), labels, weight=classes, label_smoothing=0.1)
F.cross_entropy(x.float().view(-1, 12), labels.view(-1), weight=classes)
F.cross_entropy(x.view(-1, 12), probabilities.view(-1, 12))
F.cross_entropy(x.view(-1, 12).bfloat16(), labels.view(-1))
F.cross_entropy(x.view(-1, 12) / heat, labels.view(-1))
nn.CrossEntropyLoss(reduction="sum")(x.view(-1, 12), labels.view(-1)) / 7
F.nll_loss(F.log_softmax(x, -1).view(-1, 12), labels.view(-1))
x.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
(x.log_softmax(dim=-1).gather(2, ids[..., None]).squeeze(-1) * mask).sum(-1)
torch.gather(x.log_softmax(-1), dim=2, index=ids.unsqueeze(2)).squeeze(2).sum(-1).mean()
-(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean()
torch.logsumexp(x, -1).pow(2).mean() * 1e-4
x.argmax(-1)
(x.argmax(dim=-1) == labels).float().mean().item()
x.topk(3, -1).values
x.max(-1).values
x.max(dim=-1).indices
torch.max(x, 2)[0].sum()
x.sort(-1, descending=True).indices[..., 0]
x.mean()
x.sum()
x.mean((0, 1))
x.sum(0, keepdim=True)
x.double().mean(1)
x.half().float().sum()
x.square().mean(dim=(1, 2)).sum()
F.mse_loss(x, target)
F.mse_loss(target, x, reduction="sum")
F.l1_loss(x, target, reduction="none").mean(-1)
F.smooth_l1_loss(x, target, beta=0.5)
F.binary_cross_entropy_with_logits(x, (target > 0).float(), pos_weight=classes)
F.kl_div(F.log_softmax(x, -1), probabilities, reduction="batchmean")
F.kl_div(x.log_softmax(-1), x.detach().softmax(-1), reduction="sum")
torch.where(mask[..., None] > 0, x, 0.0).sum()
x.masked_fill((mask == 0).unsqueeze(-1), -1e4).softmax(-1).max(-1).values
x[:, -1].argmax(-1)
x[:, -1, :]
x[:, ::2, None, 3]
x[:, 1:3].mean()
x.select(1, 2).sum(-1)
x.narrow(2, 0, 5).sum()
torch.cat([c.sum(-1) for c in x.chunk(3, dim=-1)])
x.split([2, 4], 1)[1].sum((1, 2))
x.permute(0, 2, 1).softmax(1).sum(2)
x.unflatten(-1, (3, 4)).sum(-1)
x.to(torch.float64).sum()
(x * heat).sum()
(x + classes).tanh().sum()
(heat * x.exp()).mean()
(x @ matrix).sum(-1)
F.linear(x, matrix.T, bias).square().mean()
F.normalize(x, dim=-1).sum(-1)
x.any(-1)
(x > 0).sum()
torch.clamp(x, min=0.0).sum()
x.cumsum(1).mean()
1 / (1 + (-x).exp()).mean()
x.shape, x.dtype, x.dim(), len(x), x.requires_grad, x.is_leaf, x.size(1), x.numel(), x.device, x.is_contiguous(), x.stride()
isinstance(x, torch.Tensor), torch.is_tensor(x), x.is_floating_point()
""".strip().splitlines()
# The others may gather it.
WHOLE = """
x
x + 0
x.tolist()
x.detach().numpy().shape
str(x[:2].detach())
x[0]
x[mask > 0].sum()
x[torch.arange(8), torch.arange(8) % 6]
x[1:3].sum()
x[::2, 1]
x.flatten()[:5]
x.t() if x.dim() == 2 else x.transpose(0, 1).sum(-1)
x.std()
x.var(0)
x.max()
x.argmax()
x.softmax(0)
x.norm()
x.cumsum(0)
x.median()
torch.stack([x, x]).mean((1, 2))
torch.cat([x[:, :1], x[:, 1:]], 1).sum(0)
torch.einsum("bsv,bsv->b", x, x)
torch.bmm(x, x.transpose(1, 2)).sum()
x.roll(1, 0).sum((1, 2))
x.flip(0)[0]
x.unbind(0)[3].sum()
[r.sum() for r in x][2]
F.layer_norm(x, (12,)).square().sum(-1)
F.cosine_similarity(x[:, 0], x[:, 1], dim=-1)
torch.cdist(x[:, 0], x[:, 1])
x.repeat(2, 1, 1).sum()
x.expand(8, 6, 12).sum(0)
x.unsqueeze(0).sum()
x.view(4, 2, 6, 12).sum((0, 1))
x.view(3, -1).mean(1)
x.index_select(0, torch.tensor([5, 1])).sum()
torch.topk(x.flatten(), 4).values
F.dropout(x, 0.0).sum()
F.pad(x, (1, 1)).sum()
x.clone().mul_(2).sum()
x.clone().index_fill_(1, torch.tensor([1]), 0.0).sum()
copy.copy(x.detach()).sum()
x.contiguous().view(-1).sum()
x.new_zeros(2)
x.nonzero().shape
sum(x.view(8, -1).sum(-1))
written(x)
filled(x)
Cubed.apply(x).sum()
torch.utils.checkpoint.checkpoint(lambda t: t.exp().sum(), x, use_reentrant=False)
torch.utils.checkpoint.checkpoint(lambda t: t.exp().sum(), x, use_reentrant=True)
torch.autograd.grad(x.square().sum(), [x])[0]
torch.autograd.grad(x.square().sum(), x, retain_graph=True)[0].sum()
torch.vmap(lambda r: r.square().sum())(x)
x.data.max()
F.relu(x.clone(), True).sum()
x.mT.sum(-1)
x.type(torch.float64).sum()
Cubed.apply(x).softmax(-1).square().sum() + x.sum()
copy.deepcopy(x.detach()).sum()
stored(x)
inferred(x)
mixed(x)
x.sum() + sum(t.sum() for t in x[:, 0].unbind(-1))
torch.add(x, 1, alpha=2).sum()
torch.softmax(x, dim=-1, dtype=torch.float64).square().sum()
x.pow(2).sum(-1).sqrt().mean()
(x[..., 0] * x[..., 1]).sum()
x.to("cpu", torch.float64, copy=True).sum()
torch.stack([x.mean(), x.sum()])
torch.cat([x, target]).sum(-1)
F.cross_entropy(x[0], labels[1])
F.cross_entropy(x.reshape(-1, 12)[mask.view(-1) > 0], labels.view(-1)[mask.view(-1) > 0])
F.gumbel_softmax(x * 0, hard=False).shape
torch.multinomial(x[:, -1].softmax(-1), 1).shape
x.view(-1, 12).gather(1, ids.view(-1, 1)).sum()
x.log_softmax(-1)[torch.arange(8)[:, None], torch.arange(6)[None], ids].sum()
x.take_along_dim(ids.unsqueeze(-1), -1).sum()
x.amax(-1) - x.amin(dim=-1, keepdim=True).squeeze(-1)
torch.allclose(x, x.clone()), torch.equal(x, x), bool((x == x).all())
x.quantile(0.5, dim=-1)
kept(x)
hooked(x)
views_written(x)
views_written_before(x)
cut_off(x)
x.cpu().sum()
""".strip().splitlines()


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(t)
        return t.pow(3)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (t,) = ctx.saved_tensors
        return grad * 3 * t.square()


def views_written(x: torch.Tensor) -> torch.Tensor:
    """What is written into a view is in what it is of, and in other views."""
    x = x * 1.0
    rows, last, first = x.view(-1, 12), x[:, -1], x[0]
    last[last < 0] = -5.0
    first.add_(1)
    rows[:, 3] *= 2
    a, b = x.chunk(2, dim=-1)
    a.mul_(3)
    return x.sum(-1) + rows.view(8, 6, 12).softmax(-1).max(-1).values + last.sum() + b.sum()


def views_written_before(x: torch.Tensor) -> torch.Tensor:
    last = (x * 2)[:, -1, :]
    with torch.no_grad():
        last /= 0.7
    return last.softmax(-1).square().sum() + x.data.view(-1).add_(0).sum()


def stored(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save({"logits": x.detach()}, file)
    file.seek(0)
    return torch.load(file)["logits"].sum(-1)


def inferred(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found = x.log_softmax(-1).max(-1).values + (x * 2).argmax(-1)
    return found.clone()


def mixed(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(x.view(-1, 12).bfloat16(), torch.arange(48) % 12) + 0 * x.mean()


def cut_off(x: torch.Tensor) -> Any:
    y = x * 2
    y[0] = 0.5
    y.detach_()
    z = x.detach() * 1.0
    before = z.requires_grad
    z.mul_(x.mean())
    return before, y.requires_grad, z.requires_grad, y.sum(-1), z.sum() + x.sum()


def kept(x: torch.Tensor) -> torch.Tensor:
    """A gradient that is kept on the way."""
    x = x * 2
    x.retain_grad()
    x.softmax(-1).square().sum().backward(retain_graph=True)
    assert x.grad is not None
    return x.grad.sum(-1) + 0 * x.sum()


def hooked(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x.register_hook(lambda g: g.clamp(max=0.1) * g.mean())
    return x.softmax(-1).square().sum()


def written(x: torch.Tensor) -> torch.Tensor:
    x = x * 1.0
    x /= 2
    x[0] = 1.0
    x[:, 1] += 3
    x.mul_(2).clamp_(max=1.5)
    return x.sum((0, 1))


def filled(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.masked_fill_(x > 1, 0.0)
    torch.nn.init.zeros_(x[:, 0].clone())
    return x.softmax(-1).max(-1).values


def operands() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 12, (8, 6), generator=g)
    labels[0] = labels[3, 2:] = -100
    made: dict[str, Any] = {
        "labels": labels, "ids": labels.clamp(min=0), "mask": (labels != -100).float(), "target": torch.randn(8, 6, 12, generator=g),
        "probabilities": torch.randn(8, 6, 12, generator=g).softmax(-1), "classes": torch.rand(12, generator=g) + 0.5,
    }  # fmt: skip
    trained = {"heat": torch.tensor(1.3), "matrix": torch.randn(12, 4, generator=g), "bias": torch.randn(4, generator=g)}
    return made | {n: t.requires_grad_() for n, t in trained.items()}


TRAINED = ("heat", "matrix", "bias")


def outcome(text: str, make: Any) -> list[Any]:
    """The value, and gradients of x and of plain tensors beside it. make: x, of what wants the gradient."""
    base = torch.randn(8, 6, 12, generator=torch.Generator().manual_seed(1)).requires_grad_()
    names = operands()
    torch.manual_seed(0)
    found = eval(text, globals(), {**names, "x": make(base)})
    leaves = torch.utils._pytree.tree_leaves(found)
    plain = [t.as_subclass(torch.Tensor) if isinstance(t, nn.Parameter) else t for t in leaves]
    wanted = [t.square().sum() for t in plain if isinstance(t, torch.Tensor) and t.requires_grad]
    if wanted:
        sum(wanted).backward()
    plain = [t.detach() + 0 if isinstance(t, torch.Tensor) else t for t in plain]
    return [*[sharded_output.whole(t) for t in plain], base.grad, *(names[n].grad for n in TRAINED)]


def differs(got: list[Any], want: list[Any], near: float) -> str:
    if len(got) != len(want):
        return f"{len(got)} of {len(want)} results"
    for a, b in zip(got, want, strict=True):
        if not isinstance(b, torch.Tensor):
            if a != b and not (isinstance(b, float) and math.isclose(a, b, rel_tol=1e-4)):
                return f"{a} != {b}"
        else:
            if a is None:
                return "no gradient"
            if type(a) is not torch.Tensor or a.shape != b.shape or a.dtype != b.dtype:
                return f"{type(a).__name__} {tuple(a.shape)} {a.dtype} in place of {tuple(b.shape)} {b.dtype}"
            if not torch.allclose(a, b, rtol=near, atol=near):
                return f"differs by {float((a.double() - b.double()).abs().max())}"
    return ""


def every(sizes: tuple[int, ...], axes: tuple[str, ...], texts: list[str]) -> dict[str, tuple[str, int]]:
    """What is wrong, and how many elements of x were gathered, by expression."""
    groups = Groups(init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)]))
    rows = Rows(groups, axes)
    sharded_output.LARGE = 200
    gathered: list[int] = []
    plain = Rows.gathered
    Rows.gathered = lambda self, local: (gathered.append(local.numel() * self.parts), plain(self, local))[1]  # type: ignore[method-assign]

    def sharded(base: torch.Tensor) -> torch.Tensor:
        return ShardedOutput.worn(rows.mine(base), rows)

    out = {}
    for text in texts:
        try:
            want = outcome(text, lambda base: base * 1)
        except Exception as e:
            want = [type(e)]
        gathered.clear()
        try:
            got = outcome(text, sharded)
        except Exception as e:
            got = [type(e)]
            if want != got:
                out[text] = (repr(e)[:600], 0)
                continue
        large = max(gathered, default=0)
        at = len(got) - 1 - len(TRAINED)
        if len(got) > 1 and isinstance(got[at], torch.Tensor):
            got[at] = rows.gathered(rows.mine(got[at]).contiguous())
        out[text] = (differs(got, want, 1e-2 if "float16" in text or "mixed" in text else 2e-5), large)
    Rows.gathered = plain  # type: ignore[method-assign]
    return out


@pytest.mark.parametrize(
    ("processes", "sizes", "axes"), cases([(2, (2,), ("dp",)), (4, (2, 2), ("dp", "tp")), (4, (2, 2), ("tp",))], [(2, (2,), ("dp",))])
)
def test_expressions(processes: int, sizes: tuple[int, ...], axes: tuple[str, ...]) -> None:
    for found in run(every, processes, sizes, axes, BY_ROWS + WHOLE):
        wrong = {text: said for text, (said, _) in found.items() if said}
        assert not wrong, "\n".join(f"{t}: {said}" for t, said in wrong.items())
        assert not [t for t in BY_ROWS if found[t][1] > 8 * 6 * 6], "gathered"


def trained(layout: str, names: tuple[str, ...]) -> dict[str, tuple[list[float], list[float], float, bool, list[int]]]:
    """By model: losses of both, the worst difference of a parameter, whether logits stayed, and elements gathered of them."""
    sharded_output.LARGE = 64
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    gathered: list[int] = []
    plain = Rows.gathered
    Rows.gathered = lambda self, local: (gathered.append(local.numel() * self.parts), plain(self, local))[1]  # type: ignore[method-assign]
    out = {}
    for name in names:
        torch.manual_seed(0)
        one = ZOO[name].build(2).train()
        ours = autopar.compile(copy.deepcopy(one), mesh, layout=layout, backend="aot_eager")
        losses: tuple[list[float], list[float]] = ([], [])
        gathered.clear()
        for model, said in ((ours, losses[0]), (one, losses[1])):
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            for i in range(3):
                ids = torch.randint(4, 96, (4, 16), generator=torch.Generator().manual_seed(i))
                logits = model(input_ids=ids).logits
                if model is ours:
                    stays = type(logits) is ShardedOutput
                loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)).float(), ids[:, 1:].reshape(-1))
                loss.backward()
                opt.step()
                opt.zero_grad()
                said.append(float(loss.detach()))
        pairs = zip(ours.parameters(), one.parameters(), strict=True)
        worst = max(float((p.full_tensor() - q).norm() / q.norm().clamp(min=1e-3)) for p, q in pairs)  # type: ignore[attr-defined]
        out[name] = (*losses, worst, stays, list(gathered))
    return out


@pytest.mark.parametrize("layout", cases(("fsdp", "tp"), ("tp",)))
def test_logits_of_models(layout: str) -> None:
    for found in run(trained, 2, layout, ("llama", "gemma3") if layout == "fsdp" else ("llama",)):
        for got, want, worst, stays, gathered in found.values():
            torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=1e-5)
            assert worst < 1e-4 and stays and not gathered
