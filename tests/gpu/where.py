"""Where the tests of this folder run: on the GPU; on the CPU for a rehearsal, with GPU_CHECK_DEVICE=cpu."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.eager import whole

DEVICE = os.environ.get("GPU_CHECK_DEVICE", "cuda")
only_here = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Of one device. Products and convolutions of float32 are not rounded to TF32 meanwhile."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(DEVICE, (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()
    torch.backends.cudnn.allow_tf32 = before


def here(x: Any) -> Any:
    """`x`, or the tensors in a dict, on the device."""
    if isinstance(x, dict):
        return {k: here(v) for k, v in x.items()}
    return x.to(DEVICE) if isinstance(x, torch.Tensor) else x


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: whole(p.grad).double() for n, p in model.named_parameters() if p.grad is not None}


def error(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Relative difference over all gradients."""
    assert a.keys() == b.keys()
    difference = torch.stack([(a[n] - b[n]).norm() for n in b]).norm()
    return float(difference / torch.stack([g.norm() for g in b.values()]).norm())


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Of one gradient, relative to its own norm and a hundredth of all gradients' together."""
    assert a.keys() == b.keys()
    total = float(torch.stack([g.norm() for g in b.values()]).norm())
    return max((float((a[n] - b[n]).norm()) / (float(b[n].norm()) + total / 100), n) for n in b)
