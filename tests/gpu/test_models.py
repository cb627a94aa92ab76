"""One GPU, float32: loss and every gradient of small models of many kinds equal eager's on that GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import autopar
from tests.eager import whole
from tests.gpu.where import DEVICE, gradients, here, mesh, only_here, worst
from tests.images import IMAGES, batch_of, model_of
from tests.models import ZOO, without_dropout

pytestmark = only_here
__all__ = ["mesh"]

NAMES = ("gpt2-attention", "llama", "qwen3", "gemma3", "bert-attention", "t5-attention", "vit", "mixtral", "convnet", "toy")
BY_HAND = ("convnext", "efficientnet", "resnet", "unet")  # the others are diffusers'
BACKENDS = ("aot_eager", "inductor")
RTOL = 2e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_language_and_others(mesh: DeviceMesh, name: str, backend: str) -> None:
    zoo, torch_loss = ZOO[name], ZOO[name].compile.get("loss_fn")
    torch.manual_seed(0)
    one = without_dropout(zoo.build(2).train()).to(DEVICE)
    inputs = here(zoo.inputs(4, 32))
    model = autopar.compile(copy.deepcopy(one), mesh, layout="fsdp", backend=backend, **zoo.compile)
    loss = model(**inputs)
    if torch_loss is None:
        loss, want = loss.loss, one(**inputs).loss
    else:
        want = torch_loss(one(inputs["x"]), inputs["target"])
    loss.backward()
    want.backward()
    torch.testing.assert_close(whole(loss), want, rtol=RTOL, atol=RTOL)
    found = worst(gradients(model), gradients(one))
    assert found[0] <= 2e-3, found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", IMAGES)
def test_images(mesh: DeviceMesh, name: str, last: bool, backend: str) -> None:
    if name not in BY_HAND:
        pytest.importorskip("diffusers")
    one = model_of(name, last).to(DEVICE)
    model = autopar.compile(copy.deepcopy(one), mesh, layout="fsdp", backend=backend)
    for seed in range(2):
        inputs = here(batch_of(name, 4, last, seed=seed))
        loss, want = model(**inputs), one(**inputs)
        loss.backward()
        want.backward()
        torch.testing.assert_close(whole(loss), want, rtol=RTOL, atol=RTOL)
    found = worst(gradients(model), gradients(one))
    assert found[0] <= 5e-3, found
    for (n, b), (_, c) in zip(model.named_buffers(), one.named_buffers(), strict=True):
        torch.testing.assert_close(whole(b), c, rtol=1e-3, atol=1e-5, msg=lambda m, n=n: f"{n}: {m}")
