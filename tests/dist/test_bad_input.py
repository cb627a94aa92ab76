"""What cannot be met at run time says so on every rank, and nobody waits for the others: meshes mixed, batches of other sizes, eager methods that part, hooks that do not fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import autopar
from tests.dist.habits.common import Classes, features, ids, labels, parameters, seeded
from tests.dist.habits.models import _llama
from tests.dist.launch import run

KW: dict[str, Any] = {"backend": "aot_eager"}


def _refused(says: str, doing: Callable[[], object]) -> None:
    with pytest.raises(autopar.AutoparError, match=says) as e:
        doing()
    assert e.value.fix


def _two_meshes() -> None:
    a = autopar.compile(seeded(Classes), {"dp": 2, "tp": 2}, layout="fsdp+tp", **KW)
    b = autopar.compile(seeded(Classes, seed=2), {"dp": 4}, layout="fsdp", **KW)
    models = seeded(Classes), seeded(Classes, seed=2)
    loss, want = (F.mse_loss(m(features(0)), n(features(0))) for m, n in ((a, b), models))
    assert float(loss) == pytest.approx(float(want), rel=1e-5)  # outputs are ordinary tensors
    loss.backward()
    want.backward()
    for m, n in zip((a, b), models, strict=True):
        for p, q in zip(m.parameters(), n.parameters(), strict=True):
            assert torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-7)
    _refused("aten.add.Tensor of parameters, gradients or state of models on two different meshes", lambda: a.a.weight + b.a.weight)
    _refused("two different meshes", lambda: torch.nn.utils.clip_grad_norm_([*a.parameters(), *b.parameters()], 1.0))
    # Weights, though, go from one to the other, and into its calls.
    x = b.a.weight.detach()[:8, :16]
    assert torch.allclose(a(x), models[0](models[1].a.weight[:8, :16]), rtol=1e-4, atol=1e-6)
    a.load_state_dict(b.state_dict())
    for n, p in parameters(a).items():
        assert torch.equal(p.full_tensor(), parameters(models[1])[n]), n


def _batches_and_hooks() -> None:
    rank = dist.get_rank()
    for layout in ("fsdp", None):  # fewer samples than ranks: some, or all, compute what others do
        model = autopar.compile(seeded(Classes), (2,), layout=layout, options={"seconds": 3}, **KW)
        plain = seeded(Classes)
        for m in (model, plain):
            F.cross_entropy(m(features(0, batch=1)), labels(0, batch=1)).backward()
        assert torch.allclose(model.a.weight.grad.full_tensor(), plain.a.weight.grad, rtol=1e-4, atol=1e-7)
    model = autopar.compile(seeded(Classes), (2,), layout="fsdp", inputs="local", **KW)
    _refused(r"local batches of other sizes: \[2, 16\] and \[0, 16\]", lambda: model(features(0, batch=2 * (1 - rank))))
    model(features(0, batch=4))

    def two(module: Any, args: Any) -> None: ...

    def three(module: Any, args: Any, kwargs: Any) -> None: ...

    inner = seeded(Classes)
    handle = inner.a.register_forward_hook(two)
    model = autopar.compile(inner, (2,), layout="fsdp", **KW)
    _refused(r"(?s)forward hook .*two takes .*is called with \(module, args, output\).*module 'a'", lambda: model(features(0)))
    handle.remove()
    handle = model.b.register_forward_pre_hook(three)
    _refused(r"(?s)forward pre-hook .*three takes .*module 'b'.*with_kwargs=True", lambda: model(features(0)))
    handle.remove()
    handle = model.register_forward_hook(two)
    _refused("is called with", lambda: model(features(0)))
    handle.remove()
    model.b.register_forward_pre_hook(three, with_kwargs=True)
    model(features(0))


class Walks(torch.nn.Module):
    """A method that goes on for as long as its input says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x))
        return y

    def walk(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = self.a(x)
        if steps == 4:
            raise KeyError("four")
        return x


def _eager_methods() -> None:
    """A plan that splits the batch alone generates as any does: parameters are gathered."""
    rank = dist.get_rank()
    for layout in ("ddp", "fsdp"):
        model = autopar.compile(seeded(_llama), (2,), layout=layout, inputs="local", **KW)
        model(input_ids=ids(rank), labels=ids(rank)).loss.backward()
        for n in (3, 3 + 2 * rank):  # ranks whose samples end at different times
            got = model.generate(ids(rank, batch=2, length=4 + rank), max_new_tokens=n, do_sample=False, pad_token_id=0)
            want = seeded(_llama).generate(ids(rank, batch=2, length=4 + rank), max_new_tokens=n, do_sample=False, pad_token_id=0)
            assert torch.equal(got, want)
    walks = autopar.compile(seeded(Walks), (2,), layout="fsdp", **KW)
    x = torch.ones(2, 8)
    _refused(r"(?s)walk does different things on different ranks: rank 0 has returned, rank 1 calls a", lambda: walks.walk(x, 1 + rank))
    with pytest.raises(KeyError) if rank == 0 else contextlib.nullcontext():
        if rank == 0:
            walks.walk(x, 4)
        else:
            _refused("rank 0 has failed, rank 1 calls a", lambda: walks.walk(x, 5))
    assert torch.allclose(walks.walk(x, 3), seeded(Walks).walk(x, 3), atol=1e-6)


def test_two_meshes() -> None:
    run(_two_meshes, 4, timeout=150)


def test_batches_and_hooks() -> None:
    run(_batches_and_hooks, 2, timeout=150)


def test_eager_methods() -> None:
    run(_eager_methods, 2, timeout=150, patience_s=60)
