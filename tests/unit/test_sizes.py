"""Sizes of inputs that vary, on one process: how many programs there are, for which sizes they hold, and that each is plain PyTorch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import autopar
from autopar.errors import InputError
from autopar.runtime import programs
from tests.models import ZOO
from tests.wide import cases

pytestmark = pytest.mark.usefixtures("one_process")


class Means(nn.Module):
    """Sizes as numbers: divisors, a last element, a batch norm's count."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.a(x.transpose(1, 2)).transpose(1, 2))
        return (y.cumsum(2) / x.shape[2]).square().sum() / (x.shape[0] * x.shape[2]) + y[:, :, -1].sum() + y.mean()


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.a = nn.Conv1d(4, 8, 3, stride=2, padding=1), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.conv(x).transpose(1, 2)).square().mean()


class Folded(nn.Module):
    """Pairs of neighbours: lengths are even."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, _, length = x.shape
        return self.a(x.transpose(1, 2).reshape(batch, length // 2, 2, 4).sum(2)).square().mean()


class Branches(nn.Module):
    """Another program above 20."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x.transpose(1, 2)).square().mean() * (2 if x.shape[2] > 20 else 1)


class Unrolled(nn.Module):
    """Another program at every length."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((self.a(x[:, :, i]).square().mean() for i in range(x.shape[2])), torch.zeros(()))


def batch(rows: int, length: int) -> dict[str, Any]:
    return {"x": torch.randn(rows, 4, length, generator=torch.Generator().manual_seed(length))}


Mark = Callable[[torch.Tensor], None]
LENGTHS = ((4, 12), (4, 16), (4, 30), (4, 22), (4, 14), (6, 18))


def trained(
    build: Callable[[], nn.Module], inputs: Callable[..., dict[str, Any]] = batch, sizes: Any = LENGTHS, mark: Mark | None = None, **kw: Any
) -> autopar.ParallelModule:
    """A compiled model, whose losses and gradients were eager's at every size."""
    torch.manual_seed(0)
    one = build()
    torch.manual_seed(0)
    model = autopar.compile(build(), {"dp": 1}, **{"backend": "aot_eager", "layout": "fsdp", **kw})
    for size in sizes:
        given = inputs(*size)
        if mark is not None:
            for t in given.values():
                mark(t)
        losses = []
        for m in (model, one):
            m.zero_grad()
            out = m(**given)
            loss = out if isinstance(out, torch.Tensor) else out["loss"]
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
        for (n, p), (_, q) in zip(model.named_parameters(), one.named_parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda m, n=n: f"{n}: {m}")
        for b, c in zip(model.buffers(), one.buffers(), strict=True):
            torch.testing.assert_close(b, c)
    return model


@pytest.mark.parametrize("build", cases((Means, Strided), (Means,)))
def test_one_program_for_all_lengths_and_one_for_all_batches(build: Callable[[], nn.Module]) -> None:
    found = trained(build).programs
    assert (found.captured, found.general, found.fixed) == (3, 2, 1)


def test_a_branch_on_the_length_is_another_program() -> None:
    found = trained(Branches, sizes=((4, 12), (4, 16), (4, 30), (4, 22), (4, 14), (4, 18), (4, 40))).programs
    assert found.captured <= 4 and found.general == 2 + (found.captured - 3)


def test_lengths_that_are_all_even_need_not_be_anything_else() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained(Folded, sizes=((4, 12), (4, 16), (4, 30), (4, 22))).programs
    assert found.general and found.captured <= 3


def test_programs_for_one_size_are_bounded_and_that_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "FIXED", 3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = trained(Unrolled, sizes=[(4, n) for n in (3, 4, 5, 6, 7, 8, 3)]).programs
    assert (found.fixed, found.released, found.general) == (3, 4, 0)
    assert sum("compiled once for all of them" in str(w.message) for w in told) == 1
    assert sum("buckets" in str(w.message) for w in told) == 1


def test_the_first_call_of_a_marked_dim_is_for_all_sizes() -> None:
    model = trained(Means, sizes=LENGTHS[:4], mark=lambda t: torch._dynamo.mark_dynamic(t, 2, max=64))
    assert model.programs.captured == model.programs.general == 1
    assert "dim 2 of 61 (sizes up to 64" in str(model.plan)
    model = trained(Means, sizes=LENGTHS[:4], mark=lambda t: torch._dynamo.maybe_mark_dynamic(t, 2))
    assert model.programs.captured == model.programs.general == 1


def test_a_size_that_the_plans_memory_may_not_hold_is_told_once() -> None:
    first = trained(Means, sizes=((4, 12),), layout=None)
    assert first.plan is not None
    memory = 1.5 * first.plan.predicted["peak_memory_bytes"]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trained(Means, sizes=((4, 12), (4, 16), (4, 900), (4, 16), (4, 900), (4, 800)), layout=None, memory=memory)
    said = [str(w.message) for w in seen if "what the plan was made for" in str(w.message)]
    assert len(said) == 1 and "75.0 times" in said[0] and "mark_dynamic" in said[0]


def test_static_sizes_have_a_program_each() -> None:
    for kw in ({"mark": lambda t: torch._dynamo.mark_static(t)}, {"dynamic": False}):
        found = trained(Means, sizes=LENGTHS[:3], **kw).programs
        assert (found.captured, found.general) == (3, 0)


def test_all_dims_are_dynamic_where_they_can_be() -> None:
    ids = ZOO["llama"]
    found = trained(lambda: ids.build(1), ids.inputs, ((4, 12), (2, 20), (6, 9)), dynamic=True).programs
    assert found.captured == found.general == 1
    with pytest.raises(autopar.AutoparError, match="neither None, True nor False"):
        autopar.compile(Means(), {"dp": 1}, dynamic="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", cases(("bert-attention", "llama", "t5-attention"), ("bert-attention",)))
def test_buckets_leave_loss_and_gradients_as_they_are(name: str) -> None:
    zoo = ZOO[name]

    def build() -> nn.Module:
        model = zoo.build(1)
        for m in model.modules():
            if isinstance(m, nn.Dropout):
                m.p = 0.0
        return model

    model = trained(build, zoo.inputs, ((2, 10), (2, 16), (2, 12), (2, 30)), buckets=(32, 16))
    assert model.programs.captured == 2  # of 16 and of 32; labels, half as long, are 16 in both
    out = model(**zoo.inputs(2, 10))
    assert out["logits"].shape[1] == (5 if name.startswith("t5") else 10)
    if name.startswith("t5"):
        assert out["encoder_last_hidden_state"].shape[1] == 10


def test_what_buckets_cannot_pad_is_refused() -> None:
    model = autopar.compile(ZOO["llama"].build(1), {"dp": 1}, layout="fsdp", backend="aot_eager", buckets=(16,))
    ids = torch.ones(2, 9, dtype=torch.int64)
    with pytest.raises(InputError, match="longer than the longest bucket"):
        model(input_ids=ids.repeat(1, 3))
    with pytest.raises(InputError, match="weights, of shape"):
        model(input_ids=ids, weights=torch.ones(2, 9))
    with pytest.raises(InputError, match="are no lengths"):
        autopar.compile(Means(), {"dp": 1}, buckets=(0,))
    with pytest.raises(autopar.AutoparError, match="loss_fn"):
        autopar.compile(Means(), {"dp": 1}, buckets=(8,), loss_fn=F.cross_entropy)


# ---- several documents in a row -------------------------------------------------------------------------------------


def documents(rows: int, length: int) -> dict[str, Any]:
    """Position ids that start anew in each row, at a place of its own."""
    g = torch.Generator().manual_seed(length)
    ids = torch.randint(4, 96, (rows, length), generator=g)
    at = torch.randint(1, length, (rows,), generator=g).tolist()
    return {
        "input_ids": ids,
        "position_ids": torch.stack([torch.cat([torch.arange(n), torch.arange(length - n)]) for n in at]),
        "labels": ids,
    }


class Packed(nn.Module):
    """flex: attention as the user has it, whose backward does not run on a CPU; else by formulas."""

    def __init__(self, flex: bool, slope: float = 0.0) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(96, 16), nn.Linear(16, 48), nn.Linear(16, 96)
        self.flex, self.slope = flex, slope

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        rows, length, _ = x.shape
        q, k, v = (t.view(rows, length, 4, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        doc = (position_ids == 0).cumsum(1)
        if self.flex:
            sees = lambda b, h, i, j: (i >= j) & (doc[b, i] == doc[b, j])  # noqa: E731
            near = lambda score, b, h, i, j: score - self.slope * (i - j) * (h + 1)  # noqa: E731
            y = flex_attention(q, k, v, near if self.slope else None, create_block_mask(sees, rows, None, length, length, device=x.device))
        else:
            at = torch.arange(length)
            hidden = (at[:, None] < at) | (doc[:, None, :, None] != doc[:, None, None, :])
            bias = -self.slope * (at[:, None] - at) * torch.arange(1, 5)[:, None, None]
            y = (q @ k.mT / 2 + bias).masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return F.cross_entropy(self.out(y.transpose(1, 2).flatten(2)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("slope", cases((0.0, 0.1), (0.0,)))
def test_flex_attention_is_attention_with_a_mask(slope: float) -> None:
    build = iter([Packed(False, slope), Packed(True, slope)])
    first: dict[str, torch.Tensor] = {}

    def same() -> nn.Module:
        model = next(build)
        first.update(first or model.state_dict())
        model.load_state_dict(first)
        return model

    model = trained(same, documents, ((4, 12), (4, 20), (4, 9)))
    assert (model.programs.captured, model.programs.general) == (2, 1)
    assert ("autopar.attention_v2.default" in model.plan.targets.values()) == (slope == 0.0)
    with torch.no_grad():  # as the user's own code runs it
        given = documents(2, 12)
        eager = Packed(True, slope)
        eager.load_state_dict(first)
        torch.testing.assert_close(model(**given), eager(**given))
