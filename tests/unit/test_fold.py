"""Folding repeated layers, and folding deep programs from shallow captures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture.capture import Call, capture
from autopar.capture.describe import describe
from autopar.capture.tile import expand_params, layer_periods, tiled
from autopar.errors import CaptureError
from autopar.graph.graph import Graph, Op, Tensor
from autopar.solver.fold import Folded, fold, folded
from tests import models
from tests.experts import build
from tests.wide import cases, wide

# ---- graphs made by hand -----------------------------------------------------------------------------------------


class Maker:
    """A program of layers y = relu(x w) * shared, with its backward, in the order that autograd gives."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.params: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}

    def tensor(self, name: str, shape: tuple[int, ...] = (8, 4)) -> Tensor:
        self.tensors[name] = Tensor(name, shape, "float32")
        return self.tensors[name]

    def param(self, name: str) -> Tensor:
        self.params[name] = self.tensor(f"primal_{len(self.params)}", (4, 4))
        return self.params[name]

    def op(self, target: str, *args: Any, backward: bool = False, shape: tuple[int, ...] = (8, 4)) -> Tensor:
        out = self.tensor(f"op_{len(self.ops)}", shape)
        self.ops.append(Op(out.name, target, args, {}, (out,), "backward" if backward else "forward"))
        return out


def program(
    layers: int, activation: Callable[[int], str] = lambda i: "relu", reads: Callable[[int, list[Tensor]], Tensor] | None = None
) -> Graph:
    """reads: (layer, results of the layers before, and the input) -> what the layer reads; by default the last of them."""
    m = Maker()
    x = m.tensor("x")
    shared = [m.op("cos", x), m.op("sin", x)]
    tangent = m.tensor("tangent", ())
    head = m.op("mm", x, m.param("embed.weight"))
    streams, saved = [head], []
    for i in range(layers):
        source = reads(i, streams) if reads else streams[-1]
        w = m.param(f"layers.{i}.weight")
        z = m.op("mm", source, w)
        a = m.op(activation(i), z)
        saved.append((source, w, z))
        streams.append(m.op("mul", a, shared[0]))
    loss = m.op("mean", streams[-1], shape=())
    grads = {}
    g = m.op("expand", tangent, backward=True)
    for i in reversed(range(layers)):
        source, w, z = saved[i]
        g = m.op("mul", g, shared[0], backward=True)
        g = m.op(f"{activation(i)}_backward", g, z, backward=True)
        grads[f"layers.{i}.weight"] = m.op("mm_weight", source, g, backward=True, shape=(4, 4)).name
        g = m.op("mm_input", g, w, backward=True)
    grads["embed.weight"] = m.op("mm_weight", x, g, backward=True, shape=(4, 4)).name
    return Graph(m.params, {}, (x,), (tangent,), (0,), tuple(m.ops), (loss.name,), grads, {}, m.tensors)


def check(f: Folded) -> None:
    """Every two operators of a class are the same operator and are wired alike."""
    g = f.graph
    ops = {op.name: op for op in g.ops}
    classes: dict[str, list[Op]] = {}
    for op in g.ops:
        classes.setdefault(f.rep[op.name], []).append(op)
    copy = {n: (s, k) for s, stack in enumerate(f.stacks) for k, c in enumerate(stack.forward) for n in c}
    copy |= {n: (s, k) for s, stack in enumerate(f.stacks) for k, c in enumerate(stack.backward) for n in c}
    leaf_copy = {n: (s, k) for s, stack in enumerate(f.stacks) for k, c in enumerate(stack.leaves) for n in c}
    made_by = {t.name: op.name for op in g.ops for t in op.outputs if t}

    def where(tensor: str) -> tuple[int, int]:
        return copy.get(made_by.get(tensor, ""), leaf_copy.get(tensor, (-1, 0)))

    def constants(op: Op) -> str:
        def text(x: Any) -> Any:
            if isinstance(x, Tensor):
                return x.shape, x.dtype
            return [text(y) for y in x] if isinstance(x, (tuple, list)) else x

        return repr(
            (
                op.target,
                op.direction,
                text(op.args),
                {k: text(v) for k, v in op.kwargs.items()},
                [t and (t.shape, t.dtype) for t in op.outputs],
            )
        )

    for rep, members in classes.items():
        assert ops[rep] in members and f.rep[rep] == rep
        assert len({constants(op) for op in members}) == 1
        if len(members) == 1:
            continue
        s, middle = copy[rep]
        n = f.stacks[s].copies
        assert sorted(copy[op.name] for op in members) == [(s, k) for k in range(n)]
        for op in members:
            k = copy[op.name][1]
            for mine, theirs in zip(op.inputs, ops[rep].inputs, strict=True):
                (s1, k1), (s2, k2) = where(mine.name), where(theirs.name)
                if s2 != s and s1 != s:
                    assert mine.name == theirs.name  # the same shared value
                elif s1 == s and s2 == s and k1 - k == k2 - middle:
                    assert f.tensor_rep[mine.name] == f.tensor_rep[theirs.name]
                else:  # an end of the stack: the copy that the other reads does not exist here
                    beyond = [k + k2 - middle] if s2 == s else [middle + k1 - k]
                    assert any(not 0 <= b < n for b in beyond), (op.name, rep)
                    assert n == 2 or s2 == s, "the representative reads what is read in the middle"
    assert set(f.tensor_rep) == set(g.tensors)
    assert set(f.tensor_rep.values()) == set(f.tensor_count)
    for name, rep in f.tensor_rep.items():
        assert (g.tensors[name].shape, g.tensors[name].dtype) == (g.tensors[rep].shape, g.tensors[rep].dtype)
    for parameter, t in g.params.items():
        if parameter in g.grads:
            rep = next(n for n, x in g.params.items() if x.name == f.tensor_rep[t.name])
            assert f.tensor_rep[g.grads[parameter]] == f.tensor_rep[g.grads[rep]]
            assert f.tensor_count[f.tensor_rep[t.name]] == f.tensor_count[f.tensor_rep[g.grads[parameter]]]


def test_layers_fold() -> None:
    f = fold(program(5))
    check(f)
    assert f.depth == {"layers": 5}
    assert f.unfolded == ()
    assert len(f.graph.ops) - len(f.count) == 4 * (3 + 4)
    assert sum(f.count.values()) == len(f.graph.ops)
    assert f.count[f.rep["op_3"]] == 5
    # Forward and backward of the representative layer belong together.
    ops = {op.name: op for op in f.graph.ops}
    relu = next(r for r in f.count if ops[r].target == "relu")
    gradient = next(r for r in f.count if ops[r].target == "relu_backward")
    assert ops[gradient].inputs[1] == ops[relu].inputs[0]
    assert ops[relu].inputs[0].name == f.stacks[0].forward[3][0]


def test_check_sees_wrong_pairs() -> None:
    """Backward copies in the order of execution belong to other forward copies."""
    f = fold(program(5))
    (stack,) = f.stacks
    for wrong in (replace(stack, backward=stack.backward[::-1]), replace(stack, leaves=stack.leaves[::-1])):
        with pytest.raises(AssertionError):
            check(folded(f.graph, (wrong,), f.copies))


def test_two_layers_fold() -> None:
    f = fold(program(2))
    check(f)
    assert f.depth == {"layers": 2}


def test_one_layer_does_not() -> None:
    f = fold(program(1))
    assert f.depth == {} and len(f.count) == len(f.graph.ops)


def test_odd_operator_in_the_middle() -> None:
    f = fold(program(9, lambda i: "gelu" if i == 4 else "relu"))
    check(f)
    assert f.depth == {"layers": 4, "layers'": 4}
    assert [u.split(":")[0] for u in f.unfolded] == ["layers.4"]
    gelu = next(op.name for op in f.graph.ops if op.target == "gelu")
    assert f.count[gelu] == 1


def test_odd_wiring_in_the_middle() -> None:
    """Layer 4 has the operators of all others but reads the embedding: it may at most be the first of a stack."""
    f = fold(program(9, reads=lambda i, streams: streams[0] if i == 4 else streams[-1]))
    check(f)
    inside = [k for stack in f.stacks for k, c in enumerate(stack.forward) if "op_15" in c]
    assert inside in ([], [0])


def test_skips_to_the_layer_before_last() -> None:
    f = fold(program(8, reads=lambda i, streams: streams[max(0, len(streams) - 2)]))
    check(f)
    assert f.depth["layers"] >= 6


def test_period_of_three() -> None:
    f = fold(program(11, lambda i: "relu" if (i + 1) % 3 else "gelu"))
    check(f)
    assert (f.stacks[0].copies, f.depth["layers"]) in ((3, 9), (3, 3))
    assert len(f.graph.ops) - len(f.count) >= 2 * 3 * 7


def test_text_tells_programs_apart() -> None:
    a = fold(program(6)).fingerprint()
    assert a == fold(program(6)).fingerprint()
    others = [
        program(7),
        program(6, lambda i: "gelu"),
        program(6, reads=lambda i, streams: streams[0]),
        program(6, reads=lambda i, streams: streams[-2] if i == 5 else streams[-1]),
    ]
    prints = {fold(g).fingerprint() for g in others}
    assert a not in prints and len(prints) == len(others)
    assert fold(program(7)).form() == fold(program(6)).form()


def renamed(g: Graph) -> Graph:
    """The same graph with other node names."""

    def new(x: Any) -> Any:
        if isinstance(x, Tensor):
            return Tensor(f"n_{x.name}", x.shape, x.dtype)
        return tuple(map(new, x)) if isinstance(x, tuple) else x

    ops = tuple(Op(f"n_{o.name}", o.target, new(o.args), {}, new(o.outputs), o.direction) for o in g.ops)
    return Graph(
        {n: new(t) for n, t in g.params.items()},
        {},
        new(g.inputs),
        new(g.tangents),
        g.tangent_of,
        ops,
        tuple(f"n_{n}" for n in g.outputs),
        {n: f"n_{t}" for n, t in g.grads.items()},
        {},
        {f"n_{n}": new(t) for n, t in g.tensors.items()},
    )


def test_text_has_no_node_names() -> None:
    assert fold(program(6)).fingerprint() == fold(renamed(program(6))).fingerprint()


# ---- tiling of graphs made by hand ---------------------------------------------------------------------------------


def counted(capture_at: Callable[[Any], Graph]) -> tuple[Callable[[Any], Graph], list[Any]]:
    seen: list[Any] = []

    def wrapped(layers: Any) -> Graph:
        seen.append(layers)
        return capture_at(layers)

    return wrapped, seen


def equal(t: Folded, full: Folded) -> None:
    assert t.lines == full.lines
    assert t.fingerprint() == full.fingerprint()
    assert sum(t.count.values()) == len(full.graph.ops)
    assert t.depth == full.depth
    assert sum(t.tensor_count.values()) == len(full.graph.tensors)


def test_tiled() -> None:
    capture_at, seen = counted(program)
    t = tiled(capture_at, 40)
    assert seen == [2, 3]
    equal(t, fold(program(40)))
    check(t)


def test_tiled_from_two_captures_at_once() -> None:
    asked: list[tuple[Graph, Graph]] = []

    def both(first: Callable[[], Graph], second: Callable[[], Graph]) -> tuple[Graph, Graph]:
        b = second()
        asked.append((first(), b))
        return asked[-1]

    capture_at, seen = counted(program)
    t = tiled(capture_at, 40, 1, both)
    assert seen == [3, 2] and len(asked) == 1 and t.graph is asked[0][1]
    assert (t.lines, t.copies, t.note) == ((u := tiled(program, 40)).lines, u.copies, u.note)
    seen.clear()
    assert tiled(capture_at, 3, 1, both).fingerprint() == fold(program(3)).fingerprint()
    assert seen == [2, 3] and len(asked) == 1, "two captures would not do"


@pytest.mark.parametrize("depth", [12, 13, 14])
def test_tiled_with_a_period(depth: int) -> None:
    capture_at, seen = counted(functools.partial(program, activation=lambda i: "relu" if (i + 1) % 3 else "gelu"))
    t = tiled(capture_at, depth, 3)
    assert max(seen) < depth
    equal(t, fold(capture_at(depth)))


def test_constant_that_depends_on_depth() -> None:
    def capture_at(layers: int) -> Graph:
        return program(layers, lambda i: f"scale_{layers}")

    capture_counted, seen = counted(capture_at)
    t = tiled(capture_counted, 20)
    assert seen[-1] == 20 and "in full" in t.note
    equal(t, fold(capture_at(20)))


def test_layers_that_all_differ() -> None:
    t = tiled(lambda n: program(n, lambda i: f"scale_{i}"), 12)
    assert ("in full" in t.note and len(t.unfolded) == 0) or all("layers" in u for u in t.unfolded)
    assert len(t.count) == len(t.graph.ops)


def test_expand_params() -> None:
    def capture_at(n: int) -> Graph:
        return program(n, lambda i: "relu" if (i + 1) % 3 else "gelu")

    t, full = tiled(capture_at, 14, 3), fold(capture_at(14))
    expanded = expand_params(t, {n: x.shape for n, x in full.graph.params.items()})
    assert set(expanded) == set(full.graph.params)
    own = {x.name: n for n, x in t.graph.params.items()}
    for a in expanded:
        for b in expanded:
            same = full.tensor_rep[full.graph.params[a].name] == full.tensor_rep[full.graph.params[b].name]
            assert same == (expanded[a] == expanded[b]), (a, b)
    counts = {n: t.tensor_count[x] for x, n in own.items() if x in t.tensor_count}
    for rep, count in counts.items():
        assert sum(r == rep for r in expanded.values()) == count
    with pytest.raises(CaptureError, match=r"layers\.7\.weight"):
        expand_params(t, {"layers.7.weight": (4, 5)})


# ---- captured models -----------------------------------------------------------------------------------------------


@functools.cache
def captured(name: str, layers: int, decoder: int = 0, grad: bool = True) -> Graph:
    model = models.ZOO[name].build(layers)
    if decoder:
        config = {**model.config.to_dict(), "num_layers": layers, "num_decoder_layers": decoder}
        model = type(model)(type(model.config)(**config))
    call = Call.of((), {**models.ZOO[name].inputs(2, 8), "use_cache": False})
    return describe(capture(model, call, tuple((tuple(t.shape), t.dtype) for t in call.tensors), grad=grad))


def test_gemma3() -> None:
    """Two periods of three layers, and two more layers."""
    f = fold(captured("gemma3", 8))
    check(f)
    assert f.unfolded == ()
    assert f.depth == {"model.layers": 6, "model.layers'": 2}


# Gemma-3 with the forward alone: its backward is in the test above, and captures take long.
@pytest.mark.parametrize(
    ("name", "depth", "period", "grad"),
    cases(
        [("llama", 4, 1, True), ("gpt2", 4, 1, True), ("mixtral", 4, 1, True), ("gemma3", 14, 3, False)],
        [("gpt2", 4, 1, True)],
    ),
)
def test_models(name: str, depth: int, period: int, grad: bool) -> None:
    full = fold(captured(name, depth, grad=grad))
    check(full)
    assert full.unfolded == ()
    assert sum(full.count.values()) == len(full.graph.ops)
    assert next(iter(full.depth.values())) == depth - depth % period
    capture_at, seen = counted(lambda n: captured(name, n, grad=grad))
    t = tiled(capture_at, depth, period)
    assert seen == [2 * period + depth % period, 3 * period + depth % period]
    check(t)
    equal(t, full)
    shapes = {n: x.shape for n, x in full.graph.params.items()}
    expanded = expand_params(t, shapes)
    own = {x.name: n for n, x in full.graph.params.items()}
    assert expanded.keys() == shapes.keys()
    for n, x in full.graph.params.items():
        assert expanded[n] == expanded[own[full.tensor_rep[x.name]]]
    assert len(set(expanded.values())) == len({full.tensor_rep[x.name] for x in full.graph.params.values()})


@wide
def test_t5() -> None:
    """Two stacks of different depths; the first layer of each computes the position bias, the last begins its gradient."""
    full = fold(captured("t5-attention", 6, 7))
    check(full)
    assert full.depth == {"encoder.block": 4, "decoder.block": 5}
    assert len(full.unfolded) == 4
    t = tiled(
        lambda n: captured("t5-attention", n["encoder.block"], n["decoder.block"]),
        {"encoder.block": 6, "decoder.block": 7},
    )
    assert "in full" not in t.note
    check(t)
    equal(t, full)


def test_no_backward() -> None:
    model = models.ZOO["llama"].build(3)
    call = Call.of((), {"input_ids": torch.zeros(2, 8, dtype=torch.int64), "use_cache": False})
    f = fold(describe(capture(model, call, (((2, 8), torch.int64),), grad=False)))
    check(f)
    assert f.depth == {"model.layers": 3} and not f.stacks[0].backward[0]


def test_layer_periods() -> None:
    import transformers as T

    with torch.device("meta"):
        small = dict(vocab_size=96, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=64)
        gemma = T.Gemma3ForCausalLM(T.Gemma3TextConfig(num_hidden_layers=14, **small))
        assert layer_periods(gemma) == {"model.layers": (14, 6, 0)}
        assert layer_periods(models.ZOO["llama"].build(4)) == {"model.layers": (4, 1, 0)}
        assert layer_periods(models.ZOO["t5"].build(4)) == {"encoder.block": (4, 1, 1), "decoder.block": (4, 1, 1)}
        different = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 5))
        assert layer_periods(different) == {"": (3, 3, 0)}
        assert layer_periods(build("deepseek_v3", "eager", first_k_dense_replace=3, num_hidden_layers=9)) == {"model.layers": (9, 1, 3)}
