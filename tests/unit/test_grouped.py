"""Where a plan of equal layers does not fit, some neighbours are planned as one: less memory, the same gradients, and the plan can be stored and taken up again."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar.capture.capture import Role
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.planner import budgets
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.planning import Limits, Planned, Step, plan_graph
from autopar.planner.refit import PlanMismatchError, refit
from autopar.solver.fold import fold, grouped, handed_on_bytes
from autopar.solver.solve import Solution
from benchmarks.baselines.measure import lowered, tensors
from benchmarks.baselines.program import Program, capture_program
from tests.wide import cases, wide

LAYERS = 4
LIMITS = Limits(gap=0.01, seconds=60.0)


@functools.cache
def captured(name: str, layers: int = LAYERS) -> Program:
    """With many words, so that the peak is where the loss is, and all that layers hand on is there."""
    torch.manual_seed(0)
    if name == "llama":
        size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
        model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, vocab_size=8192, **size))
    else:
        model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=layers, n_head=4, vocab_size=8192))
    words = torch.randint(0, 64, (4, 64))
    return capture_program(
        model.train(), {"input_ids": words, "labels": words}, {"dp": 1}, Cluster.of("h100:1"), "ddp", "float32", fuses=True
    )


def planned(p: Program, budget_bytes: float, least: bool = False) -> Planned:
    return plan_graph(p.graph, p.mesh_axes, p.cluster, replace(p.training, budget_bytes=budget_bytes), LIMITS, least=least)


@functools.cache
def alike_bytes(name: str) -> float:
    """The smallest peak of layers that are all alike."""
    p = captured(name)
    found = budgets.least(Step.of(p.graph, p.mesh_axes, p.cluster, p.training, LIMITS, None, None).stages).answer
    assert isinstance(found, Solution)
    return max(found.price.row_bytes)


@functools.cache
def tight(name: str) -> tuple[float, Plan]:
    """A budget a little below what layers that are all alike need, and the plan within it."""
    p = captured(name)
    budget = alike_bytes(name) - 0.2 * handed_on_bytes(fold(p.graph))
    return budget, planned(p, budget).plan


@pytest.mark.parametrize("name", cases(["llama", "gpt2"], ["llama"]))
def test_layers_are_grouped_where_nothing_else_fits(name: str) -> None:
    p, (budget, plan) = captured(name), tight(name)
    assert plan.together in (2, 4) and plan.predicted["peak_memory_bytes"] <= budget
    assert p.point(plan, "planned").peak_bytes <= budget * (1 + 1e-6)
    # What one of two layers hands to the other is made again.
    of_layer = {op.name: p.layers.get(op.name, ("", -1))[1] for op in p.graph.ops}
    readers = {(t.name, of_layer[op.name]) for op in p.graph.ops if op.direction == "forward" for t in op.inputs}
    within = {
        op.name
        for op in p.graph.ops
        for t in op.outputs
        if t and of_layer[op.name] % plan.together < plan.together - 1 and (t.name, of_layer[op.name] + 1) in readers
    }
    assert within & plan.recompute
    text = str(plan)
    assert f"layer 1 of {plan.together}: " in text and f"layer {plan.together} of {plan.together}: " in text


@wide
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_least_memory_is_that_of_groups(name: str) -> None:
    p = captured(name)
    least = planned(p, p.cluster.device.memory_bytes, least=True).plan
    assert least.together > 1 and least.predicted["peak_memory_bytes"] < alike_bytes(name) - 0.2 * handed_on_bytes(fold(p.graph))


@pytest.mark.parametrize("name", cases(["llama", "gpt2"], []))
def test_more_memory_is_not_slower_where_layers_begin_to_fit_alone(name: str) -> None:
    """Below the smallest peak of equal layers plans are of groups; a little above it, plans of equal layers are there too, but slower."""
    p, alike = captured(name), alike_bytes(name)
    below, above = (planned(p, alike * share).plan.predicted["step_time_s"] for share in (0.999, 1.001))
    assert above <= below * (1 + LIMITS.gap)


@pytest.mark.parametrize("name", cases(["llama", "gpt2"], ["llama"]))
def test_the_same_gradients(name: str) -> None:
    p, (_, plan) = captured(name), tight(name)
    torch.manual_seed(1)
    values = tensors(p)
    values |= {r: torch.randint(0, 64, t.shape) for r, t in values.items() if r.kind == "input"}

    def gradients(plan: Plan) -> dict[Role, Any]:
        return lowered(p, plan, values)()

    want, got = gradients(p.base), gradients(plan)
    assert want.keys() == got.keys() and any(g is not None for g in got.values())
    assert all(g is None or torch.equal(g, want[r]) for r, g in got.items())


def test_such_a_plan_is_stored_and_taken_up_again(tmp_path: Path) -> None:
    p, (_, plan) = captured("llama"), tight("llama")
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.together > 1
    assert refit(again, p.graph) is again
    with pytest.raises(PlanMismatchError, match=f"groups of {plan.together} layers"):
        refit(again, captured("llama", 5).graph)


def test_a_group_is_what_its_layers_are() -> None:
    folded = fold(captured("llama").graph)
    pairs, all_of_it, none = grouped(folded, 2), grouped(folded, 4), grouped(folded, 3)
    assert none is None and pairs is not None and all_of_it is not None
    assert pairs.copies == (2,) and pairs.depth == folded.depth and all_of_it.copies == ()
    (one,), (two,) = folded.stacks, pairs.stacks
    assert two.forward[0] == one.forward[0] + one.forward[1] and two.backward[1] == one.backward[3] + one.backward[2]
    assert sum(pairs.count.values()) == sum(folded.count.values()) == len(folded.graph.ops)


def test_what_fits_in_no_way_says_the_least_of_all() -> None:
    p, alike = captured("llama"), alike_bytes("llama")
    with pytest.raises(InfeasibleError) as e:
        planned(p, alike * 0.3)
    assert e.value.shortfall_bytes < alike * 0.7
