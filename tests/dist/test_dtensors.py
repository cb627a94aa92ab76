"""What loops compute from parameters and gradients, which are DTensors: what they compute on one device, not a shard's answer."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import autopar
from tests.dist.launch import run
from tests.dist.test_habits import differs, whole

EXPRESSIONS = """
p.norm().item()
p.norm(1).item()
p.norm(float("inf")).item()
p.pow(2).sum().item()
p.mean().item()
p.std().item()
p.var(0)
p.max().item()
p.min().item()
p.abs().max()
p.argmax().item()
p.argmax(-1)
p.argmin(0)
p.median().item()
p.quantile(0.5).item()
p.topk(2).values
p.flatten().topk(3).values
p.sort().values
p.sort(0).values
p.sort(descending=True, dim=0).indices
p.cumsum(0)
p.cumsum(1)
p.prod().item()
p.sum(0)
p.sum(1)
p.logsumexp(0)
p.softmax(0)
p.softmax(1)
p.histc(4, -1, 1)
p.any().item()
(p == 0).sum().item()
(p > 0).float().mean().item()
torch.isnan(p).any().item()
torch.isfinite(p).all().item()
bool((p > 0).any())
p[0]
p[-1, 2]
p[1:3]
p[:, 1]
p[::2]
p.t()
p.t() @ p
p @ p.t()
p.flatten()[:5]
p.view(-1)[5].item()
p.reshape(2, -1)
p.reshape(-1, 3)
p.chunk(2)[1]
p.split(3, 1)[1]
p.unbind(0)[1]
p.diag()
p.diagonal().sum().item()
p.trace().item()
torch.stack([p, p]).mean().item()
torch.cat([p, p])
torch.cat([p, p], 1)
torch.cat([p.flatten(), p.flatten()])
torch.linalg.norm(p).item()
torch.linalg.matrix_norm(p, 2).item()
torch.linalg.svdvals(p)
torch.linalg.vector_norm(p, dim=0)
torch.nn.utils.parameters_to_vector([p])
F.cosine_similarity(p.flatten(), p.flatten().roll(1), dim=0).item()
F.cosine_similarity(p[0], p[1], dim=0).item()
F.normalize(p, dim=0)
F.normalize(p, dim=1)
F.mse_loss(p, torch.ones(8, 6)).item()
F.cross_entropy(p, torch.arange(8) % 6).item()
F.cross_entropy(p, torch.where(torch.arange(8) < 3, -100, 1)).item()
F.cross_entropy(p, torch.where(torch.arange(8) < 3, -100, 1), reduction="sum").item()
F.nll_loss(p.log_softmax(-1), torch.where(torch.arange(8) < 5, 2, -100)).item()
F.binary_cross_entropy_with_logits(p, torch.ones(8, 6)).item()
F.kl_div(p.log_softmax(-1), torch.full((8, 6), 1 / 6), reduction="batchmean").item()
F.smooth_l1_loss(p, torch.zeros(8, 6)).item()
F.layer_norm(p, (6,))
F.embedding(torch.tensor([1, 7, 7]), p)
F.linear(torch.ones(2, 6), p)
F.conv1d(torch.ones(1, 2, 6), p.reshape(8, 2, 3))
F.dropout(p, 0.0)
F.gelu(p)
p.clamp(min=0).count_nonzero().item()
p.masked_select(p > 0).sum().item()
p[p > 0].mean().item()
torch.where(p > 0, p, torch.zeros(()))
torch.tril(p)
torch.triu(p, 1)
p.roll(1, 0)
p.flip(0)
p.repeat(2, 1)
p.expand(2, 8, 6)
p.unsqueeze(0).squeeze(0)
p.index_select(0, torch.tensor([5, 1]))
p.gather(0, torch.tensor([[1] * 6, [7] * 6]))
p.scatter(0, torch.tensor([[1] * 6]), torch.zeros(1, 6))
p.index_add(0, torch.tensor([1, 6]), torch.ones(2, 6))
p.tolist()
p.detach().cpu().numpy().sum().item()
float(p.sum())
int(p.sum() * 100)
f"{p.sum().item():.3f}"
p.sum().tolist()
len(p)
p.numel()
p.shape == (8, 6)
p.allclose(p + 0)
torch.equal(p, p.clone())
torch.equal(p, p + 1)
p.double().sum().item()
p.to(torch.bfloat16).float().sum().item()
(p * torch.arange(6.0)).sum().item()
(p + torch.ones(8, 1)).mean(1)
torch.einsum("ij,ij->", p, p).item()
torch.einsum("ij,kj->ik", p, p)
torch.bincount((p.flatten() > 0).long()).tolist()
torch.unique((p > 0).float()).tolist()
torch.maximum(p.sum(), torch.tensor(0.5)).item()
sum(x.sum() for x in p).item()
[round(float(x.sum()), 3) for x in p]
""".strip().splitlines()


def outcome(expression: str, p: Any) -> Any:
    try:
        return whole(eval(expression, {"p": p, "torch": torch, "F": F}))
    except Exception as e:
        return e


def every() -> tuple[list[str], list[str]]:
    """Expressions that are wrong, and those that are refused."""
    torch.manual_seed(0)
    one, mesh = nn.Linear(6, 8, bias=False), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model: Any = autopar.compile(copy.deepcopy(one), mesh, layout="fsdp", backend="aot_eager", outputs="all")
    x = torch.randn(4, 6)
    model(x).square().mean().backward()
    one(x).square().mean().backward()
    columns = distribute_tensor(one.weight.detach(), mesh, [Shard(1)])  # as a layout that splits tensors has it
    wrong, refused = [], []
    for e in EXPRESSIONS:
        for q, p in ((model.weight, one.weight), (model.weight.grad, one.weight.grad), (columns, one.weight.detach())):
            got, want = outcome(e, q), outcome(e, p)
            if isinstance(want, Exception):
                assert "requires grad" in str(want), want  # numpy() of a parameter
            elif isinstance(got, Exception):
                refused.append(f"{e}: {got}")
            elif said := differs(e, want, got, 1e-5):
                wrong.append(said)
    return wrong, refused


def test_of_one_device() -> None:
    for wrong, refused in run(every, 2):
        assert not wrong, "\n".join(wrong)
        assert not refused, "\n".join(refused)
