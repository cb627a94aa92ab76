"""Outlined graphs compute what the same graphs compute whole, bit for bit; layers fold; no body holds half a collective; eager graphs free."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar import _torch
from autopar.passes import outline as outline_module
from autopar.passes.manager import overlap
from autopar.passes.outline import Outlined, outline
from autopar.passes.overlap import blocking
from autopar.passes.repeats import find_repeats
from autopar.runtime.lower import lower
from tests.models import ZOO
from tests.spmd.simulate import fake_world, prepare, simulated
from tests.wide import cases, wide

c10d = torch.ops._c10d_functional


def _trace(f: Callable[..., Any], inputs: list[torch.Tensor]) -> tuple[fx.GraphModule, Any]:
    mode = _torch.new_fake_mode()
    with mode, torch.no_grad():
        fakes = [torch.empty(t.shape, dtype=t.dtype) for t in inputs]
        return make_fx(f, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes), mode


def _whole(gm: fx.GraphModule, mode: Any, monkeypatch: pytest.MonkeyPatch) -> fx.GraphModule:
    with monkeypatch.context() as m:
        m.setattr(outline_module, "find_repeats", lambda hashes: [])
        out = outline(gm, mode)
    assert out.layers == 0
    return out.gm


def _equal(a: Any, b: Any) -> bool:
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- finding -------------------------------------------------------------------------------------------------------


def test_find_repeats() -> None:
    rng = random.Random(0)
    for period, count in ((20, 4), (60, 2), (13, 9)):
        layer = [f"l{rng.randrange(8)}" for _ in range(period - 1)] + ["end"]
        head, tail = [f"h{i}" for i in range(7)], [f"t{i}" for i in range(5)]
        (r,) = find_repeats(head + layer * count + tail)
        assert (r.start, r.period, r.count) == (7, period, count)
    stacks = head + [f"a{i}" for i in range(30)] * 3 + ["mid"] + [f"b{i}" for i in range(25)] * 4
    assert [(r.start, r.period, r.count) for r in find_repeats(stacks)] == [(7, 30, 3), (98, 25, 4)]
    assert find_repeats([f"n{i}" for i in range(200)]) == []


# ---- graphs made to be hard ------------------------------------------------------------------------------------------


def _layer(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    for _ in range(8):
        x = torch.tanh(x * 1.5) + s
    return torch.sin(torch.exp(-x * x)) * 0.5


def _views_of_a_slice(a: torch.Tensor) -> Any:
    """Bodies give out views of an input that does not begin where its storage does."""
    x, right = a[:, :4], a[:, 4:]
    views = []
    for _ in range(4):
        x = _layer(x, right)
        views.append(right.transpose(0, 1))
        x = x + views[-1]
    for v in views:
        x = x @ v
    return (x, *views)


def _views_of_a_result(a: torch.Tensor) -> Any:
    """Bodies give out two views of one result, none of them the result itself."""
    x, kept = a, []
    for _ in range(4):
        y = _layer(x, a)
        kept += [y[:, 2:6].transpose(0, 1), y.view(2, 2, 8)[1]]
        x = _layer(kept[-2].t().repeat(1, 2), a)
    return (x, *kept)


def _tuples(a: torch.Tensor, w: torch.Tensor) -> Any:
    """A tuple made at the end of a layer and taken apart in the next."""
    parts = torch.split(a @ w, 4, 1)
    for _ in range(5):
        y = _layer(parts[0], parts[1])
        parts = torch.split(torch.cat([y, y], 1) @ w, 4, 1)
    return (parts[0] + parts[1],)


def _narrowest_at_a_tuple(a: torch.Tensor) -> Any:
    """Two values are alive everywhere but where a tuple is whole; one part of it is read a layer later."""
    x, y, before = a, a[0] * 2.0, a[:, :1]
    for _ in range(5):
        out, mean, rstd = torch.ops.aten.native_layer_norm(x, [8], y, None, 1e-5)
        y = mean.mean() + a[0]
        x = _layer(out + before, a)
        before = rstd
    return (x * y + before,)


def _swapped(a: torch.Tensor) -> Any:
    """The same ops on the same shapes in every layer, with operands the other way round in every second."""
    x = a
    for i in range(6):
        x = _layer(x, a)
        x = x - a if i % 2 else a - x
    return (x,)


def _counters(a: torch.Tensor, k: torch.Tensor) -> Any:
    """Layers that differ in an integer added to integers, as random ops do."""
    x = a
    for i in range(4):
        x = _layer(x, ((k * 3 + 5 * i) % 7).to(x.dtype))
    return (x,)


def _different_constants(a: torch.Tensor) -> Any:
    """Layers alike but for a float and a dim."""
    x = a
    for i in range(4):
        x = _layer(x, a).softmax(i % 2) * (1.0 + i)
    return (x,)


@pytest.mark.parametrize(
    ("f", "layers", "distinct"),
    [
        (_views_of_a_slice, 3, 1), (_views_of_a_result, 3, 1), (_tuples, 4, 1), (_narrowest_at_a_tuple, 4, 1), (_swapped, 5, 2),
        (_counters, 4, 1), (_different_constants, 0, 0),
    ],
)  # fmt: skip
def test_hard_graphs(f: Callable[..., Any], layers: int, distinct: int, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    second = {_tuples: [torch.randn(8, 8, generator=g)], _counters: [torch.randint(0, 1 << 40, (8,), generator=g)]}
    inputs = [torch.randn(4, 8, generator=g), *second.get(f, [])]
    gm, mode = _trace(f, inputs)
    for n in [n for n in gm.graph.nodes if _torch.is_getitem(n)]:
        next(u for u in gm.graph.nodes if u in n.users).prepend(n)  # where a partitioner may put it
    out = outline(gm, mode)
    assert (out.layers >= layers, out.distinct) == (True, distinct), (out.layers, out.distinct)
    whole = _whole(gm, mode, monkeypatch)
    assert _equal(out.gm(*inputs), whole(*inputs))
    torch.testing.assert_close(list(out.gm(*inputs)), list(f(*inputs)), rtol=1e-6, atol=1e-6)


# ---- collectives ---------------------------------------------------------------------------------------------------


def _graphs(out: Outlined) -> list[fx.Graph]:
    return [m.graph for m in out.gm.modules() if isinstance(m, fx.GraphModule)]


def _halves(graph: fx.Graph) -> int:
    """Collectives of `graph` without a wait in it, and waits without their collective."""
    issued = [n for n in graph.nodes if "_c10d_functional" in str(n.target) and "wait" not in str(n.target)]
    waits = [n for n in graph.nodes if "wait_tensor" in str(n.target)]
    return sum(not any(u in waits for u in n.users) for n in issued) + sum(n.args[0] not in issued for n in waits)


def test_a_body_holds_whole_collectives() -> None:
    """The gather of every layer is in flight over the end of the hash period, but there is another cut."""

    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        for _ in range(5):
            flying = c10d.all_gather_into_tensor(w * 2.0, 1, "group")
            x = _layer(x, w)
            x = _layer(x @ c10d.wait_tensor(flying), w)
        return (x,)

    out = outline(*_trace(f, [torch.zeros(8, 8), torch.zeros(8, 8)]))
    assert (out.layers >= 4, out.distinct) == (True, 1)
    assert sum("all_gather" in str(n.target) for g in _graphs(out) for n in g.nodes) >= 1
    assert [_halves(g) for g in _graphs(out)] == [0] * len(_graphs(out))


def test_a_stack_is_left_whole_when_a_collective_is_always_in_flight() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        flying = c10d.all_gather_into_tensor(w * 2.0, 1, "group")
        for _ in range(5):
            now = x * 1.0
            following = c10d.all_gather_into_tensor(now, 1, "group")  # the next layer's, before this layer's is waited for
            x = _layer(x @ c10d.wait_tensor(flying), w)
            flying = following
        return (x + c10d.wait_tensor(flying),)

    out = outline(*_trace(f, [torch.zeros(8, 8), torch.zeros(8, 8)]))
    assert (out.layers, out.distinct) == (0, 0)
    assert [_halves(g) for g in _graphs(out)] == [0]


# ---- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "depth", "stacks"), cases([("llama", 5, 1), ("gpt2", 5, 1), ("t5", 4, 2)], [("llama", 5, 1)]))
def test_models(name: str, depth: int, stacks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer but two of a stack folds; forward and backward give the same bits as whole, dropout included."""
    torch.manual_seed(0)
    model = ZOO[name].build(depth).train()
    p = prepare(model, ZOO[name].inputs(2, 8))
    with fake_world(1):
        s = simulated(p, {"dp": 1}, "ddp")
    values: dict[Any, torch.Tensor] = {}
    for role in {*s.parts.forward_inputs, *s.parts.backward_inputs}:
        if role.kind == "input":
            values[role] = p.tensors[role.index]
        elif role.kind in ("param", "buffer"):
            values[role] = dict([*model.named_parameters(), *model.named_buffers()])[role.name].detach()
        else:
            values[role] = {"seed": torch.tensor([3, 5]), "tangent": torch.ones(()), "coordinate": torch.tensor(0)}[role.kind]
    forward, backward = [values[r] for r in s.parts.forward_inputs], [values[r] for r in s.parts.backward_inputs]
    saved: list[torch.Tensor] = []
    for gm, inputs in ((s.parts.forward, forward), (s.parts.backward, backward)):
        out = outline(gm, s.captured.fake_mode)
        assert out.layers >= stacks * (depth - 2) and out.distinct == stacks, (out.layers, out.distinct)
        whole = _whole(gm, s.captured.fake_mode, monkeypatch)
        with torch.no_grad():
            want = whole(*saved, *inputs)
            assert _equal(out.gm(*saved, *inputs), want)
        saved = list(want[len(s.parts.forward_outputs) :])


@wide
@pytest.mark.parametrize(("name", "layout"), [("llama", "fsdp"), ("gpt2", "fsdp+tp")])
def test_overlapped_models(name: str, layout: str) -> None:
    """Collectives a layer ahead and behind cost no folding, and stand between the bodies with both halves."""
    p = prepare(ZOO[name].build(5).train(), ZOO[name].inputs(4, 8))
    with fake_world(4):
        s = simulated(p, {"dp": 4} if layout == "fsdp" else {"dp": 2, "tp": 2}, layout)
    moved = overlap(s.parts, "sim")
    for before, after in ((s.parts.forward, moved.forward), (s.parts.backward, moved.backward)):
        plain, out = (outline(gm, s.captured.fake_mode) for gm in (before, after))
        assert (out.layers, out.distinct) == (plain.layers, plain.distinct) and out.distinct == 1 and out.layers >= 3
        assert [_halves(g) for g in _graphs(out)] == [0] * len(_graphs(out))
        assert layout != "fsdp" or blocking(out.gm) <= 2


# ---- eager ---------------------------------------------------------------------------------------------------------

_probe: list[Any] = []


def _look(x: torch.Tensor) -> torch.Tensor:
    _probe.append(_probe[0]())
    return x + 1


def test_eager_frees_inputs_after_their_last_use_and_views_any_strides() -> None:
    graph = fx.Graph()
    a = graph.placeholder("a")
    viewed = graph.call_function(torch.ops.aten.view.default, (a, [6]))
    total = graph.call_function(torch.ops.aten.sum.default, (viewed,))
    graph.output((graph.call_function(_look, (total,)),))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    x = torch.arange(6.0).reshape(2, 3).t()  # not contiguous: aten.view cannot flatten it
    _probe[:] = [weakref.ref(x)]
    flat = [x]
    del x
    (y,) = lower(gm, backend="aot_eager", fake_mode=None).fn(flat)
    assert float(y) == 16.0 and flat == []
    assert _probe[1] is None, "the input is alive after its last use"
