"""Where programs are cut into stages: by layers found in them, balanced, with little that crosses."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.capture.belongs import belongs
from autopar.capture.capture import Call, Captured, capture, off_cache
from autopar.capture.describe import describe
from autopar.errors import LayoutError
from autopar.graph.graph import Graph
from autopar.passes.stages.separate import owner, separate
from autopar.planner.cuts import balanced, cut_into, free_ops, producers, shares, stages_of
from autopar.planner.layout import Layout
from autopar.planner.propagate import propagate
from tests.models import ZOO


def captured(name: str, layers: int) -> tuple[Captured, Graph]:
    torch.manual_seed(0)
    model = ZOO[name].build(layers).train()
    call = Call.of((), off_cache(model, ZOO[name].inputs(4, 16)))
    found = capture(model, call, tuple((tuple(t.shape), t.dtype) for t in call.tensors))
    return found, describe(found)


def crossing(graph: Graph, stage: dict[str, int], direction: str) -> dict[int, set[str]]:
    """What the operators of each stage read of others, by the stage that makes it."""
    of = {op.name: op for op in graph.ops}
    found: dict[int, set[str]] = {}
    for op in graph.ops:
        for t, a in zip(op.inputs, producers(op), strict=True):
            if op.name in stage and a in stage and stage[a] != stage[op.name] and of[a].direction == direction:
                found.setdefault(stage[a], set()).add(t.name)
    return found


@pytest.mark.parametrize(
    ("name", "layers", "forward"),
    [
        ("llama", [f"model.layers.{i}" for i in range(4)], {0: 1, 1: 1, 2: 1}),
        ("gpt2", [f"transformer.h.{i}" for i in range(4)], {0: 1, 1: 1, 2: 1}),
        ("t5", ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"], {0: 2, 1: 1, 2: 3}),
    ],
)
def test_one_hidden_state_crosses(name: str, layers: list[str], forward: dict[int, int]) -> None:
    """T5's stages hand on position biases, the results of a parameter of their first layer, and decoders the encoder's. Masks and rotary tables are nobody's."""
    found, graph = captured(name, 2 if name == "t5" else 4)
    matches = belongs(found.gm, graph)
    cut = cut_into(graph, matches, 4)
    assert [x for stage in cut.stages for x in stage] == layers
    stage = stages_of(graph, matches, cut)
    assert {s: len(x) for s, x in crossing(graph, stage, "forward").items()} == forward
    for op in graph.ops:
        for a in producers(op):
            if op.name in stage and a in stage:
                both = {o.name: o.direction for o in graph.ops if o.name in (op.name, a)}
                if both[op.name] == "forward":
                    assert stage[a] <= stage[op.name]
                elif both[a] == "backward":
                    assert stage[a] >= stage[op.name]
    assert set(stage) == {op.name for op in graph.ops} - free_ops(graph)
    work = shares(graph, stage, 4)
    assert sum(map(sum, work)) == pytest.approx(1)


def test_a_tied_weight_is_two_parameters() -> None:
    found, graph = captured("gpt2", 2)
    matches = belongs(found.gm, graph)
    stage = stages_of(graph, matches, cut_into(graph, matches, 2))
    plan = propagate(graph, Layout(name="ddp"), {"dp": 1}, frozenset(graph.params), {})
    parts = separate(found, graph, plan, stage)
    tied = "transformer.wte.weight"
    assert parts.holders[tied] == (0, 1)
    assert all(len(stages) == 1 for p, stages in parts.holders.items() if p != tied)
    assert set(parts.graph.params) == {*graph.params, tied + "@1"} == set(parts.plan.params)
    assert owner(tied + "@1") == tied
    assert set(parts.graph.grads) == {*graph.grads, tied + "@1"}
    sums = [o for o in graph.ops if o.name == graph.grads[tied]]
    assert sums[0].target == "aten.add.Tensor" and sums[0].name not in {o.name for o in parts.graph.ops}
    assert {o.name for o in parts.graph.ops} < {o.name for o in graph.ops}
    # What was captured is as it was: other variants are made of it.
    assert describe(found) == graph


def test_more_stages_than_layers() -> None:
    found, graph = captured("llama", 2)
    with pytest.raises(LayoutError, match=r"3 stages needs as many layers, and the model has 2\n.*model.layers.0, model.layers.1"):
        cut_into(graph, belongs(found.gm, graph), 3)


@given(st.lists(st.integers(1, 9).map(float), min_size=1, max_size=9), st.integers(1, 5))
def test_the_slowest_stage_is_as_fast_as_can_be(work: list[float], stages: int) -> None:
    if stages > len(work):
        return

    def slowest(ends: tuple[int, ...]) -> float:
        return max(sum(work[a:b]) for a, b in zip((0, *ends[:-1]), ends, strict=True))

    ends = balanced(work, stages)
    assert ends[-1] == len(work) and len(ends) == stages and list(ends) == sorted(set(ends))
    assert slowest(ends) == min(slowest((*c, len(work))) for c in combinations(range(1, len(work)), stages - 1))
