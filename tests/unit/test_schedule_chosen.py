"""The schedule of a pipeline where none is asked for: no slower than any that may be asked for, in memory, with its actions in the plan's file."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.capture.capture import Call, capture, off_cache
from autopar.capture.describe import describe
from autopar.cost.compute import HEAVY
from autopar.errors import AutoparError, LayoutError
from autopar.pipeline import Lists, scheduled, verified
from autopar.pipeline.named import NAMES
from autopar.plan import schema
from autopar.plan.plan import Plan
from autopar.planner.cuts import free_ops, layers, units
from autopar.planner.pipelined import LayerWork, layers_behind, waited_for
from autopar.planner.schedules import PAYS, fastest
from autopar.rules import lookup
from autopar.solver.fold import fold
from tests.models import ZOO
from tests.wide import cases


@functools.cache
def planned(schedule: str | None = None, name: str = "gpt2", ranks: int = 4, number: int = 8, **more: Any) -> Plan:
    torch.manual_seed(0)
    how = {"options": {"seconds": 30}, "precision": "bf16"}
    mesh = {"pp": ranks, "dp": 1}
    return autopar.plan(
        ZOO[name].build(8).train(),
        ZOO[name].inputs(16, 64),
        f"h100:1x{ranks}",
        mesh,
        micro_batches=number,
        schedule=schedule,
        **{**how, **more},
    )


@pytest.mark.parametrize(("name", "ranks", "number"), cases([("gpt2", 4, 8), ("gpt2", 2, 4), ("llama", 2, 16)], [("gpt2", 4, 8)]))
def test_no_slower_than_what_may_be_asked_for(name: str, ranks: int, number: int) -> None:
    plan = planned(None, name, ranks, number)
    assert "schedules tried: 1f1b: " in plan.text()
    for schedule in NAMES:
        try:
            other = planned(schedule, name, ranks, number)
        except LayoutError:  # not of so many micro-batches
            continue
        assert plan.predicted["step_time_s"] <= other.predicted["step_time_s"] * (1 + PAYS), (schedule, plan.text())
    assert plan.predicted["peak_memory_bytes"] <= plan.predicted["budget_bytes"]
    assert planned("1f1b", name, ranks, number).predicted["step_time_s"] > 1.05 * plan.predicted["step_time_s"]


def test_it_runs_and_is_in_the_file(tmp_path: Path) -> None:
    plan = planned()
    p = plan.pipeline
    assert p is not None and p.schedule == "filled" and len(p.actions) == 4
    again = Plan.loads(schema.dumps(plan))
    assert again.pipeline == p
    lists = p.lists(plan.micro_batches)
    assert verified(lists).where == p.where and lists.micro_batches == 8 and lists.splits_backward
    plan.to_perfetto(tmp_path / "trace.json")
    made = json.loads((tmp_path / "trace.json").read_text())
    assert made["otherData"]["step_s"] == pytest.approx(plan.predicted["pipeline_s"], rel=1e-3)
    for wrong in (p.actions[:-1], (*p.actions[:-1], "0F0"), ("what?",) * 4):
        with pytest.raises(AutoparError, match="actions"):
            Plan.loads(schema.dumps(replace(plan, pipeline=replace(p, actions=wrong))))


def told(seconds: dict[str, float], memory: dict[str, float], budget: float = 1.0) -> Any:
    """Plans of nothing but figures, by what a schedule is called."""
    plan = planned("1f1b")

    def made(lists: Lists) -> Plan:
        if lists.name not in seconds:
            raise LayoutError("not looked at")
        figures = {"step_time_s": seconds[lists.name], "peak_memory_bytes": memory.get(lists.name, 0.5), "budget_bytes": budget}
        assert plan.pipeline is not None
        return replace(plan, predicted=figures, pipeline=replace(plan.pipeline, schedule=lists.name)).answering_as(plan)

    return made


def none(lists: Lists) -> None:
    """No stages with policies of their own."""


def test_stages_with_policies_of_their_own_are_looked_at() -> None:
    """Of the fastest schedules, also those that do not fit; and taken where they fit, or are faster."""
    f1b, made = scheduled("1f1b", 4, 8), told({"1f1b": 1.0, "interleaved": 0.9, "zb-h1": 0.95}, {"interleaved": 1.5})
    asked: list[str] = []

    def by_stage(lists: Lists, takes: float) -> Plan:
        asked.append(lists.name)
        return told({lists.name: takes}, {})(lists)

    def never(lists: Lists) -> Plan:
        raise AssertionError(lists.name)

    plan = fastest(made(f1b), f1b, 8, {}, made, lambda x: by_stage(x, 0.91), never)
    assert asked[0] == "interleaved" and plan.predicted["step_time_s"] == 0.91 and "does not fit" not in str(plan.solver["schedules"])
    plan = fastest(made(f1b), f1b, 8, {}, made, lambda x: by_stage(x, 0.99), lambda x: made(f1b))
    assert plan.pipeline is not None and plan.pipeline.schedule == "zb-h1"


def test_what_does_not_fit_is_planned_for_itself() -> None:
    f1b, seconds = scheduled("1f1b", 4, 8), {"1f1b": 1.0, "interleaved": 0.9, "zb-h1": 0.95}
    made = told(seconds, {"interleaved": 1.5})
    asked: list[str] = []

    def again(lists: Lists, takes: float) -> Plan:
        asked.append(lists.name)
        return told({lists.name: takes}, {})(lists)

    kinds: dict[str, str] = {}
    plan = fastest(made(f1b), f1b, 8, kinds, made, none, lambda x: again(x, 0.92))
    assert plan.predicted["step_time_s"] == 0.92 and asked == ["interleaved"]
    # With less memory it makes so much again that the one that fits is faster.
    plan = fastest(made(f1b), f1b, 8, kinds, made, none, lambda x: again(x, 0.97))
    assert plan.pipeline is not None and plan.pipeline.schedule == "zb-h1"
    # By less than `PAYS` it is not worth it.
    almost = told({"1f1b": 1.0, "zb-h1": 0.996}, {})
    plan = fastest(almost(f1b), f1b, 8, kinds, almost, none, lambda x: again(x, 1.0))
    assert plan.pipeline is not None and plan.pipeline.schedule == "1f1b"


def test_backward_is_not_split_where_products_are_made_again() -> None:
    f1b, made = scheduled("1f1b", 4, 8), told({"1f1b": 1.0, "zb-h1": 0.5}, {})
    first = replace(made(f1b), recompute=frozenset({"mm_3"}))
    plan = fastest(first, f1b, 8, {"mm_3": "matmul"}, made, none, made)
    assert plan.pipeline is not None and plan.pipeline.schedule == "1f1b"
    assert fastest(first, f1b, 8, {"mm_3": "cheap"}, made, none, made).predicted["step_time_s"] == 0.5


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_no_other_stage_waits_for(name: str) -> None:
    """Behind the first layer it is one product of every linear layer, the one that gives its weight's gradient; the first layer's own backward nobody waits for."""
    torch.manual_seed(0)
    model = ZOO[name].build(4).train()
    call = Call.of((), off_cache(model, ZOO[name].inputs(4, 16)))
    graph = describe(capture(model, call, tuple((tuple(t.shape), t.dtype) for t in call.tensors)))
    free = free_ops(graph)
    number = {layer: i for i, layer in enumerate(layers(graph, free))}
    behind = layers_behind(graph, free, number, units(graph, free, number))
    waited = waited_for(graph, behind)
    for layer in range(4):
        products = [op for op in graph.ops if behind.get(op.name) == layer and lookup(op).kind in HEAVY and f".{layer}." in op.module]
        alone = [op for op in products if op.name not in waited]
        weights = [n for n in graph.params if f".{layer}." in n and n.endswith("weight") and len(graph.params[n].shape) == 2]
        assert len(alone) == (len(products) if layer == 0 else len(weights)), (layer, [op.name for op in alone])
    work = LayerWork.of(fold(graph), model)
    assert work.weight[0] == pytest.approx(work.backward[0], rel=0.1)
    for b, w in zip(work.backward[1:], work.weight[1:], strict=True):
        assert 0.35 * b < w < 0.55 * b
