"""Gathers ahead of their use, reductions behind: where they are issued and awaited in graphs small enough to say it by hand, and in what bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar import _torch
from autopar.capture.capture import Role
from autopar.graph.calls import is_collective, is_wait, nbytes
from autopar.passes.defer import defer
from autopar.passes.overlap import Window, blocking, calls_between, mark, overlapped, windows
from autopar.passes.prefetch import prefetch

c10d = torch.ops._c10d_functional
PARAM, INPUT = Role("param", "w"), Role("input", "", 0)


def _gather(w: torch.Tensor) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(w, 2, "g.dp"))


def _reduce(g: torch.Tensor) -> torch.Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(g, "sum", 2, "g.dp"))


def _layer(x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
    """Sixteen calls that compute, the first of two for every parameter reads it."""
    for w in params:
        x = torch.tanh(x * w)
    for _ in range(16 - 2 * len(params)):
        x = torch.exp(x)
    return x


def _trace(f: Callable[..., Any], shapes: list[tuple[int, ...]], grads: Callable[[fx.Node], bool] = lambda n: False) -> fx.GraphModule:
    """The graph of `f`. grads: which calls are what the shard pass emits to bring a gradient home."""
    mode = _torch.new_fake_mode()
    with mode, torch.no_grad():
        gm = make_fx(f, tracing_mode="real", _allow_non_fake_inputs=True)(*(torch.empty(s) for s in shapes))
    for n in gm.graph.nodes:
        n.meta.update(direction="backward", op="grad.w" if grads(n) else "op")
    return gm


def _text(gm: fx.GraphModule) -> list[str]:
    """i2: the collective that reads the third placeholder, w2: its wait; other calls by name."""
    places = {n: i for i, n in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
    names: dict[fx.Node, str] = {}
    for n in gm.graph.nodes:
        if is_collective(n):
            source = n.args[0]
            while source.op != "placeholder":
                source = source.args[0]
            names[n] = f"i{places[source]}"
        elif is_wait(n):
            names[n] = names[n.args[0]].replace("i", "w")
        elif n.op == "call_function":
            names[n] = n.target.overloadpacket.__name__
    return list(names.values())


def _in_flight(gm: fx.GraphModule) -> int:
    """The most bytes of gathers that are issued and not yet awaited."""
    now = most = 0
    for n in gm.graph.nodes:
        now += nbytes(n) if is_collective(n) else -nbytes(n) if is_wait(n) else 0
        most = max(most, now)
    return most


# ---- stretches -----------------------------------------------------------------------------------------------------


def test_stretches_without_layers() -> None:
    """W is the largest sum of two neighbours: 8 + 16. What does not fill a stretch is one at the end."""

    def f(x: torch.Tensor) -> torch.Tensor:
        for i in range(12):
            x = x * float(i + 2)
        return x

    calls = calls_between(_trace(f, [(4,)]))
    assert windows(calls, [0, 3, 5, 9], [8, 16, 4, 4]) == [Window(0, 5, (0, 1)), Window(5, 12, (2, 3))]
    assert windows(calls, [0, 3, 3, 9], [8, 8, 8, 16]) == [Window(0, 9, (0, 1, 2)), Window(9, 12, (3,))]
    assert windows(calls, [7], [8]) == [Window(7, 12, (0,))]
    assert windows(calls, [], []) == []


def test_stretches_are_layers() -> None:
    """Five layers of sixteen calls between 5 and 3 others; W is one layer's 20 bytes."""

    def f(x: torch.Tensor) -> torch.Tensor:
        for i in range(5):
            x = x - float(i + 2)
        for _ in range(5):
            x = _layer(x, x)
        for i in range(3):
            x = x / float(i + 2)
        return x

    calls = calls_between(_trace(f, [(4,)]))
    inside = [start + j for start in (5, 21, 37, 53, 69) for j in (0, 8)]
    layers = [Window(5 + 16 * k, 21 + 16 * k, (2 * k + 1, 2 * k + 2)) for k in range(5)]
    last = Window(86, 88, (11,))
    got = windows(calls, [1, *inside, 86], [10] * 11 + [30])
    assert got == [Window(1, 5, (0,)), *layers[:4], Window(69, 86, (9, 10)), last]
    # 9 bytes before the first layer are less than W / 2 and join it; 25 are enough for a stretch, and 3 more are not.
    assert windows(calls, [1, *inside, 86], [9] + [10] * 10 + [30])[:2] == [Window(1, 21, (0, 1, 2)), layers[1]]
    assert windows(calls, [1, 2, *inside, 86], [25, 3] + [10] * 10 + [30])[:2] == [Window(1, 2, (0,)), Window(2, 21, (1, 2, 3))]


# ---- prefetch ------------------------------------------------------------------------------------------------------


def test_gathers_are_issued_one_stretch_ahead() -> None:
    def f(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
        for i, w in enumerate(ws):
            x = x * _gather(w) + i + 2.0
        return x

    gm = _trace(f, [(4,), *[(2,)] * 6])
    before = _text(gm)
    assert before[:4] == ["i1", "w1", "mul", "add"] and blocking(gm) == 6
    ahead = prefetch(gm, [INPUT, *[PARAM] * 6])
    # No layers: two gathers make a stretch.
    assert _text(ahead) == [
        "i1", "i2", "i3", "i4", "w1", "mul", "add", "add", "w2", "mul", "add", "add",
        "i5", "i6", "w3", "mul", "add", "add", "w4", "mul", "add", "add",
        "w5", "mul", "add", "add", "w6", "mul", "add", "add",
    ]  # fmt: skip
    assert [window for _, window in overlapped(ahead)] == [0, 3, 6, 9, 6, 9] and blocking(ahead) == 1
    assert [n.meta["window"] for n in ahead.graph.nodes if is_collective(n)] == [0, 3, 6, 9, 6, 9]
    assert _text(gm) == before, "the graph given is changed"


def test_a_layer_ahead() -> None:
    """Every gather's window is the computation of a layer, and no more than two layers' gathers are in flight."""

    def f(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
        for a, b in zip(ws[::2], ws[1::2], strict=True):
            x = _layer(x, _gather(a), _gather(b))
        return x

    gm = _trace(f, [(4,), *[(2,)] * 12])
    ahead = prefetch(gm, [INPUT, *[PARAM] * 12])
    windows = [window for _, window in overlapped(ahead)]
    assert windows == [0, 2, *[16, 18] * 5]
    assert [t for t in _text(ahead) if t[0] == "i"] == [f"i{k}" for k in range(1, 13)], "not the order of use"
    assert _in_flight(ahead) == 4 * 16
    for n in ahead.graph.nodes:
        assert not is_wait(n) or n.next in n.users, "a wait stands right before the first use"


def test_what_leads_to_a_gather_moves_with_it() -> None:
    """What is computed of a shard, and a chain of two gathers with a slice between: each takes a stretch."""

    def f(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
        for w in ws:
            x = _layer(x, _gather(_gather(w * 2.0)[:2] * 0.5))
        return x

    gm = _trace(f, [(4,), *[(2,)] * 6])
    ahead = prefetch(gm, [INPUT, *[PARAM] * 6])
    windows = [window for _, window in overlapped(ahead)]
    # The first gather of a chain is awaited where the second is issued, a layer ahead of the use, and is issued a layer before that.
    assert windows == [0, 0, 0, *[16] * 9], windows
    ahead.graph.lint()


def test_only_parameters_are_fetched_ahead() -> None:
    """A gather of an activation, of an input, of a saved value or of a gradient stays."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _gather(torch.exp(x)) * _gather(y)

    gm = _trace(f, [(2,), (2,)])
    for roles in ([INPUT, INPUT], [None, Role("tangent", "", 0)]):
        assert _text(prefetch(gm, roles)) == _text(gm)
        assert blocking(prefetch(gm, roles)) == 2


# ---- defer ---------------------------------------------------------------------------------------------------------


def _backward(x: torch.Tensor, *ws: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Layers that each give a gradient, which is reduced and then halved."""
    out = []
    for w in ws:
        x = _layer(x, w)
        out.append(_reduce(w * x) * 0.5)
    return (x, *out)


def _is_grad(n: fx.Node) -> bool:
    return is_collective(n) or is_wait(n) or (n.op == "call_function" and n.args[1:] == (0.5,))


def test_reductions_are_awaited_a_layer_later() -> None:
    gm = _trace(_backward, [(4,), *[(4,)] * 6], _is_grad)
    assert blocking(gm) == 6
    later = defer(gm, [None] * 7)
    assert [window for _, window in overlapped(later)] == [17, 17, 17, 17, 17, 0]
    calls = [n for n in later.graph.nodes if n.op == "call_function"]
    for n in calls:
        if is_collective(n):
            assert n.prev is n.args[0], "issued right behind the gradient"
        if is_wait(n):
            assert n.next in n.users, "what follows the wait comes with it"
    # At any time one reduction is in flight when the next is issued.
    assert _in_flight(later) == 2 * 8


def test_two_reductions_of_one_gradient() -> None:
    def f(x: torch.Tensor, *ws: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = []
        for w in ws:
            x = _layer(x, w)
            out.append(c10d.wait_tensor(c10d.all_reduce(_reduce(w * x), "sum", "g.pp")))
        return (x, *out)

    gm = _trace(f, [(4,), *[(4,)] * 6], _is_grad)
    windows = {n.name: w for n, w in overlapped(defer(gm, [None] * 7))}
    assert [w for n, w in windows.items() if "scatter" in n] == [17, 17, 17, 17, 17, 0]
    assert [w for n, w in windows.items() if "all_reduce" in n] == [17, 17, 17, 17, 0, 0]


def test_other_reductions_stay() -> None:
    """A reduction of an activation's gradient is no parameter's."""
    gm = _trace(_backward, [(4,), *[(4,)] * 6])
    assert _text(defer(gm, [None] * 7)) == _text(gm)


@pytest.mark.parametrize("rewrite", [prefetch, defer])
def test_the_same_calls_in_another_order(rewrite: Any) -> None:
    def f(x: torch.Tensor, *ws: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _backward(x, *(_gather(w) for w in ws))

    gm = _trace(f, [(4,), *[(2,)] * 6], _is_grad)
    roles = [INPUT, *[PARAM] * 6]
    out = rewrite(gm, roles)
    lines = [[n.format_node() for n in g.graph.nodes] for g in (gm, out, rewrite(gm, roles))]
    assert lines[0] != lines[1] and sorted(map(str, lines[0])) == sorted(map(str, lines[1]))
    assert lines[1] == lines[2]
    assert {n.name for n in mark(gm, roles).graph.nodes if "overlap" in n.meta} == {n.name for n in out.graph.nodes if "overlap" in n.meta}
