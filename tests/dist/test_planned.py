"""`autopar.compile` plans: the planned step trains like one device, one rank decides for all, ranks that disagree are refused and nobody hangs.

    python -m tests.dist.test_planned --model llama --mesh 2,2 --steps 4

What is planned for is an H100 without latencies, except where the point is this machine: these models are tiny, and with latencies the best plan would
be to split nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.kernels.random import EagerRandom
from autopar.plan.schema import canonical, dumps, save
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.layout import Layout
from autopar.planner.planning import Planned
from autopar.planner.propagate import propagate
from tests.dist.launch import run
from tests.models import ZOO
from tests.wide import cases

BATCH, SEQ, SEED = 8, 16, 3
AXES = ("dp", "tp", "pp")


def _cluster() -> Cluster:
    c = Cluster.of("h100:8")
    now = {"latency_s": 0.0}
    device = c.device.model_copy(update={"launch_s": 0.0})
    return c.model_copy(update={"device": device, "intra": c.intra.model_copy(update=now), "inter": c.inter.model_copy(update=now)})


def _mesh(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=AXES[: len(sizes)])


def _model(name: str = "llama", layers: int = 2) -> nn.Module:
    torch.manual_seed(SEED)
    return ZOO[name].build(layers).train()


def _compiled(mesh: Any, model: nn.Module | None = None, **kw: Any) -> autopar.ParallelModule:
    return autopar.compile(
        model or _model(), mesh, **{"backend": "aot_eager", "cluster": _cluster(), "options": {"gap": 0.05, "seconds": 30}, **kw}
    )


def _part(batch: dict[str, torch.Tensor], i: int, n: int) -> dict[str, torch.Tensor]:
    return {k: v[i * len(v) // n : (i + 1) * len(v) // n] for k, v in batch.items()}


def _assert_gradients(ours: nn.Module, one: nn.Module) -> None:
    """By the bound of the float32 matrix; every gradient lies where its parameter does."""
    want = dict(one.named_parameters())
    total = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in want.values() if p.grad is not None))
    for n, p in ours.named_parameters():
        assert (p.grad is None) == (want[n].grad is None), n
        if p.grad is not None:
            assert isinstance(p.grad, DTensor) and p.grad.placements == p.placements
            d = float((p.grad.full_tensor() - want[n].grad).norm())
            assert d <= 1e-5 * float(want[n].grad.norm()) + 1e-7 * total, (n, d, total)


# ---- the planned step --------------------------------------------------------------------------------------------


def train(name: str, sizes: tuple[int, ...], steps: int, layers: int = 2, **options: Any) -> dict[str, Any]:
    """Trains a planned model beside one device; an optimizer made before the plan, clipping, an evaluation and a smaller batch in between."""
    zoo, one = ZOO[name], _model(name, layers)
    model = _compiled(_mesh(*sizes), copy.deepcopy(one), **options)
    inputs = zoo.inputs(BATCH, SEQ)

    def losses(i: int, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(SEED + 1 + i)
        got = model(**batch)
        with EagerRandom(SEED + 1 + i, 0):
            return got.loss, one(**batch).loss

    ours, theirs = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.optim.AdamW(one.parameters(), lr=1e-3)
    evaluated = ZOO[name].inputs(BATCH // 2, SEQ)
    first = None
    for i in range(steps):
        if i in (0, 2):  # before the plan, and after it
            model.eval(), one.eval()
            with torch.no_grad():
                got, want = model(**evaluated), one(**evaluated)
                torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)
            model.train(), one.train()
        if i == 0:
            with pytest.raises(autopar.AutoparError, match="no plan yet"):
                model.data_world  # noqa: B018
        got, want = losses(i, inputs if i != 1 else _part(inputs, 0, 2))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        got.backward()
        want.backward()
        if i < 2:
            _assert_gradients(model, one)
        places = {n: p.placements for n, p in model.named_parameters()}
        first = first or places
        assert places == first, "parameters moved after the plan"
        a = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        b = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
        torch.testing.assert_close(a.full_tensor() if isinstance(a, DTensor) else a, b, rtol=1e-4, atol=1e-6)
        for o in (ours, theirs):
            o.step()
            o.zero_grad()
    assert model.plan.layout == "planned" and "predicted on" in str(model.plan)
    assert model.data_world == model.plan.data_size
    return {
        "plan": dumps(model.plan),
        "fallbacks": model.plan.fallbacks,
        "collectives": len(model.plan.collectives),
        "text": str(model.plan),
    }


@pytest.mark.parametrize(
    ("name", "sizes"), cases([("toy", (2,)), ("llama", (2,)), ("llama", (2, 2)), ("gpt2", (4,)), ("t5", (2,))], [("toy", (2,))])
)
def test_trains_like_one_device(name: str, sizes: tuple[int, ...]) -> None:
    results = run(train, math.prod(sizes), name, sizes, 3, timeout=600)
    assert all(r == results[0] for r in results), "ranks hold different plans"
    assert not results[0]["fallbacks"]
    assert results[0]["collectives"], "nothing is split: this shows little"


# ---- the contract ------------------------------------------------------------------------------------------------


def _tensor_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning finds that tensors should be split and the batch should not."""

    def plan_graph(folded: Any, axes: dict[str, int], *_: Any, **more: Any) -> Planned:
        plan = propagate(folded.graph, Layout.of("tp", Mesh.of(axes)), axes, frozenset(folded.graph.params))
        return Planned(plan, None, None, None)  # type: ignore[arg-type]

    monkeypatch.setattr("autopar.planner.request.plan_graph", plan_graph)


class Net(nn.Module):
    """Takes floats, so that its inputs can have gradients. `f` is no parameter: ranks that differ in it look alike until captured."""

    def __init__(self, f: Callable[[torch.Tensor], torch.Tensor] = torch.relu) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.a, self.b, self.f = nn.Linear(16, 32), nn.Linear(32, 16), f

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.b(self.f(self.a(x))) ** 2).mean()}


def _local_inputs() -> None:
    """Local parts come from all ranks from the first step on, also where the plan does not split the batch at all."""
    mesh, rank = _mesh(2), dist.get_rank()
    with pytest.MonkeyPatch.context() as m:
        _tensor_parallel(m)
        one, model = Net(), _compiled(mesh, Net(), inputs="local")
        assert (model.data_rank, model.data_world) == (rank, 2)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        part = x.detach()[4 * rank : 4 * rank + 4].requires_grad_()
        model(part)["loss"].backward()
        one(x)["loss"].backward()
    _assert_gradients(model, one)
    torch.testing.assert_close(part.grad, x.grad[4 * rank : 4 * rank + 4])
    assert model.plan.data_size == 1 and (model.data_rank, model.data_world) == (rank, 2)


BUILT = ("net", "llama")


def _built(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model and its batch, in which equal numbers of positions count, so that the mean of micro-batches' means is the mean."""
    if name == "net":
        return Net(), {"x": torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(0))}
    batch = ZOO[name].inputs(BATCH, SEQ)
    return _model(name), {**batch, "labels": batch["input_ids"]}


def _accumulation(name: str) -> None:
    """Micro-batches of a planned step; this machine is planned for, by default."""
    one, batch = _built(name)
    model = autopar.compile(copy.deepcopy(one), _mesh(2), backend="aot_eager", inputs="local")
    one(**batch)["loss"].backward()
    halves = [_part(batch, i, 2) for i in range(2)]
    mine = [_part(half, dist.get_rank(), 2) for half in halves]
    with model.no_sync():
        (model(**mine[0])["loss"] / 2).backward()
    assert all(p.grad is None for p in model.parameters())
    (model(**mine[1])["loss"] / 2).backward()
    _assert_gradients(model, one)
    assert model.plan.cluster == "cpu:1x2" and model.plan.layout == "planned"


def _given(name: str, folder: str) -> None:
    """A plan through its file: the same plan, the same gradients; refused for another mesh, another model, or when cut short."""
    mesh, path = _mesh(2), Path(folder) / "plan.json"
    one, batch = _built(name)
    first = _compiled(mesh, copy.deepcopy(one).train(), example_inputs=batch)
    one(**batch)["loss"].backward()
    if dist.get_rank() == 0:
        save(first.plan, path)
        path.with_name("cut.json").write_bytes(path.read_bytes()[:-100])
    dist.barrier()
    for given in (path, str(path), first.plan):
        model = _compiled(mesh, _built(name)[0], plan=given, cluster=None)
        assert model.data_world == first.plan.data_size
        model(**batch)["loss"].backward()
        _assert_gradients(model, one)
        assert canonical(model.plan) == canonical(first.plan)
        assert {n: p.placements for n, p in model.named_parameters()} == {n: p.placements for n, p in first.named_parameters()}
    model = _compiled(None, _built(name)[0], plan=path)  # its own mesh
    assert model._builder.groups.axes == {"dp": 2}
    local = _compiled(mesh, _built(name)[0], plan=path, inputs="local")
    assert local.data_world == first.plan.data_size
    local(**_part(batch, local.data_rank, local.data_world))["loss"].backward()
    _assert_gradients(local, one)

    def raises(match: str, call: Callable[[], Any]) -> None:
        with pytest.raises(autopar.AutoparError, match=match):
            call()

    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    raises("made for a mesh of dp=2, this one is dp=2 x tp=1", lambda: _compiled(other, Net(), plan=path))
    another = Net(torch.sigmoid) if name == "net" else _model(name, layers=3)
    raises("made for another program", lambda: _compiled(mesh, another, plan=path)(**batch))
    raises("made for another program", lambda: _compiled(mesh, _built(name)[0], plan=path)(**_part(batch, 0, 2)))
    raises("cannot be read|does not fit", lambda: _compiled(mesh, Net(), plan=path.with_name("cut.json")))
    raises("both say how", lambda: _compiled(mesh, Net(), plan=path, layout="fsdp"))


@pytest.mark.parametrize("name", cases(BUILT, ("net",)))
def test_given_plans(name: str, tmp_path: Path) -> None:
    run(_given, 2, name, str(tmp_path), timeout=600)


def test_local_inputs() -> None:
    run(_local_inputs, 2, timeout=600)


@pytest.mark.parametrize("name", cases(BUILT, ("net",)))
def test_accumulation(name: str) -> None:
    run(_accumulation, 2, name, timeout=600)


# ---- ranks that disagree or fail ---------------------------------------------------------------------------------


def _told(call: Callable[[], Any]) -> tuple[str, str]:
    """Kind and text of what a call raises."""
    try:
        call()
    except BaseException as e:
        return type(e).__name__, str(e)
    raise AssertionError("nothing was raised")


def _refused() -> dict[str, tuple[str, str]]:
    """Ranks differ in one thing at a time; after each they are still in step with each other."""
    rank, mesh = dist.get_rank(), _mesh(2)
    x = torch.ones(8, 16)
    plan = _compiled(mesh, Net(), example_inputs=(x,)).plan
    edited = replace(plan, cluster="another") if rank else plan
    broken = torch.randperm if rank else torch.relu  # a random operator that autopar has no form of
    cases: dict[str, Callable[[], Any]] = {
        "model": lambda: _compiled(mesh, nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 + rank)))),
        "arguments": lambda: _compiled(mesh, Net(), memory=1e9 + rank),
        "plans": lambda: _compiled(mesh, Net(), plan=edited),
        "shapes": lambda: _compiled(mesh, Net())(x=x[: 8 // (1 + rank)]),
        "local shapes": lambda: _compiled(mesh, Net(), inputs="local")(x=x[: 8 // (1 + rank)]),
        "program": lambda: _compiled(mesh, Net(torch.sigmoid if rank else torch.relu))(x),
        "one cannot capture": lambda: _compiled(mesh, Net((lambda y: y + broken(32)) if rank else broken))(x),
    }
    out = {}
    for name, call in cases.items():
        out[name] = _told(call)
        dist.barrier()
    return out


def test_ranks_that_disagree_are_refused() -> None:
    results = run(_refused, 2, timeout=300)
    for name in results[0]:
        assert results[0][name] == results[1][name], "ranks were told different things"
    said = results[0]
    for name, kind, texts in (
        ("model", "DisagreementError", ("rank 1 disagrees with rank 0", "parameters", "2.weight")),
        ("arguments", "DisagreementError", ("rank 1 disagrees with rank 0", "arguments", "memory=1000000001")),
        ("plans", "DisagreementError", ("rank 1 disagrees with rank 0", "the plan")),
        ("shapes", "InputError", ("ranks 0 and 1", "x")),
        ("local shapes", "UnequalSizesError", ("ranks 0 and 1", "x")),
        ("program", "DisagreementError", ("rank 1 disagrees with rank 0", "the program", "sigmoid", "relu")),
        ("one cannot capture", "CaptureError", ("draws random numbers",)),
    ):
        assert said[name][0] == kind and all(t in said[name][1] for t in texts), (name, said[name])


def _first_raises() -> dict[str, tuple[str, str, float]]:
    """What goes wrong while rank 0 plans."""
    mesh, x, out = _mesh(2), torch.ones(8, 16), {}

    def now(e: BaseException) -> Callable[..., Any]:
        def plan_graph(*_: Any, **more: Any) -> Any:
            assert dist.get_rank() == 0, "only one rank plans"
            raise e

        return plan_graph

    errors = {
        "ctrl-c": KeyboardInterrupt(),
        "error": autopar.AutoparError("no", where="here", fix="that"),
        "bug": IndexError("a bug"),
        "strange": json.JSONDecodeError("strange", "x", 0),  # its constructor wants what the exception does not keep in args
    }
    for name, e in errors.items():
        model = _compiled(mesh, Net())
        with pytest.MonkeyPatch.context() as m:
            m.setattr("autopar.planner.request.plan_graph", now(e))
            start = time.monotonic()
            out[name] = (*_told(lambda model=model: model(x)), time.monotonic() - start)
        assert model(x)["loss"] > 0  # and now it is planned
    try:
        _compiled(mesh, Net(), memory=1000.0, example_inputs=(x,))
    except InfeasibleError as e:
        out["memory"] = (e.constraint + e.remedy, str(e), e.shortfall_bytes)
    return out


def test_what_the_first_rank_raises_reaches_all() -> None:
    results = run(_first_raises, 2, timeout=300)
    assert results[0]["memory"] == results[1]["memory"] and results[0]["memory"][2] > 0
    for r in results:
        assert r["ctrl-c"][0] == "KeyboardInterrupt"
        assert r["error"][:2] == ("AutoparError", "no\n  where: here\n  what to do: that")
        assert r["bug"][:2] == ("IndexError", "a bug")
        assert all(r[name][2] < 60 for name in ("ctrl-c", "error", "bug", "strange"))
    assert results[0]["strange"][0] == "JSONDecodeError"
    assert results[1]["strange"][0] == "AutoparError" and "rank 0 failed: JSONDecodeError: strange" in results[1]["strange"][1]


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--model", default="llama", choices=sorted(ZOO))
    a.add_argument("--mesh", default="2,2")
    a.add_argument("--steps", type=int, default=4)
    a.add_argument("--layers", type=int, default=2)
    o = a.parse_args()
    sizes = tuple(int(s) for s in o.mesh.split(","))
    print(run(train, math.prod(sizes), o.model, sizes, o.steps, o.layers, timeout=3600)[0]["text"])


if __name__ == "__main__":
    main()
