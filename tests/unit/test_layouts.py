"""Hand layouts as constraints on the integer program: what comes out is that layout, and never better than the free plan."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
import transformers

from autopar.capture.capture import Call, capture
from autopar.capture.describe import describe
from autopar.errors import LayoutError
from autopar.graph.graph import Graph
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.plan.decisions import ParamChoice
from autopar.plan.plan import Plan
from autopar.planner.formulation.layouts import Loop, input_loops
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.layout import Layout
from autopar.planner.planning import plan_graph
from autopar.planner.storage import representable
from autopar.rules import lookup
from tests.wide import cases

BATCH, SEQUENCE, LAYERS = 16, 256, 4
TWO, ONE, THREE = {"dp": 4, "tp": 2}, {"dp": 8}, {"a": 2, "b": 2, "c": 2}
HSDP = Layout(data=("dp", "tp"), shard=("tp",), name="hsdp")


@cache
def graph(batch: int = BATCH, vocabulary: int = 1024, heads: int = 8) -> Graph:
    config = transformers.LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=256, intermediate_size=512, num_attention_heads=heads, num_key_value_heads=heads,
        vocab_size=vocabulary, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
    tokens = torch.empty(batch, SEQUENCE, dtype=torch.int64, device="meta")
    call = Call.of((), {"input_ids": tokens, "labels": tokens})
    return describe(capture(model, call, tuple((tuple(t.shape), t.dtype) for t in call.tensors), cast=torch.bfloat16))


def planned(layout: str | Layout | None, mesh: dict[str, int], g: Graph | None = None, budget_bytes: float = 7e10) -> Plan:
    g = g or graph()
    training = TrainingConfig(frozenset(g.params), "float32", budget_bytes=budget_bytes)
    return plan_graph(g, mesh, Cluster.of("h100:8"), training, layout=layout).plan


@cache
def best(layout: str | Layout | None, mesh: tuple[tuple[str, int], ...]) -> Plan:
    return planned(layout, dict(mesh))


def ways(plan: Plan, p: ParamChoice) -> int:
    """Over how many devices a parameter is stored split."""
    return math.prod(plan.mesh.axis_size(s.axis) for s in p.storage.splits)


def read_split(plan: Plan, name: str) -> set[tuple[str, int]]:
    return {(s.axis, s.dim) for n, p in plan.params.items() if name in n for s in p.compute.splits}


def letters(plan: Plan, kind: str, axis: str) -> set[str | None]:
    return {c.strategy.get(axis, (None, 0))[0] for c in plan.ops.values() if c.kind == kind}


def test_loops_of_the_inputs_are_followed() -> None:
    g = graph()
    rules = {op.name: lookup(op) for op in g.ops}
    loops = input_loops(g, rules)
    attention = next(op for op in g.ops if rules[op.name].kind == "attention")
    assert loops[attention.name].batch == (Loop("b", 1, BATCH),)
    assert Loop("q", 1, SEQUENCE) in loops[attention.name].others
    product = next(op for op in g.ops if rules[op.name].kind == "matmul")
    assert loops[product.name].batch == (Loop("m", SEQUENCE, BATCH),)
    assert loops[product.name].others == (Loop("m", 1, SEQUENCE),)


@pytest.mark.parametrize("mesh", cases([ONE, TWO, THREE], [TWO]))
def test_data_parallel(mesh: dict[str, int]) -> None:
    for layout, stored in (("ddp", 1), ("fsdp", 8)):
        plan = best(layout, tuple(mesh.items()))
        assert plan.layout == layout and plan.data_size == 8 and not plan.repeated
        assert all(letters(plan, "attention", a) == {"b"} for a in plan.mesh.names)
        assert {ways(plan, p) for p in plan.params.values()} == {stored}


def test_some_axes_shard() -> None:
    plan = best(HSDP, tuple(TWO.items()))
    assert plan.layout == "hsdp" and plan.data_size == 8
    assert all({s.axis for s in p.storage.splits} == {"tp"} for p in plan.params.values())


def test_tensor_parallel_is_columns_and_rows() -> None:
    plan = best("tp", tuple(ONE.items()))
    assert plan.data_size == 1 and not plan.repeated
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        assert read_split(plan, name) == {(a, 0) for a in plan.mesh.names}, name
    for name in ("o_proj", "down_proj"):
        assert read_split(plan, name) == {(a, 1) for a in plan.mesh.names}, name
    assert all(letters(plan, "attention", a) == {"g"} for a in plan.mesh.names)


@pytest.mark.parametrize("mesh", cases([ONE, TWO, THREE], [TWO]))
def test_both(mesh: dict[str, int]) -> None:
    """The last axis splits tensors, of one axis its smallest part; parameters are stored as DTensors on the user's axes."""
    plan = best("fsdp+tp", tuple(mesh.items()))
    tensor = plan.mesh.names[-1]
    assert plan.data_size == 4 and set(plan.data_axes) == set(plan.mesh.names[:-1])
    assert letters(plan, "attention", tensor) == {"g"}
    assert read_split(plan, "gate_proj") == {(tensor, 0)} and read_split(plan, "down_proj") == {(tensor, 1)}
    for p in plan.params.values():
        assert ways(plan, p) >= 4 and representable(p.storage, plan.mesh) == p.storage


@pytest.mark.parametrize("mesh", cases([ONE, TWO], [ONE]))
def test_no_layout_is_better_than_the_plan(mesh: dict[str, int]) -> None:
    free = best(None, tuple(mesh.items()))
    for layout in ("ddp", "fsdp", "tp", "fsdp+tp", *([HSDP] if mesh == TWO else [])):
        hand = best(layout, tuple(mesh.items()))
        assert hand.predicted["step_time_s"] >= free.predicted["step_time_s"] * (1 - 0.01), layout  # the solver's gap


def test_a_vocabulary_that_does_not_divide_splits_tokens() -> None:
    plan = planned("tp", ONE, graph(vocabulary=1001))
    assert read_split(plan, "gate_proj") == {(a, 0) for a in plan.mesh.names}
    assert not {x for a in plan.mesh.names for x in letters(plan, "loss", a)} & {"c"}


def test_memory_binds_layouts_too() -> None:
    with pytest.raises(InfeasibleError):
        planned("ddp", TWO, budget_bytes=0.5 * best("ddp", tuple(TWO.items())).predicted["peak_memory_bytes"])


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(LayoutError, match=r"splits the batch 8 ways, but it is 4"):
        planned("fsdp", TWO, graph(batch=4))
    with pytest.raises(LayoutError, match=r"cannot split model.layers.\*.self_attn over \w+ \(8 devices\): .*heads 4, .*not divide") as e:
        planned("tp", ONE, graph(heads=4))
    assert (
        "operator attention" in e.value.where
        and "layout fsdp" in e.value.fix
        and e.value.fix.startswith("layout fsdp+tp on a mesh of 2x4, whose last axis splits tensors, or ")
    )
    with pytest.raises(LayoutError, match=r"leaves dp.0, dp.1 without a role"):
        planned(Layout(tensor=("tp",)), TWO)
    with pytest.raises(LayoutError, match="three roles"):
        planned(Layout(data=("a", "b"), shard=("a",), tensor=("c",)), THREE)
    with pytest.raises(LayoutError, match="unknown layout"):
        planned("zero", TWO)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}, {"ep": 2}])
def test_sizes_are_no_roles(sizes: dict[str, int]) -> None:
    """They would leave every axis without a role, in silence."""
    with pytest.raises(LayoutError, match="are sizes, and a mesh that exists has axes"):
        Layout.of(Layout(**sizes), Mesh.of(TWO))  # type: ignore[arg-type]


def test_axes_of_a_layout_are_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large program's axes are, and an answer sought soon; but one axis cannot have two roles."""
    monkeypatch.setattr("autopar.planner.stages.LARGE", 0)
    plan = planned("fsdp+tp", TWO)
    assert read_split(plan, "gate_proj") == {("tp", 0)} and read_split(plan, "down_proj") == {("tp", 1)}
