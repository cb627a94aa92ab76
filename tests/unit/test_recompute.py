"""What backward makes again: exactly the calls of the named ops, right before they are needed, to the same bits, for fewer bytes saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autopar.capture.capture import Role
from autopar.passes.partition import Parts, partition
from autopar.passes.recompute import recomputable, saved_bytes
from autopar.passes.shard import Sharded
from autopar.simulate.simulator import records
from autopar.timeline.replay import COMPUTE, replay

c10d = torch.ops._c10d_functional
aten = torch.ops.aten
FLOATS = 4


class _Joint:
    """A joint graph by hand: every value has 4 floats, every call an op of its name."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.roles: list[Role] = []

    def place(self, name: str, role: Role) -> fx.Node:
        self.roles.append(role)
        return self._node(self.graph.placeholder(name), "backward" if role.kind == "tangent" else "forward", "")

    def call(self, name: str, target: Any, *args: Any, direction: str = "forward", op: str = "") -> fx.Node:
        return self._node(self.graph.create_node("call_function", target, args, name=name), direction, op or name)

    def _node(self, n: fx.Node, direction: str, op: str) -> fx.Node:
        n.meta.update(val=torch.empty(FLOATS), direction=direction, op=op)
        return n

    def done(self, results: list[fx.Node], roles: list[Role]) -> Sharded:
        self.graph.output(tuple(results))
        return Sharded(fx.GraphModule(torch.nn.Module(), self.graph), tuple(self.roles), tuple(roles), (), None)


def _chain(depth: int) -> Sharded:
    """x -> tanh of a gathered sum, `depth` times; backward reads every tanh, the last first."""
    j = _Joint()
    x, w = j.place("x", Role("input", "", 0)), j.place("w", Role("param", "w"))
    t = j.place("t", Role("tangent", "", 0))
    whole = j.call("whole", c10d.wait_tensor.default, j.call("gather", c10d.all_gather_into_tensor.default, w, 1, "g.dp", op="a0"), op="a0")
    ys = []
    for i in range(depth):
        s = j.call(f"sum{i}", aten.add.Tensor, x, whole, op=f"a{i}")
        r = j.call(
            f"wait{i}", c10d.wait_tensor.default, j.call(f"reduce{i}", c10d.all_reduce.default, s, "sum", "g.tp", op=f"t{i}"), op=f"t{i}"
        )
        x = j.call(f"tanh{i}", aten.tanh.default, r, op=f"t{i}")
        ys.append(x)
    g = t
    for i in reversed(range(depth)):
        g = j.call(f"back{i}", aten.tanh_backward.default, g, ys[i], direction="backward")
        g = j.call(f"scale{i}", aten.mul.Tensor, g, whole, direction="backward")
    return j.done([x, g], [Role("output", "", 0), Role("grad", "w")])


def _backward_names(parts: Parts) -> list[str]:
    assert parts.backward is not None
    return [n.name for n in parts.backward.graph.nodes if n.op == "call_function"]


def test_exactly_the_named_ops() -> None:
    s = _chain(3)
    assert recomputable(s) == {"a0", "a1", "a2", "t0", "t1", "t2"}
    parts = partition(s)
    assert parts.saved == ("tanh0", "tanh1", "tanh2")
    assert _backward_names(parts) == ["back2", "gather", "whole", "scale2", "back1", "scale1", "back0", "scale0"]
    # t1 alone: its all-reduce is of its operand, and so repeated; the sum that it reads is saved.
    parts = partition(s, recompute=frozenset({"t1"}))
    assert parts.saved == ("tanh0", "sum1", "tanh2")
    assert _backward_names(parts)[:8] == ["back2", "gather", "whole", "scale2", "reduce1", "wait1", "tanh1", "back1"]
    # With its sum: made from the tanh before, which backward reads as well.
    parts = partition(s, recompute=frozenset({"t1", "a1"}))
    assert parts.saved == ("tanh0", "tanh2")
    assert _backward_names(parts)[4:9] == ["sum1", "reduce1", "wait1", "tanh1", "back1"]
    assert saved_bytes(parts.forward, 2) == 2 * 4 * FLOATS


def test_a_parameter_is_gathered_again_as_the_plan_says_not_with_an_op() -> None:
    s = _chain(2)
    parts = partition(s, reshard_after_forward=False, recompute=recomputable(s))
    assert parts.saved == ("x", "whole") and "gather" not in _backward_names(parts)
    parts = partition(s, recompute=recomputable(s))
    assert parts.saved == ("x",) and _backward_names(parts).count("gather") == 1


def test_layer_by_layer_is_no_early_start() -> None:
    """Sums recomputed from saved tanhs appear one before each use, so the peak stays that of one."""
    s = _chain(6)
    keep = frozenset(f"{k}{i}" for i in (1, 3, 5) for k in "at")
    parts = partition(s, recompute=keep)
    names = _backward_names(parts)
    for i in (1, 3, 5):
        assert names.index(f"back{i}") - names.index(f"tanh{i}") == 1
        assert i == 5 or names.index(f"sum{i}") > names.index(f"scale{i + 1}")
    peaks = []
    for p in (partition(s), parts):
        table, start = records(p, lambda n: (COMPUTE, 1.0))
        peaks.append(replay(table, start).peak_bytes)
    assert peaks[1] < peaks[0], peaks


def test_a_chain_longer_than_the_stack() -> None:
    s = _chain(2000)
    parts = partition(s, recompute=recomputable(s))
    assert parts.saved == ("x",) and len(_backward_names(parts)) == 2 * 2000 + 2 + 4 * 2000


@pytest.mark.parametrize("ops", [(), ("a0", "t0"), ("t2", "a2", "t1", "a1", "t0", "a0")])
def test_the_same_bits(ops: tuple[str, ...]) -> None:
    """Collectives over one rank, stood in for by copies."""
    parts = partition(_chain(3), recompute=frozenset(ops))
    stand_in = {c10d.wait_tensor.default: lambda x: x, c10d.all_reduce.default: lambda x, *_: x.clone()}
    stand_in[c10d.all_gather_into_tensor.default] = lambda x, *_: x.clone()

    class Run(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            return stand_in.get(target, target)(*args, **kwargs)

    x, w, t = torch.linspace(-1, 1, FLOATS), torch.linspace(0.1, 0.4, FLOATS), torch.linspace(1, 2, FLOATS)
    values = {"param": w, "input": x, "tangent": t}
    out, *saved = Run(parts.forward).run(*(values[r.kind] for r in parts.forward_inputs))
    assert parts.backward is not None
    (g,) = Run(parts.backward).run(*saved, *(values[r.kind] for r in parts.backward_inputs))
    ys = [x]
    for _ in range(3):
        ys.append(torch.tanh(ys[-1] + w))
    want = t
    for y in reversed(ys[1:]):
        want = aten.tanh_backward(want, y) * w
    assert torch.equal(out, ys[-1]) and torch.equal(g, want)
