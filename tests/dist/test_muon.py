"""Muon on a mesh: numbers of one device, and every matrix orthogonalized on one rank alone."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import _torch
from tests.dist.launch import run
from tests.dist.test_habits import whole


def trained(cases: tuple[tuple[str, tuple[int, ...]], ...]) -> list[tuple[float, int]]:
    """By layout and mesh: the worst weight after three steps, and how many matrices this rank orthogonalized."""
    worked: list[torch.Size] = []
    own = _torch.orthogonalized
    _torch.orthogonalized = lambda m, *a: (worked.append(m.shape), own(m, *a))[1]  # type: ignore[attr-defined]
    torch.manual_seed(0)
    # One of the rows does not divide; a bias and a scale are another optimizer's.
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 30), nn.LayerNorm(30), nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 8))
    out = []
    for layout, sizes in cases:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
        one, ours = copy.deepcopy(model), autopar.compile(copy.deepcopy(model), mesh, backend="aot_eager", layout=layout)
        given: dict[tuple[str, int], torch.Tensor] = {}
        for m in (one, ours):
            worked.clear()
            optimizers = [
                torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], lr=1e-2, nesterov=layout != "tp"),
                torch.optim.SGD([p for p in m.parameters() if p.dim() != 2], lr=1e-2),
            ]
            for i in range(3):
                m(torch.randn(8, 16, generator=torch.Generator().manual_seed(i))).square().mean().backward()
                for n, p in m.named_parameters():
                    if m is one:
                        given[n, i] = p.grad.clone()
                    p.grad.copy_(given[n, i])  # rounded alike: what is compared is the step, which takes them in bfloat16
                for o in optimizers:
                    o.step()
                    o.zero_grad()
        pairs = zip(ours.parameters(), one.parameters(), strict=True)
        out.append((max(float((whole(p) - q).abs().max() / q.abs().max()) for p, q in pairs), len(worked)))
    return out


def test_a_mesh_of_two_dims() -> None:
    for each in zip(*run(trained, 4, (("fsdp+tp", (2, 2)), ("fsdp", (2, 2)))), strict=True):
        assert all(error < 1e-6 for error, _ in each)
        assert [n for _, n in each] == [3, 3, 3, 3]


def test_muon() -> None:
    results = run(trained, 2, (("fsdp", (2,)), ("tp", (2,)), ("ddp", (2,))))
    for each in zip(*results, strict=True):
        assert all(error < 1e-6 for error, _ in each)
        assert [n for _, n in each] == [3, 9], "one has the largest, whose work is more than that of the three others"
