"""Every model of the zoo trains a step under Inductor on one process: loss and gradients equal eager's, its random numbers replaced by ours."""

from __future__ import annotations

import copy

import pytest
import torch

import autopar
from autopar.kernels.random import EagerRandom
from tests.models import ZOO

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.mark.wide
@pytest.mark.parametrize("name", ZOO)
def test_a_step_under_inductor(name: str) -> None:
    torch.manual_seed(0)
    zoo = ZOO[name]
    one = zoo.build(1 if name != "gemma3" else 3).train()
    inputs = zoo.inputs(4, 16)
    ours = autopar.compile(copy.deepcopy(one), backend="inductor", **zoo.compile)
    torch.manual_seed(3)
    got = ours(**inputs)
    got = got if isinstance(got, torch.Tensor) else got.loss
    got.backward()
    loss_fn = zoo.compile.get("loss_fn")
    with EagerRandom(3, 0):
        if loss_fn is None:
            want = one(**inputs).loss
        else:
            target = inputs.pop("target")
            want = loss_fn(one(**inputs), target)
    want.backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    total = sum(float(p.grad.norm()) ** 2 for p in one.parameters() if p.grad is not None) ** 0.5
    for (n, p), q in zip(one.named_parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), n
        if p.grad is not None:
            error = float((q.grad.full_tensor() - p.grad).norm())
            assert error <= 2e-5 * float(p.grad.norm()) + 1e-6 * total, f"{n}: {error}"


def test_pooling_first_in_a_process() -> None:
    """torch's Inductor is imported before anything is lowered: a convnet's max_pool2d asks for it while it is decomposed."""
    import subprocess
    import sys

    code = (
        "import torch, torch.nn.functional as F, autopar\n"
        "class Pool(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__(); self.c = torch.nn.Conv2d(2, 2, 1)\n"
        "    def forward(self, x):\n        return F.max_pool2d(self.c(x), 2).sum()\n"
        "m = autopar.compile(Pool())\n"
        "m(torch.randn(1, 2, 4, 4)).backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert not done.returncode, done.stderr
