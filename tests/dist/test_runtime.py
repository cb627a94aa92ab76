"""The contract with the user, on gloo processes against one-device eager: accumulation, local inputs, precision, outputs, hooks, errors."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import autopar
from autopar.kernels.random import EagerRandom
from tests.dist.launch import run
from tests.models import ZOO
from tests.wide import cases

BATCH, SEQ = 8, 16
MODELS = ("toy", "llama")


def _mesh(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])


def _model(name: str = "toy") -> nn.Module:
    torch.manual_seed(0)
    return ZOO[name].build().train()


def _compiled(mesh: Any, model: nn.Module | None = None, **kw: Any) -> autopar.ParallelModule:
    return autopar.compile(model or _model(), mesh, **{"backend": "aot_eager", "layout": "fsdp", **kw})


def _part(batch: dict[str, torch.Tensor], i: int, n: int) -> dict[str, torch.Tensor]:
    return {k: v[i * len(v) // n : (i + 1) * len(v) // n] for k, v in batch.items()}


def _assert_gradients(ours: nn.Module, one: nn.Module, relative: float = 1e-5) -> None:
    want = dict(one.named_parameters())
    total = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in want.values() if p.grad is not None))
    for n, p in ours.named_parameters():
        assert (p.grad is None) == (want[n].grad is None), n
        if p.grad is not None:
            assert isinstance(p.grad, DTensor) and p.grad.placements == p.placements
            d = float((p.grad.full_tensor() - want[n].grad).norm())
            assert d <= relative * float(want[n].grad.norm()) + relative / 100 * total, (n, d)


ACCUMULATIONS = (("plain", "fsdp"), ("grad_accumulation", "fsdp"), ("no_sync", "ddp"))


def _accumulation(name: str, how: str, layout: str) -> None:
    """Four micro-batches equal one batch. Without reductions in between, gradients appear only at the last."""
    model, one = _compiled(_mesh(2), _model(name), layout=layout, grad_accumulation=4 if how == "grad_accumulation" else 1), _model(name)
    batch = ZOO[name].inputs(BATCH, SEQ)
    batch["labels"] = batch["input_ids"]  # equal counts, so that the mean of four means is the mean
    one(**batch).loss.backward()
    for i in range(4):
        scope = model.no_sync() if how == "no_sync" and i < 3 else contextlib.nullcontext()
        with scope:
            (model(**_part(batch, i, 4)).loss / 4).backward()
        if how != "plain" and i < 3:
            assert all(p.grad is None for p in model.parameters())
    _assert_gradients(model, one)
    ours = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    theirs = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
    torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-5, atol=0)
    _assert_gradients(model, one)


@pytest.mark.parametrize(
    ("name", "how", "layout"),
    cases([(n, *h) for n in MODELS for h in ACCUMULATIONS], [("toy", *h) for h in ACCUMULATIONS]),
)
def test_accumulation_equals_one_batch(name: str, how: str, layout: str) -> None:
    run(_accumulation, 2, name, how, layout)


def _inputs(name: str) -> None:
    """Local shards, DTensors, and new sizes mean the same as the whole batch."""
    mesh, batch = _mesh(2), ZOO[name].inputs(BATCH, SEQ)
    one = _model(name)
    one(**batch).loss.backward()
    model = _compiled(mesh, _model(name), inputs="local")
    assert (model.data_rank, model.data_world) == (dist.get_rank(), 2)
    model(**_part(batch, model.data_rank, 2)).loss.backward()
    _assert_gradients(model, one)
    model = _compiled(mesh, _model(name))
    model(**{k: distribute_tensor(v, mesh, [Shard(1)]) for k, v in batch.items()}).loss.backward()
    _assert_gradients(model, one)
    other = ZOO[name].inputs(BATCH // 2, SEQ // 2)
    model.zero_grad(), one.zero_grad()
    placements = {n: p.placements for n, p in model.named_parameters()}
    model(**other).loss.backward()
    one(**other).loss.backward()
    _assert_gradients(model, one)
    assert placements == {n: p.placements for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", cases(MODELS, ("toy",)))
def test_inputs(name: str) -> None:
    run(_inputs, 2, name)


def _precision(name: str) -> None:
    """bf16 compute against eager autocast: loss to 1e-3, gradients to 3% in norm (bf16 has 8 bits: 0.4% an operation)."""
    mesh, batch = _mesh(2), ZOO[name].inputs(BATCH, SEQ)
    one = _model(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = one(**batch).loss
    want.backward()
    model = _compiled(mesh, _model(name), precision="bf16")
    got = model(**batch).loss
    got.backward()
    assert abs(float(got) - float(want)) < 1e-3 * float(want)
    _assert_gradients(model, one, 0.03)
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    model = _compiled(mesh, _model(name))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = model(**batch).loss
    got.backward()
    assert abs(float(got) - float(want)) < 1e-3 * float(want)
    _assert_gradients(model, one, 0.03)


@pytest.mark.parametrize("name", cases(MODELS, ("toy",)))
def test_bf16_and_autocast(name: str) -> None:
    run(_precision, 2, name)


class Net(nn.Module):
    """Outputs in a dict, one of them no tensor; no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 30), nn.Linear(30, 10)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        return {"y": self.b(F.relu(self.a(x))) * scale, "n": 3}


def _outputs() -> None:
    mesh = _mesh(2)
    torch.manual_seed(0)
    one = Net()
    model = _compiled(mesh, copy.deepcopy(one))
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    x2 = x.detach().clone().requires_grad_()
    out = model(x, scale=2.0)
    assert out["n"] == 3 and not isinstance(out["y"], DTensor)
    torch.testing.assert_close(out["y"], one(x2, scale=2.0)["y"])
    (out["y"] ** 2).sum().backward()
    (one(x2, scale=2.0)["y"] ** 2).sum().backward()
    _assert_gradients(model, one)
    torch.testing.assert_close(x.grad, x2.grad)


def _logits(name: str) -> None:
    """What a step leaves out is computed when it is asked for, and from then on at once."""
    mesh, batch = _mesh(2), ZOO[name].inputs(BATCH, SEQ)
    one, model = _model(name), _compiled(mesh, _model(name))
    out = model(**batch)
    assert out.loss is out[0] and out.loss.dim() == 0 and not isinstance(out.loss, DTensor)
    assert name == "toy" or out.loss is out["loss"]
    torch.testing.assert_close(out.logits, one(**batch).logits, rtol=1e-4, atol=1e-5)
    assert model.programs.captured == 2
    assert not model(**batch).__class__.__name__.startswith("Loss") and model.programs.captured == 2
    everything = _compiled(mesh, _model(name), outputs="all")(**batch)
    torch.testing.assert_close(everything.logits, one(**batch).logits, rtol=1e-4, atol=1e-5)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, one.eval()(**batch).logits, rtol=1e-4, atol=1e-5)


def test_outputs() -> None:
    run(_outputs, 2)


@pytest.mark.parametrize("name", cases(MODELS, ("toy",)))
def test_outputs_that_the_step_leaves_out(name: str) -> None:
    run(_logits, 2, name)


def _local_outputs(layout: str | None) -> None:
    """Each rank has its own samples and its own loss, as with DDP: gradients are those of the mean over ranks."""
    torch.manual_seed(0)
    one = Net()
    model = autopar.compile(copy.deepcopy(one), _mesh(2), layout=layout, backend="aot_eager", inputs="local", options={"seconds": 5})
    x, y = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.arange(8)
    mine = slice(4 * model.data_rank, 4 * model.data_rank + 4)
    out = model(x[mine])["y"]
    torch.testing.assert_close(out, one(x)["y"][mine])
    (F.cross_entropy(out, y[mine]) + out.square().mean()).backward()
    whole = one(x)["y"]
    (F.cross_entropy(whole, y) + whole.square().mean()).backward()
    _assert_gradients(model, one)


@pytest.mark.parametrize("layout", ["ddp", None])
def test_outputs_of_local_inputs(layout: str | None) -> None:
    run(_local_outputs, 2, layout)


def _frozen() -> None:
    mesh, batch = _mesh(2), ZOO["llama"].inputs(BATCH, SEQ)
    one, other = _model("llama"), _model("llama")
    for m in (one, other):
        for n, p in m.named_parameters():
            p.requires_grad_("layers.1" in n)
    model = _compiled(mesh, other)
    model(**batch).loss.backward()
    one(**batch).loss.backward()
    _assert_gradients(model, one)
    step = next(iter(model._programs.steps()))
    # Frozen weights need no weight-gradient GEMM: q, k, v, o, gate, up, down of layer 1 twice, lm_head and nothing of layer 0 once.
    backward = [n for n in step.base.backward.graph.nodes if n.target == torch.ops.aten.mm.default]
    assert len(backward) == 7 * 2 - 3 + 1 + 3, len(backward)


def test_frozen_parameters_cost_nothing() -> None:
    run(_frozen, 2)


def _train(name: str, layout: str, before: bool) -> None:
    """The optimizer may be built before the first call, although that call moves parameters to other placements."""
    model, one = _compiled(_mesh(2, 2), _model(name), layout=layout), _model(name)
    batch = ZOO[name].inputs(BATCH, SEQ)
    if not before:
        model.prepare(**batch)
    ours, theirs = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(one.parameters(), lr=1e-2)
    hooked: list[str] = []
    for n, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, n=n: hooked.append(n))
    for i in range(4):
        got, want = model(**batch).loss, one(**batch).loss
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        got.backward()
        want.backward()
        for o in (ours, theirs):
            o.step()
            o.zero_grad()
        assert len(hooked) == (i + 1) * len(list(model.parameters()))
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in one.named_parameters()]
    if name == "llama":
        assert model.config is not None and model.config.hidden_size == 32


BUILT = [(n, layout, before) for n in MODELS for layout, before in (("tp", True), ("fsdp+tp", False))]


@pytest.mark.parametrize(("name", "layout", "before"), cases(BUILT, BUILT[:2]))
def test_optimizer_before_or_after(name: str, layout: str, before: bool) -> None:
    run(_train, 4, name, layout, before)


def _batchnorm() -> None:
    zoo, mesh = ZOO["convnet"], _mesh(2)
    torch.manual_seed(0)
    one = zoo.build()
    model = _compiled(mesh, copy.deepcopy(one), loss_fn=F.cross_entropy)
    for i in range(3):
        batch = zoo.inputs(8, 0)
        batch["x"] = batch["x"] + i
        (model(batch["x"], batch["target"]) if i else model(**batch)).backward()
        F.cross_entropy(one(batch["x"]), batch["target"]).backward()
    _assert_gradients(model, one)
    for (n, a), (_, b) in zip(model.named_buffers(), one.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=n)


def test_batchnorm_statistics_are_global() -> None:
    run(_batchnorm, 2)


def _dropout(name: str) -> None:
    mesh, batch = _mesh(2), ZOO[name].inputs(BATCH, SEQ)
    torch.manual_seed(11)
    one, model = _model(name), _compiled(mesh, _model(name))
    torch.manual_seed(5)
    for i in range(3):
        got = model(**batch).loss
        with EagerRandom(5, i):
            want = one(**batch).loss
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert model.rng_state() == {"seed": 5, "step": 3}
    torch.manual_seed(6)
    a = model(**batch).loss
    model.load_rng_state({"seed": 5, "step": 0})
    b = model(**batch).loss
    with EagerRandom(5, 0):
        torch.testing.assert_close(b, one(**batch).loss, rtol=1e-5, atol=1e-6)
    assert float(a) != float(b)


@pytest.mark.parametrize("name", cases(("toy-dropout", "gpt2"), ("toy-dropout",)))
def test_dropout_follows_the_seed(name: str) -> None:
    run(_dropout, 2, name)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if y.sum() > 0:
            y = y + 1
        return y


class Shuffled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)[torch.randperm(4)]


def _errors() -> None:
    mesh, batch = _mesh(2), ZOO["toy"].inputs(BATCH, SEQ)

    def raises(match: str, call: Callable[[], Any]) -> None:
        with pytest.raises(autopar.AutoparError, match=match):
            call()

    raises("needs 7 processes, the world has 2", lambda: autopar.compile(_model(), (7,)))
    raises("if y.sum\\(\\) > 0", lambda: _compiled(mesh, Branches())(torch.randn(4, 4, generator=torch.Generator().manual_seed(0))))
    raises("cannot be captured", lambda: _compiled(mesh)(input_ids=batch["input_ids"].float(), labels=batch["labels"]))
    raises("cannot be captured", lambda: _compiled(mesh)(input_ids=batch["input_ids"], labels=batch["labels"][:, :5]))
    raises("different batches", lambda: _compiled(mesh)(**_part(batch, dist.get_rank(), 2)))
    raises("draws random numbers", lambda: _compiled(mesh, Shuffled())(torch.ones(4, 4)))
    raises("unknown layout", lambda: _compiled(mesh, layout="zero"))
    raises("no axis 'xp'", lambda: _compiled(mesh, layout=autopar.Layout(data=("xp",))))
    raises("unknown backend", lambda: _compiled(mesh, backend="fast"))
    raises("unknown optimizer", lambda: _compiled(mesh, optimizer="adamwx"))
    raises("unknown precision", lambda: _compiled(mesh, precision="fp12"))
    raises("there is no plan yet", lambda: _compiled(mesh).plan)
    model = _compiled(mesh)
    model.head.register_full_backward_hook(lambda *a: None)
    raises("module backward hooks", lambda: model(**batch))
    model = _compiled(mesh, optimizer="sgd")
    model(**batch).loss.backward()
    raises("AdamW steps these parameters", torch.optim.AdamW(model.parameters()).step)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_bad_input_gets_a_clear_error() -> None:
    run(_errors, 2)
