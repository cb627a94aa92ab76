"""The replay's answers are computed here by hand: times, exposed communication and memory of steps of a few calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autopar import _torch
from autopar.graph.calls import part_bytes, wire_bytes
from autopar.passes.overlap import blocking_of
from autopar.passes.partition import Parts
from autopar.simulate.simulator import price_ops, records
from autopar.timeline.replay import COMPUTE, Record, Replay, replay

c10d = torch.ops._c10d_functional


def _call(name: str, seconds: float, *inputs: str, stream: str = COMPUTE, alloc: int = 0, free: int = 0) -> Record:
    return Record(name, stream, seconds, inputs, alloc, free)


def _spans(r: Replay) -> dict[str, tuple[float, float]]:
    return {s.name: (s.start_s, s.end_s) for s in r.timeline}


def test_a_blocking_collective_is_exposed() -> None:
    r = replay([_call("a", 2.0), _call("gather", 3.0, stream="intra"), _call("wait", 0.0, "gather"), _call("b", 1.0, "wait")])
    assert _spans(r) == {"a": (0, 2), "gather": (2, 5), "wait": (5, 5), "b": (5, 6)}
    assert (r.seconds, r.exposed_s, r.busy_s["compute"], r.busy_s["intra"], r.busy_s["inter"]) == (6, 3, 3, 3, 0)
    assert [s.waited_s for s in r.timeline] == [0, 0, 3, 0]


def test_what_is_issued_ahead_hides() -> None:
    """3 s of communication behind 2 s of computation: 1 s shows."""
    r = replay([_call("gather", 3.0, stream="intra"), _call("a", 2.0), _call("wait", 0.0, "gather"), _call("b", 1.0, "wait")])
    assert (r.seconds, r.exposed_s) == (4, 1)
    r = replay([_call("gather", 2.0, stream="intra"), _call("a", 2.0), _call("wait", 0.0, "gather"), _call("b", 1.0, "wait")])
    assert (r.seconds, r.exposed_s) == (3, 0)


def test_links_are_busy_one_at_a_time_each() -> None:
    """Two gathers on one link queue up; the other link's runs beside them; a copy out starts when its input is there."""
    step = [
        _call("g1", 2.0, stream="intra"), _call("g2", 2.0, stream="intra"), _call("r", 3.0, stream="inter"), _call("a", 1.0),
        _call("out", 4.0, "a", stream="d2h"), _call("w1", 0.0, "g1"), _call("b", 1.0, "w1"), _call("w2", 0.0, "g2"), _call("c", 1.0, "r"),
    ]  # fmt: skip
    r = replay(step)
    assert _spans(r) == {
        "g1": (0, 2), "g2": (2, 4), "r": (0, 3), "a": (0, 1), "out": (1, 5), "w1": (2, 2), "b": (2, 3), "w2": (4, 4), "c": (4, 5),
    }  # fmt: skip
    assert (r.seconds, r.exposed_s) == (5, 2)
    assert {k: t for k, t in r.busy_s.items() if t} == {"compute": 3, "intra": 4, "inter": 3, "d2h": 4}


def test_what_is_still_sent_at_the_end_is_exposed() -> None:
    r = replay([_call("a", 1.0), _call("reduce", 2.0, "a", stream="inter")])
    assert (r.seconds, r.exposed_s) == (3, 2)


def test_peak_is_in_program_order() -> None:
    r = replay([_call("a", 1.0, alloc=5), _call("b", 1.0, alloc=3, free=5), _call("c", 1.0, alloc=4, free=3)], start_bytes=10)
    assert (r.peak_bytes, r.peak_at, r.end_bytes) == (18, "b", 14)


# ---- graphs --------------------------------------------------------------------------------------------------------


def _trace(f: Any, *shapes: tuple[int, ...]) -> Any:
    mode = _torch.new_fake_mode()
    with mode, torch.no_grad():
        gm = make_fx(f, tracing_mode="real", _allow_non_fake_inputs=True)(*(torch.empty(s) for s in shapes))
    for n in gm.graph.nodes:
        n.meta["op"] = n.name
    return gm


def _parts() -> Parts:
    """Forward saves a view of what it computes, and the parameter's gather; backward reads both, the gather first."""

    def forward(x: torch.Tensor, w: torch.Tensor) -> Any:
        whole = c10d.wait_tensor(c10d.all_gather_into_tensor(w * 2.0, 2, "g.s.dp"))  # 4 -> 8 floats
        y = torch.exp(x)  # 8 floats
        part, _ = torch.split(y.view(2, 4), 1)
        z = y * whole
        return z.sum(), part.view(4), whole

    def backward(part: torch.Tensor, whole: torch.Tensor, t: torch.Tensor) -> Any:
        g = whole * t
        return (c10d.wait_tensor(c10d.reduce_scatter_tensor(g, "sum", 2, "g.s.dp")), part * t)

    return Parts(_trace(forward, (8,), (4,)), (), (None,), ("view", "whole"), _trace(backward, (4,), (8,), ()), (), ())  # type: ignore[arg-type]


def test_records_of_a_step() -> None:
    parts = _parts()
    table, start = records(parts, lambda n: ("intra" if "c10d" in str(n.target) else COMPUTE, 1.0))
    got = {r.name.replace("_tensor", ""): r for r in table}
    assert start == (8 + 4) * 4
    # (bytes made, bytes free behind it); views are no records and keep what they look at.
    assert {k: (r.alloc_bytes, r.free_bytes) for k, r in got.items()} == {
        "forward.mul": (16, 0),
        "forward.all_gather_into": (32, 0),
        "forward.wait": (0, 16),  # what the gather reads is held until here
        "forward.exp": (32, 0),  # saved through two views of a part
        "forward.mul_1": (32, 0),
        "forward.sum_1": (4, 32),  # the loss lives on
        "backward.mul": (32, 32),  # the gathered parameter's last use
        "backward.reduce_scatter": (16, 0),
        "backward.wait": (0, 32),
        "backward.mul_1": (16, 32),
    }
    assert got["forward.mul_1"].inputs == ("forward.exp", "forward.wait_tensor")
    assert got["backward.mul"].inputs == ("forward.wait_tensor",)
    assert got["backward.mul_1"].inputs == ("forward.exp",)
    assert [r.stream for r in table if r.stream != COMPUTE] == ["intra"] * 2 and got["forward.wait"].seconds == 0
    r = replay(table, start)
    # Live besides the inputs: after the gather 48, 32 with exp 64, mul 96, sum 100 and 68 behind it; backward 100, 84, 52, 68, 36.
    assert (r.peak_bytes - start, r.peak_at, r.end_bytes - start) == (100, "forward.sum_1", 36)
    assert r.seconds == 8 and r.exposed_s == 2


def test_half_a_step() -> None:
    """Inference: nothing is saved, results live."""
    p = _parts()
    table, _ = records(SimpleNamespace(forward=p.forward, backward=None, saved=()), lambda n: (COMPUTE, 1.0))
    assert sum(r.alloc_bytes - r.free_bytes for r in table) == 32 + 32 + 4


def test_prices_of_ops() -> None:
    """An op's time is borne once in each half, a collective's goes by its bytes: 32 bytes among 2 ranks are 16 on the wire."""
    p = _parts()
    for gm in (p.forward, p.backward):
        for n in gm.graph.nodes:
            n.meta["op"] = "one"
    asked = []

    def collective(kind: str, axes: tuple[str, ...], wire: float) -> tuple[str, float]:
        asked.append((kind, axes, wire))
        return "inter", 0.25

    table, _ = records(p, price_ops(p, "g.s", lambda axes: 2, {"one": 2.0}.__getitem__, collective))
    assert [(r.name, r.seconds) for r in table if r.seconds] == [
        ("forward.all_gather_into_tensor", 0.25), ("forward.sum_1", 2.0),
        ("backward.reduce_scatter_tensor", 0.25), ("backward.mul_1", 2.0),
    ]  # fmt: skip
    assert asked == [("all_gather", ("dp",), 16.0), ("reduce_scatter", ("dp",), 16.0)]


@pytest.mark.parametrize(("width", "share"), [(2, 1.0), (4, 1.5)])
def test_an_all_reduce_sends_twice(width: int, share: float) -> None:
    gm = _trace(lambda x: c10d.wait_tensor(c10d.all_reduce(x, "sum", "g.dp")), (8,))
    (n,) = [n for n in gm.graph.nodes if "all_reduce" in n.name]
    assert wire_bytes(n, width) == share * 32


def test_blocking_collectives_of_a_step() -> None:
    """Of a gather with a call before its wait and a reduction without."""

    def forward(x: torch.Tensor, w: torch.Tensor) -> Any:
        sent = c10d.all_gather_into_tensor(w, 2, "g.dp")
        y = torch.exp(x)
        return y * c10d.wait_tensor(sent)

    def backward(x: torch.Tensor) -> Any:
        return c10d.wait_tensor(c10d.all_reduce(x * 2.0, "sum", "g.dp"))

    ahead, after = _trace(forward, (8,), (4,)), _trace(backward, (8,))
    assert blocking_of(Parts(ahead, (), (), (), after, (), ())) == (1, 2)
    assert blocking_of(Parts(ahead, (), (), (), None, (), ())) == (0, 1)


def test_sizes_may_be_others() -> None:
    """What fused kernels never write counts nothing."""
    p = _parts()
    table, start = records(
        p, lambda n: (COMPUTE, 1.0), lambda n: [0] * len(part_bytes(n)) if n.target is torch.ops.aten.mul.Tensor else part_bytes(n)
    )
    assert sum(r.alloc_bytes for r in table if ".mul" in r.name) == 0
    assert replay(table, start).peak_bytes - start == 32 + 32 + 4  # the gather, exp, the loss
