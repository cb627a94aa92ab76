"""Memory formats from the user's tensors to kernels: kept where they can be, copied where a kernel asks for it, refused where they have no meaning."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import CaptureError
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.graph.redistribution import redistribute
from autopar.passes.lay_out import copies
from autopar.tensors.memory_format import with_strides
from tests.images import batch_of, model_of

pytestmark = pytest.mark.usefixtures("one_process")


def images(*shape: int, last: bool = True, seed: int = 0) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last) if last else x


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def same_as_eager(model: nn.Module, *args: Tensor, backend: str = "aot_eager") -> autopar.runtime.module.ParallelModule:
    ours = autopar.compile(copy.deepcopy(model), backend=backend)
    want, got = model(*args), ours(*args)
    want.backward()
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    for (n, p), q in zip(model.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(whole(q.grad), p.grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=n: f"{n}: {m}")
    return ours


class Transposed(nn.Module):
    """Words become an image whose channels are last in memory, without anyone asking for that."""

    def __init__(self, norm: nn.Module, how: str) -> None:
        super().__init__()
        self.q, self.norm, self.out, self.how = nn.Linear(32, 32), norm, nn.Conv2d(32, 32, 1), how

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.q(x).transpose(1, 2)
        h = h.reshape(4, 32, 8, 8) if self.how == "reshape" else h.unflatten(2, (8, 8))
        return F.mse_loss(self.out(F.silu(self.norm(h))), y)


@pytest.mark.parametrize("how", ["reshape", "view"])
@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(8, 32), nn.BatchNorm2d(32), nn.InstanceNorm2d(32, affine=True)], ids=["group", "batch", "instance"]
)
def test_a_transpose_before_a_norm(norm: nn.Module, how: str) -> None:
    same_as_eager(Transposed(copy.deepcopy(norm), how), images(4, 64, 32, last=False), images(4, 32, 8, 8, last=False, seed=1))


class Inside(nn.Module):
    """The format changes within the model."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.c, self.n, self.where = nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), where

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.where == "norm":
            return F.mse_loss(self.n(x.contiguous(memory_format=torch.channels_last)), y) + 0 * self.c.weight.sum() + 0 * self.c.bias.sum()
        if self.where == "before":
            return F.mse_loss(self.n(self.c(x.contiguous(memory_format=torch.channels_last))), y)
        return F.mse_loss(self.n(self.c(x).to(memory_format=torch.channels_last)), y)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("last", [False, True])
def test_a_format_of_the_models_own(where: str, last: bool) -> None:
    same_as_eager(Inside(where), images(4, 32, 8, 8, last=last), images(4, 32, 8, 8, seed=1, last=last))


def test_a_kernel_that_crashes_on_channels_last_is_given_another_format() -> None:
    """torch's own backward of this module ends the process where the input needs no gradient (2.13)."""
    model = Inside("norm")
    ours = autopar.compile(copy.deepcopy(model), backend="aot_eager")
    x, y = images(4, 32, 8, 8, last=False), images(4, 32, 8, 8, seed=1)
    ours(x, y).backward()
    model(x.clone().requires_grad_(), y).backward()
    for p, q in zip(model.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(whole(q.grad), p.grad)


@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_channels_last_is_kept_without_copies(name: str) -> None:
    model = model_of(name, True)
    batch = batch_of(name, 4, True)
    ours = same_as_eager(model, *batch.values())
    weights = [(n, p) for n, p in ours.named_parameters() if p.dim() == 4 and min(p.shape[1:]) > 1]
    for n, p in weights:
        local = p.to_local() if isinstance(p, DTensor) else p
        grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        assert local.is_contiguous(memory_format=torch.channels_last), n
        assert grad.stride() == local.stride(), f"{n}: an optimizer would copy"
    (step,) = ours._programs.steps()
    assert weights and copies(step.base.forward) == copies(step.base.backward) == 0
    clones = [sum("clone" in str(n.target) for n in gm.graph.nodes) for gm in (step.captured.gm, step.base.forward, step.base.backward)]
    assert clones[0] == clones[1] + clones[2], "a copy that eager does not make"


def test_inputs_of_another_format_are_another_step() -> None:
    ours = autopar.compile(model_of("unet", False), backend="aot_eager")
    reference = model_of("unet", False)
    for last in (False, True, False):
        batch = batch_of("unet", 2, last)
        torch.testing.assert_close(ours(**batch), reference(**batch))
    assert ours.programs.captured == 2


def test_inputs_that_lie_in_no_format() -> None:
    """Expanded, transposed, with gaps."""
    model = Inside("after")
    base = images(4, 32, 8, 16, last=False)
    for x in (base[..., ::2], images(8, 8, 4, 32, last=False).permute(2, 3, 0, 1), images(1, 32, 8, 8, last=False).expand(4, -1, -1, -1)):
        same_as_eager(copy.deepcopy(model), x, images(4, 32, 8, 8, seed=1, last=False))


# ---- windows -----------------------------------------------------------------------------------------------------


class Window(nn.Module):
    def __init__(self, of: Any) -> None:
        super().__init__()
        self.lin, self.of = nn.Linear(6, 6), of

    def forward(self, x: Tensor) -> Tensor:
        return (self.of(self.lin(x)) ** 2).sum()


@pytest.mark.parametrize(
    "of",
    [
        lambda y: y.t().as_strided((3, 2), (2, 1)),  # of a transposed value: strides in its memory, not in its order
        lambda y: y.t().as_strided((3, 2), (6, 1), 1),
        lambda y: y[1:].as_strided((2, 3), (6, 2), 7),  # offsets count from the start of the memory
        lambda y: y.as_strided((4, 3), (6, 2)),
        lambda y: y.as_strided((6, 4), (1, 6)),  # all of it
        lambda y: y.t().as_strided((2, 1, 4, 3), (12, 7, 1, 4)),
        lambda y: torch.zeros(24).as_strided_scatter(y, (4, 6), (1, 4)),
        lambda y: torch.zeros(6, 4).t().as_strided_scatter(y, (4, 6), (6, 1)) * y,
    ],
)
def test_a_window_shows_what_it_shows_in_eager(of: Any) -> None:
    same_as_eager(Window(of), images(4, 6, last=False))


def test_a_window_beyond_its_tensor_is_refused() -> None:
    ours = autopar.compile(Window(lambda y: y[1:2].as_strided((3, 6), (6, 1), 6)), backend="aot_eager")
    with pytest.raises(CaptureError, match="as_strided"):
        ours(images(4, 6, last=False))


# ---- redistribution ----------------------------------------------------------------------------------------------


def test_a_step_of_a_permuted_tensor() -> None:
    mesh = Mesh.of({"a": 2, "b": 2})
    src = Placement.of((4, 8, 6, 2), {"a": (0, 2), "b": (2, 3)})
    dst = Placement.of((4, 8, 6, 2), {"a": (1, 4)})
    for step in redistribute(src, dst, mesh):
        there = step.permuted((0, 2, 3, 1))
        assert there.src.shape == (4, 6, 2, 8) and there.permuted((0, 3, 1, 2)) == step
        assert there.wire_bytes(mesh, 4) == step.wire_bytes(mesh, 4)


class PoolBack(nn.Module):
    """Kernels that Inductor calls as they are, and that trust their operands' strides."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.bag = nn.Conv3d(4, 4, 1), nn.EmbeddingBag(12, 4, mode="max")

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = F.adaptive_max_pool3d(self.c(x).to(memory_format=torch.channels_last_3d), 2)
        return (y.to(memory_format=torch.channels_last_3d) ** 2).sum() + (self.bag(ids.t()) ** 2).sum()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_kernels_that_trust_strides(backend: str) -> None:
    x = torch.randn(2, 4, 4, 6, 4, generator=torch.Generator().manual_seed(0)).contiguous(memory_format=torch.channels_last_3d)
    ids = torch.randint(0, 12, (5, 3), generator=torch.Generator().manual_seed(1))
    same_as_eager(PoolBack(), x, ids, backend=backend)


def test_an_operator_of_another_library_gets_what_it_got_in_eager() -> None:
    @torch.library.custom_op("test_formats::rows", mutates_args=())
    def rows(x: Tensor) -> Tensor:
        """Trusts that x lies as a transposed matrix."""
        assert x.stride() == (1, x.shape[0]), x.stride()
        return x.clone()

    rows.register_fake(lambda x: x.clone())
    rows.register_autograd(lambda ctx, grad: grad)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return (torch.ops.test_formats.rows(self.lin(x).t()) ** 2).sum()

    same_as_eager(Model(), images(4, 6, last=False))


def test_dims_of_one_element_have_their_strides() -> None:
    """A rank's single input channel of a channels last weight lies both ways; a convolution goes by its strides, and compiled code expects those that were traced."""
    x, weight = torch.randn(4, 1, 8, 8), torch.randn(16, 4, 3, 3).to(memory_format=torch.channels_last)
    shard = weight[:, :1].clone(memory_format=torch.contiguous_format)
    traced = (9, 1, 3, 1)
    given = with_strides(shard, traced)
    assert shard.stride() != traced and given.stride() == traced and given.data_ptr() == shard.data_ptr()
    made = torch.nn.functional.conv2d(x, given, padding=1)
    assert made.is_contiguous(memory_format=torch.channels_last) and not made.is_contiguous()
    assert not torch.nn.functional.conv2d(x, shard, padding=1).is_contiguous(memory_format=torch.channels_last)
