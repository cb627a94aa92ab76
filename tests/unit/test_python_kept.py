"""What a compiled step keeps of the model's Python, against plain PyTorch: hooks, buffers, attributes, what changes between steps."""

from __future__ import annotations

import logging
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.utils import parametrizations as P
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from tests.eager import Act, Net, assert_trains_alike, compiled, seeded, trained, whole

pytestmark = pytest.mark.usefixtures("one_process")


def with_hook(register: str, hook: Any, where: str = "a", **kw: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Net()
        getattr(model.get_submodule(where), register)(hook, **kw)
        return model

    return build


def double_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def double_input(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2,)


def double_gradient(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(2)


HOOKS = {
    "forward": with_hook("register_forward_hook", double_output),
    "pre": with_hook("register_forward_pre_hook", double_input),
    "keywords": with_hook("register_forward_hook", lambda m, args, kwargs, out: out * 2, with_kwargs=True, always_call=True, prepend=True),
    "root": with_hook("register_forward_hook", double_output, ""),
    "root pre": with_hook("register_forward_pre_hook", double_input, ""),
}


@pytest.mark.parametrize("which", ["forward", "pre", "keywords", "root", "root pre"])
def test_forward_hooks(which: str) -> None:
    assert_trains_alike(HOOKS[which])
    assert trained(seeded(HOOKS[which])) != trained(seeded(Net))


def on_weight(register: str, hook: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Net()
        getattr(model.a.weight, register)(hook)
        return model

    return build


@pytest.mark.parametrize(
    ("register", "hook"),
    [("register_hook", lambda g: g * 2), ("register_post_accumulate_grad_hook", double_gradient)],
    ids=["hook", "post"],
)
def test_hooks_on_parameters(register: str, hook: Any) -> None:
    """Parameters become DTensors at `compile`: hooks from before it were lost."""
    assert_trains_alike(on_weight(register, hook))
    assert_trains_alike(Net, lambda m, i: getattr(m.a.weight, register)(hook))
    assert trained(seeded(on_weight(register, hook))) != trained(seeded(Net))


def test_hooks_are_not_called_without_a_gradient() -> None:
    """Of calls whose gradients wait, and of parameters that a call does not use."""
    model: Any = compiled(seeded(Net))
    x = torch.ones(4, 4)
    called: list[bool] = []
    model.a.weight.register_hook(lambda g: called.append(g is not None))
    handle = model.a.weight.register_post_accumulate_grad_hook(lambda p: called.append(p.grad is not None))
    with model.no_sync():
        model(x).sum().backward()
    assert not called
    model(x).sum().backward()
    assert called == [True, True]
    handle.remove()
    model(x).sum().backward()
    assert called == [True, True, True]


def test_handles_of_hooks_from_before_still_remove_them() -> None:
    def build() -> nn.Module:
        model = Net()
        model.handle = model.a.weight.register_hook(lambda g: g * 2)
        return model

    assert_trains_alike(build, lambda m, i: m.handle.remove() if i == 1 else None)


class OnActivation(Net):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda g: g * 2)
        return x


class InPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(4))
        self.register_buffer("n", torch.tensor(0))
        self.loose = torch.zeros(4)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.ema.mul_(0.9).add_(x.detach().mean(0))
        self.n += 1
        self.loose.add_(1)
        return x + self.ema * self.n + self.loose


class SetAnew(InPlace):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.ema = 0.9 * self.ema + x.mean(0)
            self.n = self.n + 1
        return x + self.ema * self.n


class SetAnewOfAnotherKind(SetAnew):
    """Buffers that `state_dict` leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(4), persistent=False)


class Aliased(InPlace):
    """A buffer under a second name, and a hook that is a method."""

    def __init__(self) -> None:
        super().__init__()
        self.same = self.ema
        self.a.register_forward_hook(self.hook)

    def hook(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * self.b.bias

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.ema.add_(1)
        return x * self.same


class Temporary(Net):
    flag = False

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.flag = True
        y = x * 2 if self.flag else x
        self.flag = False
        return y


class Once(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = True

    def between(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            self.first = False
            x = x * 3
        return x


class Function(torch.autograd.Function):
    """Its gradient is not the derivative, and one of its results has none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.save_for_backward(x)
        second = x * 5
        ctx.mark_non_differentiable(second)
        return x * 2, second

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * 3 + x


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 3


class Functions(Net):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        a, b = Function.apply(x)
        y = x * 1
        return a + b + Dirty.apply(y) + y


class Blocks(Net):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
        return x * y + x.detach()


@pytest.mark.parametrize(
    ("build", "left"),
    [
        (OnActivation, None), (InPlace, lambda m: m.ema), (InPlace, lambda m: m.loose), (SetAnew, lambda m: m.ema), (SetAnew, lambda m: m.n),
        (SetAnewOfAnotherKind, lambda m: m.ema),
        (Aliased, lambda m: m.same), (Temporary, lambda m: m.flag), (Once, lambda m: m.first), (Functions, None), (Blocks, None),
    ],
)  # fmt: skip
def test_forward(build: Callable[[], nn.Module], left: Callable[[Any], Any] | None) -> None:
    assert_trains_alike(build, left=left or (lambda m: None))


def test_buffers_change_in_evaluation() -> None:
    one, ours = seeded(SetAnew).eval(), seeded(SetAnew).eval()
    model = compiled(ours)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(whole(model(torch.ones(6, 4))), one(torch.ones(6, 4)))
    torch.testing.assert_close(model.ema, one.ema)


def changed(change: Callable[[Net], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Net()
        change(model)
        return model

    return build


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda m: P.weight_norm(m.a), None),
        (lambda m: P.spectral_norm(m.a), lambda m: m.a.parametrizations.weight[0]._u),
        (lambda m: P.orthogonal(m.a), None),
        (lambda m: nn.utils.weight_norm(m.a), None),
        (lambda m: nn.utils.spectral_norm(m.a), lambda m: m.a.weight_u),
        (lambda m: prune.l1_unstructured(m.a, "weight", 0.5), None),
    ],
    ids=["weight_norm", "spectral_norm", "orthogonal", "old weight_norm", "old spectral_norm", "prune"],
)
def test_parametrizations(change: Callable[[Net], Any], left: Callable[[Any], Any] | None) -> None:
    assert_trains_alike(changed(change), left=left or (lambda m: None))


# ---- changed between steps ---------------------------------------------------------------------------------------

FACTOR = 1.0


class Thing:
    factor = 1.0


class Reads(Net):
    """Looks at everything that a test changes."""

    per_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.flag, self.listed, self.by_name, self.thing = False, [1.0], {"factor": 1.0}, Thing()
        self.act: nn.Module = nn.Tanh()
        self.norm = nn.BatchNorm1d(4)
        self.loose = torch.ones(4)
        self.register_buffer("scale", torch.ones(4))
        self.sub = nn.Identity()
        self.deep = nn.Sequential(nn.Identity())

    def between(self, x: torch.Tensor) -> torch.Tensor:
        if self.flag:
            x = x * 3
        if getattr(self.deep[0], "flag", False):
            x = x * 1.5
        for f in self.listed:
            x = x * f
        for f in self.by_name.values():
            x = x * f
        x = self.norm(self.act(self.sub(x))) * self.loose * self.scale
        return x * self.thing.factor * self.per_class * FACTOR


def replace_global(m: Any, i: int) -> None:
    global FACTOR
    FACTOR = 1.0 + i


def several(m: Any, i: int) -> None:
    """One of what is quickly noted, and one of what is not."""
    m.flag = i == 1
    m.deep[0].more = [i]


CHANGES: dict[str, Act] = {
    "several": several,
    "attribute": lambda m, i: setattr(m, "flag", i == 1),
    "attribute of a part that had none": lambda m, i: setattr(m.deep[0], "flag", i == 1),
    "list": lambda m, i: m.listed.append(2.0),
    "dict": lambda m, i: m.by_name.update({str(i): 2.0}),
    "object": lambda m, i: setattr(m.thing, "factor", 1.0 + i),
    "class": lambda m, i: setattr(Reads, "per_class", 1.0 + i),
    "global variable": replace_global,
    "module": lambda m, i: setattr(m, "act", nn.Sigmoid()) if i == 1 else None,
    "forward": lambda m, i: setattr(m.sub, "forward", types.MethodType(lambda self, x: x * 4, m.sub)) if i == 1 else None,
    "norm frozen": lambda m, i: m.norm.train(i != 1),
    "trained": lambda m, i: m.a.requires_grad_(i != 1),
    "trained later": lambda m, i: m.a.requires_grad_(i > 0),
    "hook": lambda m, i: m.a.register_forward_hook(double_output) if i == 1 else None,
    "hook on the whole": lambda m, i: m.register_forward_hook(double_output) if i == 1 else None,
    "buffer in place": lambda m, i: m.scale.fill_(1.0 + i),
    "buffer replaced": lambda m, i: setattr(m, "scale", torch.full((4,), 1.0 + i)),
    "tensor attribute in place": lambda m, i: m.loose.fill_(1.0 + i),
    "tensor attribute replaced": lambda m, i: setattr(m, "loose", torch.full((4,), 1.0 + i)),
}


@pytest.mark.parametrize("which", CHANGES)
def test_changed_between_steps(which: str) -> None:
    try:
        assert_trains_alike(Reads, CHANGES[which], left=lambda m: m.norm.running_mean)
        if which != "trained later":
            assert trained(seeded(Reads), CHANGES[which]) != trained(seeded(Reads))
    finally:
        Reads.per_class = 1.0
        replace_global(None, 0)


def test_variable_of_an_enclosing_function() -> None:
    factor, factors = 1.0, [1.0]

    class Enclosed(Net):
        def between(self, x: torch.Tensor) -> torch.Tensor:
            return x * factor * factors[0]

    def act(m: Any, i: int) -> None:
        nonlocal factor
        factor = 1.0 + i
        factors[0] = 2.0 - i / 2

    assert_trains_alike(Enclosed, act)


def test_loss_function() -> None:
    class Loss(nn.Module):
        factor = 1.0

        def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (out - target).square().mean() * self.factor

    loss, x = Loss(), torch.ones(6, 4)
    model = compiled(seeded(lambda: nn.Linear(4, 4)), loss_fn=loss)
    once = model(x, x)
    loss.factor = 3.0
    torch.testing.assert_close(whole(model(x, x)), 3 * whole(once))


def test_going_back_captures_nothing_anew_and_counters_of_a_loop_neither() -> None:
    model = compiled(seeded(Reads))
    x = torch.ones(6, 4)
    for i in range(4):
        model.flag = bool(i % 2)
        model.global_step = i
        model.a.note = i
        model.last_batch = torch.randn(i + 1)
        model(x)
    assert model.programs.captured == 2


def test_a_flag_that_forward_sets_and_that_changes_nothing_captures_nothing_anew() -> None:
    """As transformers' models set `config.problem_type`: a second capture would be without a plan."""

    class Settles(Net):
        kind: str | None = None

        def between(self, x: torch.Tensor) -> torch.Tensor:
            if self.kind is None:
                self.kind = "double"
            return x * 2 if self.kind == "double" else x

    model = compiled(seeded(Settles))
    for _ in range(3):
        model(torch.ones(6, 4))
    assert model.kind == "double" and model.programs.captured == 1


def test_captured_again_and_again_is_worth_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.runtime.module.OFTEN", 3)

    class Scheduled(Net):
        step = 0

        def between(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.step

    model = compiled(seeded(Scheduled))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(4):
            model.step = i
            model(torch.ones(6, 4))
    assert [str(w.message) for w in caught if "captured 3 times" in str(w.message)] == [
        "captured 3 times, since Python state that forward reads changes: step"
    ]


def test_a_logger_is_heard_at_capture(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("model")

    class Logs(Net):
        def between(self, x: torch.Tensor) -> torch.Tensor:
            log.warning("between %s", "products")
            return x

    model = compiled(seeded(Logs))
    for _ in range(2):
        model(torch.ones(6, 4))
    assert [r.getMessage() for r in caplog.records if r.name == "model"] == ["between products"]


# ---- outputs -----------------------------------------------------------------------------------------------------


class Shares(Net):
    """Outputs that are the input, a parameter, views of them, and views of each other."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.a(x)
        return {
            "x": x, "flat": x.view(-1), "weight": self.b.weight, "part": self.b.bias[:2], "h": h, "again": h, "turned": h.t(), "row": h[0],
            "detached": h.detach(), "loss": (h**2).mean(),
        }  # fmt: skip


def test_outputs_that_share_memory_have_their_gradients() -> None:
    """Of outputs that are views of one tensor AOTAutograd differentiates one."""
    one, model = seeded(Shares), compiled(seeded(Shares))
    x = torch.randn(6, 4).requires_grad_()
    y = x.detach().clone().requires_grad_()
    want, got = one(x), model(y)
    for i, (out, f) in enumerate(((want, lambda t: t), (got, whole))):
        for n, t in out.items():
            assert t.requires_grad == (n != "detached"), (i, n)
            torch.testing.assert_close(f(t).detach(), want[n].detach())
        sum((f(t) ** k).sum() for k, (n, t) in enumerate(out.items(), 2) if n != "detached").backward()
    torch.testing.assert_close(y.grad, x.grad)
    for p, q in zip(one.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(q.grad), p.grad)


def test_backward_twice_and_create_graph() -> None:
    one, model = seeded(Net), compiled(seeded(Net))
    x = torch.randn(6, 4)
    for m in (one, model):
        loss = whole(m(x))
        loss.backward(retain_graph=True)
        loss.backward(create_graph=True)
    for p, q in zip(one.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(q.grad).detach(), p.grad.detach())


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: self.norm(self.a(y)).square(), x, use_reentrant=False).sum()


def test_buffers_of_a_checkpointed_region_change_once_and_that_is_said() -> None:
    model = seeded(Checkpointed)
    plain = seeded(Checkpointed)
    x = torch.randn(8, 4)
    with pytest.warns(UserWarning, match=r"'norm.running_mean'.* eager changes them once more"):
        compiled(model)(x).backward()
    plain.norm(plain.a(x))
    torch.testing.assert_close(whole(model.norm.running_mean), plain.norm.running_mean)
    assert int(model.norm.num_batches_tracked) == 1


class Looked(Net):
    """Looks numbers up inside of vmap, as transformers' masks of prefixes do."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([0.5, 2.0, 1.0, 3.0])
        with TransformGetItemToIndex():
            found = torch.vmap(lambda i: table[(i + 1) % 4])(torch.arange(4))
        return x * found


def test_a_mode_that_forward_enters_and_leaves() -> None:
    assert_trains_alike(Looked)
    assert trained(seeded(Looked)) != trained(seeded(Net))
