"""Which form of a head is planned: by price where both may be had, as is said where it is said; and what plans and texts tell of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import autopar
from autopar.cost import Cost
from autopar.cost import loss_head as cost
from autopar.errors import AutoparError
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.planner import loss_head
from autopar.planner.formulation.problem import Formulator
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.loss_head import Form, better, is_chunked
from autopar.planner.merged_axes import merged as merged_axes
from autopar.planner.offline import explain, frontier
from autopar.planner.other_form import bound_instead, instead_of
from autopar.planner.planning import least_of, plan_graph
from autopar.planner.stages import Stages
from autopar.planner.task import task
from autopar.rules import lookup
from autopar.rules.loss_head import BACKWARD, FORWARD
from autopar.solver.solve import Limits
from tests.spmd.ops import call
from tests.spmd.test_rules_loss_head import _called
from tests.wide import wide

SIZES = dict(vocab_size=32_000, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
SHAPE = (8, 512)  # logits of 4,096 x 32,000: 524 MB in float32
ROOMY, TIGHT = 8e9, 250e6


def planned(form: str = "auto", memory: Any = ROOMY, **how: Any) -> Plan:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    return autopar.plan(model, {"input_ids": SHAPE, "labels": SHAPE}, "h100:1x1", precision="bf16", memory=memory, loss_head=form, **how)


@pytest.fixture(scope="module")
def plans() -> dict[tuple[str, Any], Plan]:
    asked = [("plain", ROOMY), ("chunked", ROOMY), ("auto", ROOMY), ("chunked", TIGHT), ("auto", TIGHT)]
    return {(form, memory): planned(form, memory) for form, memory in asked}


def test_where_there_is_room_the_faster_form_is_taken(plans: dict[tuple[str, Any], Plan]) -> None:
    plain, chunked, auto = (plans[form, ROOMY] for form in loss_head.FORMS)
    times = [p.predicted["step_time_s"] for p in (plain, chunked)]
    assert auto.predicted["step_time_s"] == min(times) and is_chunked(auto) == (times[1] < times[0])
    assert is_chunked(chunked) and not is_chunked(plain)
    assert "plain: " in str(auto.solver["loss_head"]) and "chunked: " in str(auto.solver["loss_head"])
    assert "loss_head" not in plain.solver and "loss_head" not in chunked.solver


def test_what_the_logits_take_is_not_planned_for(plans: dict[tuple[str, Any], Plan]) -> None:
    """The plain plan holds all scores at least in bfloat16, as its product leaves them; the other a tile's."""
    tokens = SHAPE[0] * SHAPE[1]
    workspace = cost.workspace_bytes(_head(tokens), {"t": tokens, "v": SIZES["vocab_size"], "d": SIZES["hidden_size"]})
    plain, chunked = (plans[form, ROOMY].predicted["peak_memory_bytes"] for form in ("plain", "chunked"))
    assert workspace < chunked < 2 * tokens * SIZES["vocab_size"] < plain


def _head(tokens: int) -> Any:
    with torch.device("meta"):
        h, w = torch.empty(tokens, 64, dtype=torch.bfloat16), torch.empty(SIZES["vocab_size"], 64, dtype=torch.bfloat16)
        row, y = torch.empty(tokens), torch.empty(tokens, dtype=torch.int64)
        args = (row, None, row, h, w, None, y, row, 1.0, 0.0, 2**24, [True, True, False])
        return call(torch.ops.autopar.linear_log_prob_backward_v1.default, args).op


def test_what_does_not_fit_with_logits_may_fit_without(plans: dict[tuple[str, Any], Plan]) -> None:
    with pytest.raises(InfeasibleError):
        planned("plain", TIGHT)
    auto = plans["auto", TIGHT]
    assert is_chunked(auto) and auto.predicted["peak_memory_bytes"] <= TIGHT
    assert str(auto.solver["loss_head"]).startswith("plain: does not fit, ")
    assert auto.ops == plans["chunked", TIGHT].ops


def test_of_least_memory() -> None:
    assert is_chunked(planned("auto", "least"))


def test_a_plan_says_what_it_has(plans: dict[tuple[str, Any], Plan], tmp_path: Path) -> None:
    chunked = plans["chunked", ROOMY]
    assert "fused: a linear layer under a cross-entropy, whose logits are made tile by tile, 1 x" in chunked.text()
    assert "lm_head" in chunked.text() and "linear_log_prob_v1" in chunked.text()
    assert "fused: " not in plans["plain", ROOMY].text()
    assert f"head of the loss: {plans['auto', ROOMY].solver['loss_head']}" in plans["auto", ROOMY].text()
    chunked.save(tmp_path / "plan.json")
    assert is_chunked(Plan.load(tmp_path / "plan.json"))


def test_small_logits_are_not_planned_twice() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 128}))
    plan = autopar.plan(model, {"input_ids": (2, 8), "labels": (2, 8)}, "h100:1x1")
    assert "loss_head" not in plan.solver and not is_chunked(plan)


@wide
def test_explained_is_the_form_that_is_planned() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    how = {"op": "lm_head", "placement": "a:vocabulary", "precision": "bf16"}
    inputs = {"input_ids": SHAPE, "labels": SHAPE}
    plain, chunked, tight = (
        explain(model, inputs, "h100:1x2", {"a": 2}, **how, loss_head=form, memory=memory)
        for form, memory in (("plain", ROOMY), ("chunked", ROOMY), ("auto", 0.6 * TIGHT))
    )
    assert plain.verdict == "cannot" and chunked.verdict in ("does", "costs")
    assert "linear_log_prob_v1" in tight.text


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("form", ["Chunked", "", None, True, 3])
def test_other_words_are_refused(form: Any) -> None:
    with pytest.raises(AutoparError, match=r"loss_head=.* is no form of a head") as e:
        planned(form)
    assert '"chunked"' in str(e.value)
    with pytest.raises(AutoparError, match="is no form of a head"):
        autopar.compile(torch.nn.Linear(2, 2), loss_head=form)


def test_a_frontier_is_of_one_program() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with pytest.raises(AutoparError, match="a frontier is of one program"):
        frontier(model, {"input_ids": SHAPE, "labels": SHAPE}, "h100:1x1", loss_head="auto")


# ---- the choice ----------------------------------------------------------------------------------------------------


def _plan(seconds: float, peak: float) -> Plan:
    made = Plan({"a": 1}, "planned", {}, {}, (), (), ())
    return dataclasses.replace(made, predicted={"step_time_s": seconds, "peak_memory_bytes": peak})


def _fails(too_much: float) -> Plan:
    raise InfeasibleError("memory", too_much, "more of it")


def _never(says_other: bool) -> Plan:
    raise AssertionError("it is planned, though it cannot be better")


def test_the_better_of_two() -> None:
    fast, small = Form("plain", lambda says_other: _plan(1.0, 9.0)), Form("chunked", lambda says_other: _plan(2.0, 3.0))
    assert better((fast, small)).predicted["step_time_s"] == 1.0
    assert better((fast, small), least=True).predicted["step_time_s"] == 2.0
    assert (
        better((Form("plain", lambda says_other: _fails(5.0)), small)).solver["loss_head"]
        == "plain: does not fit, 5 B too much; chunked: 2.000 s, 3 B"
    )
    with pytest.raises(InfeasibleError):
        better((Form("plain", lambda says_other: _fails(5.0)), Form("chunked", lambda says_other: _fails(3.0))))


def _late(says_other: bool) -> Plan:
    raise AutoparError("the solver has not stopped")


def test_what_is_not_solved_in_time_changes_nothing() -> None:
    late = Form("chunked", _late)
    assert better((Form("plain", lambda says_other: _plan(1.0, 9.0)), late)).predicted["step_time_s"] == 1.0
    with pytest.raises(InfeasibleError):
        better((Form("plain", lambda says_other: _fails(5.0)), late))
    with pytest.raises(AutoparError, match="not stopped"):
        better((late, Form("plain", _never)))


def test_what_cannot_be_faster_is_not_planned() -> None:
    fast = Form("plain", lambda says_other: _plan(1.0, 9.0))
    assert "no less than 1.500 s" in str(better((fast, Form("chunked", _never, lambda: 1.5))).solver["loss_head"])
    assert better((fast, Form("chunked", lambda says_other: _plan(0.9, 9.0), lambda: 0.8))).predicted["step_time_s"] == 0.9
    assert (
        better((fast, Form("chunked", lambda says_other: _plan(2.0, 3.0), lambda: 1.5)), least=True).predicted["peak_memory_bytes"] == 3.0
    )


def test_nor_what_is_no_faster_by_the_bound_that_the_first_form_says() -> None:
    asked: list[bool] = []

    def first(says_other: bool) -> Plan:
        asked.append(says_other)
        plan = _plan(1.1, 9.0)
        return dataclasses.replace(plan, solver={**plan.solver, **({loss_head.OTHER_FORM: 1.05} if says_other else {})})

    def forms(second: Any, least_s: float = 0.5) -> tuple[Form, Form]:
        return Form("plain", first, lambda: 0.5), Form("chunked", second, lambda: least_s)

    assert "no less than 1.300 s" in str(better(forms(_never, 1.3)).solver["loss_head"])
    assert better(forms(lambda says_other: _plan(1.06, 9.0))).predicted["step_time_s"] == 1.06
    assert "no less than 1.050 s" in str(better(forms(_never), gap=0.05).solver["loss_head"])  # 5% is not worth a second program
    assert asked == [True] * 3
    better(forms(lambda says_other: _plan(2.0, 3.0)), least=True)
    assert not asked[-1]


def test_clusters_of_merged_axes_are_others() -> None:
    """The bound of the second form leaves out the first one's head by the clusters of the mesh itself, which are not those of its axes merged: it is about what the operators take at least."""
    with torch.device("meta"):
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(**SIZES | {"num_key_value_heads": 1}, head_dim=16, layer_types=["sliding_attention", "full_attention"])
        )
    mesh = {"a": 2, "b": 2, "c": 2}
    t = task(
        model,
        {"input_ids": SHAPE, "labels": SHAPE},
        "h100:1x8",
        mesh,
        None,
        "bf16",
        "adamw",
        1,
        4e9,
        None,
        lambda *_: None,
        loss_head="auto",
    )
    mine, other = t.forms
    stages = Stages(mine.folded, Mesh.of(mesh), mine.cluster, mine.training)
    v = stages.view()
    merged, whole = stages.formulated(v, next(merged_axes(stages.mesh))), Formulator(v.q, v.rules, stages.mesh, v.cost, mine.training)
    whole.cluster_choices()
    assert [c.leader for c in merged[0].clusters.clusters] != [c.leader for c in whole.clusters.clusters]
    stages.coarse = merged[0].formulated(), merged[1], whole
    found = bound_instead(stages, instead_of(mine.folded, other.folded, mesh, mine.cluster, mine.training))
    assert found == pytest.approx(least_of(other.folded, mesh, other.cluster, other.training), rel=0.1)


@pytest.mark.parametrize(
    ("mesh", "budget"), [({"a": 2}, ROOMY), ({"a": 2}, TIGHT), pytest.param({"a": 2, "b": 2, "c": 2}, 4e9, marks=wide)]
)
def test_the_bound_of_the_second_form_holds(mesh: dict[str, int], budget: float) -> None:
    """Of either by the other; by merged axes or not, where memory binds and where it does not."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    t = task(
        model, {"input_ids": SHAPE, "labels": SHAPE}, f"h100:1x{2 ** len(mesh)}", mesh, None, "bf16", "adamw", 1, budget, None, lambda *_: None,
        loss_head="auto",
    )  # fmt: skip
    plans = []
    for mine, other in zip(t.forms, t.forms[::-1], strict=True):
        instead = instead_of(mine.folded, other.folded, mesh, mine.cluster, mine.training)
        plans.append(plan_graph(mine.folded, mesh, mine.cluster, mine.training, Limits(seconds=30), instead=instead).plan)
    for mine, other in zip(plans, plans[::-1], strict=True):
        assert mine.solver[loss_head.OTHER_FORM] <= other.predicted["step_time_s"]
        assert mine.solver[loss_head.OTHER_FORM] > 0 or mine.solver["stopped_by"] == "time"  # when time is up no bound is looked for


# ---- the price -----------------------------------------------------------------------------------------------------


def test_flops_are_of_the_products_it_makes() -> None:
    """Forward a product of tokens, words and features; backward one for scores and one for each wanted gradient; and a rank its part."""
    mesh = Mesh.of({"a": 2})
    c = Cost(Cluster.of("h100:1x8"), mesh)
    for wanted, lacking in ((3, ()), (2, (0, 2)), (2, (1,))):
        for target, args, kwargs in _called(bias=True, lacking=lacking):
            op = call(target, args).op
            rule = lookup(op)
            each = 2.0 * 24 * 36 * 5 * (1 if op.target == FORWARD else wanted)
            for strategy, share in (({}, 1), ({"a": ("t", 12)}, 2), ({"a": ("v", 18)}, 2)):
                ins, outs = loss_head_placements(rule, strategy, op)
                assert c.op(op, rule, strategy, ins, outs).flops == each / share
            assert op.target in (FORWARD, BACKWARD) and not kwargs


def loss_head_placements(rule: Any, strategy: Any, op: Any) -> Any:
    from autopar.rules.strategy import placements

    return placements(rule, strategy, tuple(t.shape for t in op.inputs), tuple(None if t is None else t.shape for t in op.outputs))


def test_smaller_tiles_move_more_and_hold_less() -> None:
    found = []
    for tile in (2**20, 2**22, 2**24):
        op = dataclasses.replace(_head(8192), args=(*_head(8192).args[:10], tile, _head(8192).args[11]))
        n = {"t": 8192, "v": SIZES["vocab_size"], "d": 64}
        found.append((cost.passes_bytes(op, n), -cost.workspace_bytes(op, n), cost.launches(op, n)))
    assert found == sorted(found, reverse=True)
