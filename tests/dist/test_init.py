"""Initialisation on several processes: bit for bit the same on every mesh, the first rank's values everywhere, and no rank holds the whole model."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autopar.runtime.init import distribute, materialize
from tests.conftest import Torchrun
from tests.dist.launch import run
from tests.models import ZOO
from tests.unit.test_initialisers import LAYERS, Special
from tests.wide import wide

CPU = torch.device("cpu")
MODELS: dict[str, Callable[[], nn.Module]] = {
    "special": Special,
    "llama": lambda: ZOO["llama"].build(vocab_size=97),
    "t5": ZOO["t5"].build,
    "bert": ZOO["bert"].build,
    "mixtral": ZOO["mixtral"].build,
    "convnet": ZOO["convnet"].build,
    "lora": ZOO["lora"].build,
    "embedding": LAYERS["embedding"],
    "attention": LAYERS["attention of other widths"],
}


def mixed(axes: int) -> Callable[[str, tuple[int, ...]], tuple[Placement, ...]]:
    """Every kind of placement, chosen by name; dim 0 also where it does not divide, or has fewer rows than ranks."""

    def placements(name: str, shape: tuple[int, ...]) -> tuple[Placement, ...]:
        kinds: list[tuple[Placement, Placement]] = [(Shard(0), Shard(0)), (Shard(0), Replicate()), (Replicate(), Replicate())]
        if len(shape) > 1:
            kinds += [(Shard(0), Shard(1)), (Shard(1), Shard(0))] if shape[1] % 4 == 0 else []
        return kinds[sum(name.encode()) % len(kinds)][:axes] if shape else (Replicate(),) * axes

    return placements


def _whole(t: torch.Tensor) -> torch.Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach()


def _on_every_mesh() -> None:
    """Rank 0 is the first rank of every mesh: its seed counts, the other ranks pass others."""
    rank = dist.get_rank()
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0], [0, 1], [0, 1, 2, 3], [[0, 1], [2, 3]])]
    for name, build in MODELS.items():
        found = []
        for mesh in meshes:
            if mesh.get_coordinate() is None:
                continue
            with torch.device("meta"):
                model = build()
            materialize(model, mesh, mixed(mesh.ndim), 5 + rank, CPU)
            assert all(isinstance(p, DTensor) and p.placements == mixed(mesh.ndim)(n, tuple(p.shape)) for n, p in model.named_parameters())
            found.append({n: _whole(t) for n, t in [*model.named_parameters(), *model.named_buffers()]})
        for other in found[1:]:
            assert other.keys() == found[0].keys()
            for n, t in found[0].items():
                assert torch.equal(t, other[n]), (name, n, "across meshes")
        for n, t in found[-1].items():
            same = t.clone()
            dist.broadcast(same, 0)
            assert torch.equal(t, same), (name, n, "across ranks")


def test_the_same_on_every_mesh() -> None:
    run(_on_every_mesh, 4)


def _distribute() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for name in ("gpt2", "convnet"):
        torch.manual_seed(dist.get_rank())
        model = ZOO[name].build()
        for b in model.buffers():
            b.add_(dist.get_rank())
        want = {n: t.detach().clone() for n, t in model.state_dict().items()}
        for t in want.values():
            dist.broadcast(t, 0)
        names = list(want)
        before = [weakref.ref(p) for p in model.parameters()]
        alive: list[int] = []

        def placements(n: str, shape: tuple[int, ...], before: Any = before, alive: Any = alive) -> tuple[Placement, ...]:
            alive.append(sum(r() is not None for r in before))
            return mixed(2)(n, shape)

        distribute(model, mesh, placements)
        assert alive == list(range(len(before), 0, -1)), "a whole parameter outlives its turn"
        assert list(model.state_dict()) == names
        assert all(torch.equal(_whole(t), want[n]) for n, t in model.state_dict().items())
        locals_ = [p.to_local() for p in model.parameters()]
        assert all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in locals_)


def test_distribute_takes_the_first_ranks_values() -> None:
    run(_distribute, 4)


@wide
def test_no_rank_holds_the_whole_model(torchrun: Torchrun) -> None:
    """160 M parameters on four processes: a rank that held them all would need four times its shards, one embedding whole 1.3 times."""
    out = torchrun("benchmarks/init_memory.py", "--hidden", "1024", "--layers", "10", "--vocab", "16000", processes=4)
    result = json.loads(out.strip().splitlines()[-1])
    assert result["ranks"] == 4 and result["parameters"] > 160e6
    assert result["ratio"] < 1.3, result
