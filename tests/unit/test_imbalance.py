"""`imbalance=`: prices of routed experts on the fullest rank by hand, what it takes of memory, what cannot be, and what a plan says of it."""

from __future__ import annotations

import contextlib
import math
import warnings
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

import autopar
from autopar import Layout, Plan
from autopar.cli.main import app
from autopar.cost import Cost
from autopar.cost import experts as prices
from autopar.cost.compute import local_sizes
from autopar.errors import AutoparError
from autopar.graph.graph import Op
from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.hardware.cluster import Cluster
from autopar.kernels.expert_load import tell
from autopar.kernels.gates import named
from autopar.models import configs as models
from autopar.plan.schema import dumps
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.planning import plan_graph
from autopar.predict import Prediction
from autopar.predict.api import answered, captured, priced
from autopar.predict.pieces import Piece, pieces
from autopar.rules import lookup
from autopar.rules.grammar import Rule
from autopar.rules.strategy import Strategy
from autopar.runtime.expert_load import ExpertLoad
from autopar.solver.solve import Limits
from tests.spmd.ops import call
from tests.unit.test_expert_layouts import mixtral
from tests.unit.test_predict_experts import BY_HAND, CHOSEN, INNER, MIXTRAL, SEQ, SHAPES, WIDTH

T, K, E, D, FEATURES = 1024, 2, 8, 64, 96
RANKS = Mesh.of({"ep": 4})
H100 = Cluster.of("h100:8")
ROWS = T // 4 * K  # of a rank, at even load


def swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def arguments(tokens: int = T, dtype: torch.dtype = torch.bfloat16, device: str = "meta", features: int = FEATURES) -> tuple[Any, ...]:
    with torch.device(device):
        x, scores = torch.zeros(tokens, D, dtype=dtype), torch.zeros(tokens, K, dtype=dtype)
        index = torch.arange(tokens * K).view(tokens, K) % E
        w1, w2 = torch.zeros(E, 2 * features, D, dtype=dtype), torch.zeros(E, D, features, dtype=dtype)
    return x, index, scores, w1, w2, None, None, False, False, named(swiglu, dtype), "", 1, []


def operators() -> tuple[Op, Op]:
    """Forward and backward."""
    given = arguments()
    forward = call(torch.ops.autopar.experts_v1.default, given).op
    return forward, call(torch.ops.autopar.experts_backward_v1.default, (given[0], *given)).op


def expert_by_expert(rule: Rule) -> Strategy:
    return dict(zip(RANKS.names, [("x0", 1), ("x1", 1)], strict=True)) if len(rule.pairs) == 3 else {}


def of_op(op: Op, imbalance: float, strategy: Strategy | None = None) -> tuple[float, list[tuple[str, float]], float]:
    """FLOPs, collectives inside and bytes of workspace."""
    rule, cost = lookup(op), Cost(H100, RANKS, imbalance=imbalance)
    strategy = expert_by_expert(rule) if strategy is None else strategy
    split = {a: (0, T // 2 if a.endswith("0") else T // 4) for a in RANKS.names}
    ins = tuple(Placement.of(t.shape, split if t.shape and t.shape[0] == T else {}) for t in op.inputs)
    outs = tuple(None if t is None else Placement.of(t.shape) for t in op.outputs)
    n = local_sizes(rule, strategy, RANKS)
    return (
        cost.op(op, rule, strategy, ins, outs).flops,
        [(c.kind, c.sent) for c in cost.inside(op, rule, strategy, ins)],
        prices.workspace_bytes(op, rule, strategy, n, RANKS, imbalance),
    )


@pytest.mark.parametrize("imbalance", [1.0, 1.5, 4.0])
def test_the_fullest_rank_is_priced(imbalance: float) -> None:
    rows = imbalance * ROWS
    forward, backward = operators()
    flops, sent, nbytes = of_op(forward, imbalance)
    assert flops == 2 * rows * (D * 2 * FEATURES + FEATURES * D)
    assert sent == [("all_to_all", rows * D * 2 * 3 / 4)] * 2
    # Received rows, as they came and in order, and what the first product makes; then the gate's 4 F beside the rows as they came.
    assert nbytes == 2 * rows * (max(D + 2 * FEATURES, 2 * FEATURES + 2 * FEATURES) + D)
    flops, sent, nbytes = of_op(backward, imbalance)
    assert flops == 2 * rows * (3 * D * 2 * FEATURES + 2 * FEATURES * D)
    assert sent == [("all_to_all", rows * D * 2 * 3 / 4)] * 3
    assert nbytes == 2 * rows * max(2 * D + 5 * FEATURES, 3 * D + 4 * FEATURES, D + 7 * FEATURES)


def test_all_rows_on_one_rank_are_the_most() -> None:
    for op in operators():
        assert of_op(op, 100.0) == of_op(op, 4.0)


def test_where_nothing_is_exchanged_nothing_changes() -> None:
    for op in operators():
        tokens: Strategy = {a: ("t", 1) for a in RANKS.names}
        for strategy in ({}, tokens, {RANKS.names[0]: ("f", FEATURES // 2)}):
            assert of_op(op, 3.0, strategy) == of_op(op, 1.0, strategy)
            assert not of_op(op, 3.0, strategy)[1]


@pytest.mark.parametrize("features", [FEATURES, 16], ids=["wide", "narrow"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_operator_takes_up_what_is_counted(dtype: torch.dtype, features: int) -> None:
    tokens = 8192
    given = arguments(tokens, dtype, "cpu", features)
    for fn, args in ((torch.ops.autopar.experts_v1, given), (torch.ops.autopar.experts_backward_v1, (given[0], *given))):
        op = call(fn.default, args).op
        rule = lookup(op)
        counted = prices.workspace_bytes(op, rule, {}, local_sizes(rule, {}, Mesh(())), Mesh(()))
        took = most_allocated(fn.default, args) - sum(t.nbytes for t in op.outputs if t is not None)
        assert 0.85 * counted <= took <= 1.05 * counted, (op.target, took, counted)


def most_allocated(fn: Any, args: tuple[Any, ...]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p, torch.no_grad():
        kept = fn(*args)
    del kept
    now = most = 0
    for e in sorted((e for e in p.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += e.nbytes()
        most = max(most, now)
    return most


# ---- plans -------------------------------------------------------------------------------------------------------


def planned(imbalance: float, layout: str = "fsdp+ep") -> Plan:
    g = mixtral()
    training = TrainingConfig(frozenset(g.params), "float32", budget_bytes=7e10, imbalance=imbalance)
    return plan_graph(g, {"dp": 4, "ep": 2}, H100, training, Limits(seconds=60), layout=layout).plan


def test_a_plan_says_what_it_assumes_and_its_file_keeps_it() -> None:
    even, uneven = planned(1.0), planned(1.5)
    rows = 16 * 128 * 2 // 8  # tokens of a device, two experts each
    assert f"split over 2 ranks, {rows} rows a rank and layer at even load; as many assumed on the fullest (imbalance 1)" in even.text()
    assert f"split over 2 ranks, {rows} rows a rank and layer at even load; 1.5 times as many assumed on the fullest" in uneven.text()
    assert even.predicted["step_time_s"] < uneven.predicted["step_time_s"]
    again = Plan.loads(dumps(uneven))
    assert again == uneven and again.imbalance == 1.5 and "imbalance: 1 -> 1.5" in even.diff(uneven)
    # Files from before had none; one below 1 is no plan's.
    assert Plan.loads(dumps(uneven).replace('"imbalance":1.5,', "")).imbalance == 1.0
    with pytest.raises(AutoparError, match="imbalance"):
        Plan.loads(dumps(uneven).replace('"imbalance":1.5,', '"imbalance":0.5,'))
    assert "routed experts: split" not in planned(1.5, "fsdp").text()


# ---- predictions -------------------------------------------------------------------------------------------------


def test_predictions_have_the_fullest_rank() -> None:
    model, where = models.build(models.made(dict(MIXTRAL), "test")), Cluster.of("h100:2x8")
    tasks = {ep: captured(model, SHAPES, ep, where) for ep in (1, 4)}

    def of(ep: int, imbalance: float) -> tuple[Piece, ...]:
        t = replace(tasks[ep], training=replace(tasks[ep].training, imbalance=imbalance))
        return pieces(answered(t, Layout(ep=ep, zero=1)), BY_HAND.fusion)

    even, uneven, alone, alike = (next(p for p in of(*x) if p.layers) for x in ((4, 1.0), (4, 1.5), (1, 1.5), (1, 1.0)))
    assert even.forward.flops == uneven.forward.flops == alone.forward.flops  # the model's work
    more = sum(n * (t.load - 1) * t.flops for t, n in uneven.forward.tasks.items())
    assert more == pytest.approx(0.5 * 2 * SEQ * CHOSEN * 3 * WIDTH * INNER)
    sent = [{t.wire_bytes: n for t, n in p.forward.transfers.items() if t.kind == "all_to_all"} for p in (even, uneven)]
    assert sent == [{f * SEQ * CHOSEN * WIDTH * 2 * 3 / 4: 2} for f in (1.0, 1.5)]
    assert uneven.experts_bytes == pytest.approx(1.5 * even.experts_bytes)
    assert all(getattr(alone, f.name) == getattr(alike, f.name) for f in fields(Piece))

    def step(imbalance: float) -> Prediction:
        return priced(of(4, imbalance), "", where, Layout(ep=4, zero=1), BY_HAND, 64, SEQ, "bfloat16", "adamw", imbalance)

    a, b = step(1.0), step(2.0)
    assert a.step_time_s < b.step_time_s and a.peak_bytes < b.peak_bytes and a.model_flops == b.model_flops
    assert b.memory_bytes[0]["experts at work"] == pytest.approx(2 * a.memory_bytes[0]["experts at work"])
    whole = autopar.predict(model, SHAPES, where, Layout(ep=4, zero=1), global_batch=64, runtime=BY_HAND, imbalance=2.0)
    assert whole.step_time_s == b.step_time_s and "imbalance 2" in whole.text()


# ---- runs --------------------------------------------------------------------------------------------------------


def test_a_forward_names_its_worst_layer_once_also_where_it_fails() -> None:
    layers = ("a", "b", "c")

    def run(load: ExpertLoad, *received: int) -> list[str]:
        with warnings.catch_warnings(record=True) as found, contextlib.suppress(MemoryError):
            warnings.simplefilter("always")
            with load.watched(layers, 1.5):
                for n in received:
                    tell(n, 100)
                if len(received) < len(layers):
                    raise MemoryError
        return [str(w.message) for w in found]

    load = ExpertLoad(3)
    assert not run(load, 150, 0, 120)
    ((said),) = run(load, 160, 251, 170)
    assert "experts of b got 2.51 times" in said and "on rank 3" in said and "for 1.5 times" in said and "imbalance=2.6 " in said
    assert not run(load, 400, 400, 400)
    ((said),) = run(ExpertLoad(), 100, 180)
    assert "of b got 1.80 times" in said
    tell(500, 100)  # nobody asks


# ---- what cannot be ----------------------------------------------------------------------------------------------


def test_refusals() -> None:
    model = models.build(models.made(dict(MIXTRAL), "test"))
    shapes = {"input_ids": (64, SEQ), "labels": (64, SEQ)}

    def refused(imbalance: Any, match: str, layout: Layout | None = None) -> None:
        with pytest.raises(AutoparError, match=match):
            if layout is not None:
                autopar.predict(model, SHAPES, "h100:2x8", layout, global_batch=64, imbalance=imbalance)
            else:
                autopar.plan(model, shapes, "h100:2x8", imbalance=imbalance)

    for bad in (0.99, 0, -1.0, math.nan, math.inf, "1.5", True):
        refused(bad, "no load of a fullest rank")
        refused(bad, "no load of a fullest rank", Layout(ep=4))
        with pytest.raises(AutoparError, match="no load of a fullest rank"):
            autopar.search(model, SHAPES, "h100:2x8", global_batch=64, imbalance=bad)
        with pytest.raises(AutoparError, match="no load of a fullest rank"):
            autopar.compile(model, imbalance=bad)
    refused(17, "more than 16 devices could make it")
    refused(9, "more than 8 ranks, with an expert each, could make it")
    refused(4.5, "more than ep=4 ranks could make it", Layout(ep=4))
    for command in ("plan", "search", "predict"):
        words = [command, "mixtral-8x7b", "--cluster", "h100:8", "--batch", "8", "--seq", "128", "--imbalance", "0.5"]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2 and "imbalance=0.5 is no load of a fullest rank" in done.output
