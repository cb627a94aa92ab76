"""What a compiled step cannot keep of the model's Python is refused by name when it is captured, never dropped."""

from __future__ import annotations

import collections
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.modules import module as modules

import autopar
from autopar.errors import CaptureError, InputError
from tests.eager import Net, compiled, seeded

pytestmark = pytest.mark.usefixtures("one_process")

SEEN: list[Any] = []
CALLS = 0
TENSOR = torch.ones(4)
NAMED = {"n": 0}


def remember(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    SEEN.append(output)


class CountingHook:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.calls += 1


class Holder:
    def __init__(self) -> None:
        self.n = 0


class Between(Net):
    """`do` is what is between the two products."""

    def __init__(self, do: Callable[[Any, torch.Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.do = do
        self.register_buffer("ema", torch.zeros(4))
        for name, value in attributes.items():
            setattr(self, name, value)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        out = self.do(self, x)
        return x if out is None else out


def count(m: Any, x: torch.Tensor) -> None:
    m.calls += 1


def cache(m: Any, x: torch.Tensor) -> torch.Tensor:
    if m.cache is None:
        m.cache = x.detach().mean(0)
    return x + m.cache


def new_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(m, "late"):
        m.register_buffer("late", torch.ones(4))
    return x + m.late


def count_globally(m: Any, x: torch.Tensor) -> None:
    global CALLS
    CALLS += 1


def keep_globally(m: Any, x: torch.Tensor) -> None:
    SEEN.append(x)


def name_globally(m: Any, x: torch.Tensor) -> None:
    NAMED["n"] += 1


def count_in(m: Any, x: torch.Tensor) -> None:
    m.holder.n += 1


def hooks_an_input(m: Any, x: torch.Tensor) -> None:
    m.a.weight.register_hook(lambda g: g * 2)


def keeps_a_gradient(m: Any, x: torch.Tensor) -> None:
    x.register_hook(lambda g: SEEN.append(g))


def in_place(m: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        m.a.weight.mul_(0.5)


def enters(m: Any, x: torch.Tensor) -> None:
    TransformGetItemToIndex().__enter__()


class Overlapping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(4))
        self.part = self.ema[:2]

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.ema.add_(1)
        return x * self.part.sum()


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        SEEN.append(1)
        return g


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "counter": (lambda: Between(count, calls=0), r"sets attribute 'calls' of module 'Between'.*\n.*in count"),
    "cache": (lambda: Between(cache, cache=None), r"sets attribute 'cache' of module 'Between'"),
    "activation": (lambda: Between(lambda m, x: setattr(m, "last", x)), r"sets attribute 'last' of module 'Between'"),
    "list": (lambda: Between(lambda m, x: m.log.append(x), log=[]), r"changes log of module 'Between'"),
    "dict": (lambda: Between(lambda m, x: m.log.update(n=x), log={}), r"changes log of module 'Between'"),
    "set": (lambda: Between(lambda m, x: m.log.add(1), log=set()), r"changes log of module 'Between'"),
    "Counter": (lambda: Between(lambda m, x: m.log.update("x"), log=collections.Counter()), r"changes log|sets log|cannot be captured"),
    "object": (lambda: Between(count_in, holder=Holder()), r"sets holder.n of module 'Between'"),
    "global": (lambda: Between(count_globally), r"the global variable 'CALLS' of \S*test_python_refused"),
    "global list": (lambda: Between(keep_globally), r"the global variable 'SEEN' of \S*test_python_refused"),
    "global dict": (lambda: Between(name_globally), r"the global variable 'NAMED' of \S*test_python_refused"),
    "buffer made in forward": (lambda: Between(new_buffer), r"makes, removes or reshapes buffer 'late' of module 'Between'.*\n.*\n.*register it in __init__"),
    "buffer reshaped": (lambda: Between(lambda m, x: setattr(m, "ema", x.detach())), r"reshapes buffer 'ema' of module 'Between'"),
    "buffer removed": (lambda: Between(lambda m, x: setattr(m, "ema", None)), r"reshapes buffer 'ema' of module 'Between'"),
    "hook on a parameter in forward": (lambda: Between(hooks_an_input), r"register_hook\(.*<lambda>\) on a tensor that it did not make"),
    "hook on an activation": (lambda: Between(keeps_a_gradient), r"cannot be captured.*\n.*SEEN.append\(g\)"),
    "buffers that overlap": (Overlapping, r"changes 'ema', which shares memory with 'part'"),
    "parameter in place": (lambda: Between(in_place), r"changes parameter 'a.weight' in place"),
    "function": (lambda: Between(lambda m, x: Counts.apply(x)), r"cannot be captured.*\n.*SEEN.append\(1\)"),
    "global tensor": (lambda: Between(lambda m, x: x * TENSOR), r"the global variable 'TENSOR' of \S*test_python_refused"),
    "tensor in a list": (lambda: Between(lambda m, x: x * m.ks[0], ks=[torch.ones(4)]), r"neither parameter, buffer nor attribute.*'ks\[0\]'"),
    "array": (lambda: Between(lambda m, x: x * torch.from_numpy(m.k), k=np.ones(4, np.float32)), r"numpy array"),
    "trained attribute": (lambda: Between(lambda m, x: x * m.k, k=torch.ones(4).requires_grad_()), r"'k' of module 'Between' requires a gradient"),
    "random": (lambda: Between(lambda m, x: x * random.random()), r"cannot be captured.*random"),
    "randint": (lambda: Between(lambda m, x: x * random.randint(0, 9)), r"cannot be captured.*`random`"),
    "numpy random": (lambda: Between(lambda m, x: x * torch.from_numpy(np.random.rand(4))), r"numpy.random.rand in forward"),
    "time": (lambda: Between(lambda m, x: x * time.time()), r"cannot be captured.*time.time"),
    "mode that stays": (lambda: Between(enters), r"cannot be captured"),
    "print": (lambda: Between(lambda m, x: print("here")), r"cannot be captured.*print"),
    "lock": (lambda: Between(lambda m, x: x, lock=threading.Lock()), r"attribute 'lock' of module 'Between' cannot be copied"),
}  # fmt: skip


@pytest.mark.parametrize("which", CASES)
def test_forward(which: str) -> None:
    build, said = CASES[which]
    model = compiled(seeded(build))
    with pytest.raises(CaptureError, match=said) as e:
        model(torch.ones(6, 4))
    assert e.value.fix


def test_hooks_with_side_effects_are_named() -> None:
    for register, hook, said in (
        ("register_forward_hook", remember, "the forward hook remember of module 'a' changes the global variable 'SEEN'"),
        ("register_forward_pre_hook", CountingHook(), "the forward pre-hook CountingHook of module 'a'"),
    ):
        model = seeded(Net)
        getattr(model.a, register)(hook)
        with pytest.raises(CaptureError, match=said):
            compiled(model)(torch.ones(6, 4))


def test_input_in_place() -> None:
    class Adds(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return super().forward(x.add_(y))

    x = torch.zeros(6, 4)
    with pytest.raises(CaptureError, match=r"changes its input \[0\] in place"):
        compiled(seeded(Adds))(x, torch.ones(6, 4))
    assert x.sum() == 0


@pytest.mark.parametrize(
    "write", [lambda x: x.__setitem__(0, 0.2), torch.relu_, lambda x: torch.add(x, 1, out=x), lambda x: torch.nn.functional.relu(x, True)]
)
def test_writes_to_a_view_or_a_copy(write: Callable[[torch.Tensor], Any]) -> None:
    """Flatten of a contiguous tensor's transpose is a copy, which may be written to; of a transposed one's it is a view of the input."""

    class Writes(Net):
        def forward(self, x: torch.Tensor) -> Any:
            turned = x.permute(1, 0)
            write(turned.flatten())
            return super().forward(turned.t()[:, :4])

    model, x = seeded(Writes), torch.randn(6, 4)
    ours = compiled(seeded(Writes))
    assert torch.allclose(ours(x), model(x))
    with pytest.raises(InputError, match=r"input \[0\], or a copy, by how that lies in memory: with strides \(1, 6\)"):
        ours(torch.randn(4, 6).t())


def test_writes_where_elements_overlap() -> None:
    class Writes(Net):
        def forward(self, x: torch.Tensor) -> Any:
            y = (x * 2).unfold(0, 2, 1)
            y.add_(y)
            return super().forward(y[..., 0])

    with pytest.raises(CaptureError, match="internal overlap"):
        compiled(seeded(Writes))(torch.randn(6, 4))


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("where", ["a", ""])
@pytest.mark.parametrize("after", [False, True])
def test_backward_hooks_of_modules(register: str, where: str, after: bool) -> None:
    def hook(module: nn.Module, *grads: Any) -> None:
        SEEN.append(module)

    net = seeded(Net)
    if not after:
        getattr(net.get_submodule(where), register)(hook)
    model = compiled(net)
    if after:
        model(torch.ones(6, 4))
        getattr(model.get_submodule(where), register)(hook)
    with pytest.raises(autopar.AutoparError, match=r"module backward hooks cannot run .*<locals>.hook"):
        model(torch.ones(6, 4))


@pytest.mark.parametrize(
    "register", ["register_module_forward_hook", "register_module_forward_pre_hook", "register_module_full_backward_hook"]
)
@pytest.mark.parametrize("after", [False, True])
def test_hooks_on_all_modules(register: str, after: bool) -> None:
    def hook(module: nn.Module, *args: Any) -> None: ...

    model = compiled(seeded(Net))
    if after:
        model(torch.ones(6, 4))
    handle = getattr(modules, register)(hook)
    try:
        with pytest.raises(autopar.AutoparError, match=f"<locals>.hook is a hook on all modules(.|\n)*{register}"):
            model(torch.ones(6, 4))
    finally:
        handle.remove()


def test_gradients_of_gradients() -> None:
    model = compiled(seeded(Net))
    x = torch.randn(6, 4).requires_grad_()
    for of in ([x], list(model.parameters())):
        grads = torch.autograd.grad(model(x), of, create_graph=True)
        penalty = sum((g.full_tensor() if hasattr(g, "full_tensor") else g).pow(2).sum() for g in grads)
        with pytest.raises(autopar.AutoparError, match=r"a gradient of gradients through a compiled step \(create_graph=True\)"):
            penalty.backward()


def test_parameters_that_come_after_compile() -> None:
    model = compiled(seeded(Net))
    model(torch.ones(6, 4))
    model.b = nn.Linear(4, 4)
    with pytest.raises(autopar.AutoparError, match=r"parameter 'b.weight' came to the model after autopar.compile"):
        model(torch.ones(6, 4))
