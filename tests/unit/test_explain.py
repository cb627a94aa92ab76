"""Why not? An answer for what a rule forbids, what does not divide, what is not offered, what does not fit, and what costs."""

from __future__ import annotations

import functools

import pytest

from autopar.errors import AutoparError, MeshError
from autopar.plan.text import strategy
from autopar.planner.explain import Explanation, explain_graph
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.planning import plan_graph
from autopar.solver.fold import Folded, fold
from autopar.solver.solve import Limits
from tests.plans import captured
from tests.spmd.test_planned import cluster
from tests.wide import wide

MESH = {"tp": 4}


@functools.cache
def folded() -> Folded:
    return fold(captured("llama", 3).graph)


def training(budget_bytes: float = float("inf")) -> TrainingConfig:
    return TrainingConfig(frozenset(folded().graph.params), budget_bytes=budget_bytes)


def asked(op: str, placement: str, mesh: dict[str, int] = MESH, **more: float) -> Explanation:
    return explain_graph(folded(), mesh, cluster(4), training(**more), op, placement, Limits(seconds=120))


@functools.cache
def step_s() -> float:
    return plan_graph(folded(), MESH, cluster(4), training(), Limits(seconds=120)).solution.objective_s


def test_what_costs() -> None:
    """Both answers are the solver's own; the one as asked has what was asked for."""
    e = asked("self_attn.o_proj", "tp:out")
    assert e.verdict == "costs" and e.step_s == pytest.approx(step_s(), rel=1e-9) and e.instead_s is not None and e.instead_s > step_s()
    first, plans, instead, *rest = e.text.splitlines()
    assert first == "model.layers.*.self_attn.o_proj (3 x), aten.mm.default: tp:out"
    assert plans.startswith("The plan has tp:tokens: step") and "As asked, tp:out: step" in instead and "%" in instead
    assert any(x.startswith("  forward   intra") for x in rest) and "collectives:" in rest


@wide
def test_what_the_plan_does() -> None:
    plan = plan_graph(folded(), MESH, cluster(4), training(), Limits(seconds=120)).plan
    name = next(n for n, c in plan.ops.items() if c.kind == "attention" and plan.targets[n] == "autopar.attention_v2.default")
    request = strategy(plan, "autopar.attention_v2", plan.ops[name])
    for op in (name, "self_attn", "model.layers.1.self_attn", "layers.*.self_attn"):
        e = asked(op, request)
        assert e.verdict == "does" and e.instead_s == e.step_s and "So it is in the plan" in e.text
    p = plan.params["model.layers.1.mlp.up_proj.weight"]
    where = {s.axis: s.dim for s in p.storage.splits}
    request = ", ".join(f"Shard({where[a]}) over {a}" if a in where else f"Replicate over {a}" for a in plan.mesh.names)
    assert asked("layers.2.mlp.up_proj.weight", request).verdict == "does"


@pytest.mark.parametrize(
    ("op", "placement", "said"),
    [
        ("self_attn", "tp:s", "a ring is tried where samples are fewer than devices and a rank of tp has 512"),
        ("self_attn", "tp:d", "d may not be split"),
        ("self_attn", "tp:tokens", "no loop 'tokens'; its loops are b, g, r"),
        ("self_attn", "Shard(3) over tp", "may not be split"),
        ("self_attn", "Shard(4) over tp", "its result has 4 dims"),
        ("self_attn", "Replicate over tp", "all ranks of tp would repeat its work"),
        ("mlp.up_proj.weight", "tp:n", "a parameter has dims, not loops"),
        ("mlp.up_proj.weight", "tp:2", "it has 2 dims, of shape [64, 32]"),
    ],
)
def test_what_cannot_be(op: str, placement: str, said: str) -> None:
    e = asked(op, placement)
    assert e.verdict == "cannot" and said in e.text and e.step_s is None


def test_what_does_not_divide() -> None:
    e = asked("self_attn", "dp:g", {"dp": 3})
    assert e.verdict == "cannot" and "g of 2 does not divide over the 3 devices of dp" in e.text
    e = asked("mlp.up_proj.weight", "Shard(1) over dp", {"dp": 3})
    assert e.verdict == "cannot" and "dim 1 of [64, 32] does not divide over the 3 devices" in e.text


@wide
def test_what_does_not_fit() -> None:
    """A parameter replicated, in a budget that just holds it sharded; and one that holds nothing."""
    mesh = {"dp": 4}
    with pytest.raises(InfeasibleError) as least:
        plan_graph(folded(), mesh, cluster(4), training(1000.0), Limits(seconds=120))
    e = asked("lm_head.weight", "Replicate", mesh, budget_bytes=1.001 * (1000.0 + least.value.shortfall_bytes))
    assert e.verdict == "does not fit", e.text
    assert "too much" in e.text and "a device would do" in e.text
    assert asked("lm_head.weight", "Replicate", mesh, budget_bytes=1000.0).text.count("No plan fits, with or without it") == 1


@pytest.mark.parametrize(
    ("op", "placement", "said"),
    [
        ("mlp.gate", "tp:n", "did you mean model.layers.*.mlp.gate_proj"),
        ("model.norm", "tp:n", "name one: "),
        ("", "tp:n", "no operator"),
        ("self_attn", "tq:b", "did you mean tp"),
        ("self_attn", "over", "not a placement"),
        ("self_attn", "tp=b", "not a placement"),
        ("self_attn", "tp:b dp", "not a placement"),
    ],
)
def test_what_cannot_be_read(op: str, placement: str, said: str) -> None:
    with pytest.raises(AutoparError, match=None) as e:
        asked(op, placement)
    assert said in f"{e.value.what} {e.value.fix}" and e.value.where in ("OPERATOR", "PLACEMENT")
    assert isinstance(e.value, MeshError) == ("tq" in placement)


def test_three_axes_are_refused() -> None:
    with pytest.raises(AutoparError, match="at most 2 mesh axes"):
        asked("self_attn", "a:b", {"a": 2, "b": 2, "c": 2})
