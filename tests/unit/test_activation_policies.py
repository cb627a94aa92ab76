"""Known answers about what is saved, made again and kept in host memory, each at three neighbouring sizes of a Llama on eight H100.

No rule is coded for any of them: they follow from prices and memory rows.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import pytest

from autopar.capture.tile import tiled
from autopar.cost import Cost
from autopar.cost.compute import HEAVY
from autopar.graph.graph import Op
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.offload import Offload
from autopar.planner.planning import plan_graph
from autopar.rules import lookup
from autopar.solver.fold import Folded
from autopar.solver.solve import Limits
from tests.unit.test_experts import llama
from tests.wide import cases

WIDTHS = (1792, 2048, 2304)
LAYERS = 24
BATCH, TOKENS = 64, 4096
FEW_WORDS = 2048  # so that layers, not logits, are what memory goes to
MILD = 0.75  # of the memory that is more than the least: with plenty of it, what is free to make again is not kept either
COLUMNS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}


@cache
def program(width: int) -> Folded:
    heads = width // 128
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": 4 * width, "vocab_size": FEW_WORDS}
    return tiled(lambda layers: llama(layers, BATCH, TOKENS, hidden_size=width, **sizes), LAYERS)


@cache
def planned(width: int, share: float = 1.0, host_faster: float = 0.0) -> Plan:
    """share: of the memory between the least there is and what the fastest plan takes; host_faster: offload over a link so much faster, 0: none."""
    budget = math.inf
    if share < 1:
        low, high = (p.predicted["peak_memory_bytes"] for p in (least(width), planned(width)))
        budget = low + share * (high - low)
    return _planned(width, budget, host_faster)


@cache
def least(width: int) -> Plan:
    return _planned(width, math.inf, 0.0, True)


def _planned(width: int, budget: float, host_faster: float, least: bool = False) -> Plan:
    cluster = Cluster.of("h100:1x8")
    link = cluster.host.model_copy(update={"bandwidth_Bps": cluster.host.bandwidth_Bps * max(1.0, host_faster)})
    cluster = cluster.model_copy(update={"host": link})
    training = TrainingConfig(frozenset(program(width).graph.params), "float32", budget_bytes=budget)
    if host_faster:
        training = Offload.of("host", cluster).within(training, cluster)
    return plan_graph(program(width), {"dp": 8}, cluster, training, Limits(seconds=60), least=least).plan


def recomputed_calls(width: int, plan: Plan) -> list[Op]:
    """Operators that run again; views cost nothing and are none."""
    ops = {op.name: op for op in program(width).graph.ops}
    found = [ops[n.partition("~")[0]] for n in plan.recompute]
    return [op for op in found if lookup(op).kind != "view"]


def heavy(ops: list[Op]) -> Counter[str]:
    """Products by the module's last name, attention."""
    return Counter(
        op.module.rpartition(".")[2] if lookup(op).kind != "attention" else "attention" for op in ops if lookup(op).kind in HEAVY
    )


def saved_layer_inputs(width: int, plan: Plan) -> int:
    ops = {op.name: op for op in program(width).graph.ops}
    kept = {t.split(".")[0].partition("~")[0] for t, policy in plan.activations.items() if policy == "save"}
    return sum(n in ops and ops[n].target == "aten.add.Tensor" and ops[n].module.rpartition(".")[2].isdigit() for n in kept)


@pytest.mark.parametrize("width", cases(WIDTHS, WIDTHS[1:2]))
def test_plenty_of_memory(width: int) -> None:
    """Nothing is made again but what forward would write to keep it alone, and backward makes in its kernels for less; and nothing is sent away even over a fast link."""
    graph = program(width).graph
    cost = Cost.compiled(Cluster.of("h100:1x8"), Mesh.of({"dp": 8}), graph, {op.name: lookup(op) for op in graph.ops})
    for plan in (planned(width), planned(width, host_faster=100.0)):
        assert all(cost.kept(t.name, 1.0) for op in recomputed_calls(width, plan) for t in op.outputs if t is not None)
        assert not plan.offload


@pytest.mark.parametrize("width", cases(WIDTHS, WIDTHS[1:2]))
def test_mild_pressure(width: int) -> None:
    """Norms and the product of SwiGLU; no matrix product and no attention. What layers hand on is kept."""
    plan = planned(width, MILD)
    ops = recomputed_calls(width, plan)
    assert not heavy(ops)
    names = {op.module.rpartition(".")[2] for op in ops if op.target == "aten.mul.Tensor"}
    assert {"mlp", "post_attention_layernorm"} <= names
    assert saved_layer_inputs(width, plan) >= 2


@pytest.mark.parametrize("width", cases(WIDTHS, WIDTHS[1:2]))
def test_the_last_product_is_never_made_again(width: int) -> None:
    """Nothing in backward reads the result of a layer's last product, whatever the pressure."""
    for plan in (planned(width, 0.5), planned(width, 0.15), least(width)):
        assert not heavy(recomputed_calls(width, plan))["down_proj"]


@pytest.mark.parametrize("width", cases(WIDTHS, WIDTHS[1:2]))
def test_heavy_pressure(width: int) -> None:
    """The least memory there is: full recompute of layers, all their products but the last one, and attention. What layers hand on is kept."""
    plan = least(width)
    again = heavy(recomputed_calls(width, plan))
    assert again.keys() >= COLUMNS | {"o_proj", "attention"}, again
    assert saved_layer_inputs(width, plan) >= 2


@pytest.mark.parametrize("width", cases(WIDTHS, WIDTHS[1:2]))
def test_a_fast_host_link(width: int) -> None:
    """Under the pressure that has products made again, they are kept in host memory instead: faster, and no product runs twice."""
    without, plan = planned(width, 0.15), planned(width, 0.15, host_faster=8.0)
    assert heavy(recomputed_calls(width, without))
    assert plan.offload and not heavy(recomputed_calls(width, plan))
    assert plan.predicted["step_time_s"] < without.predicted["step_time_s"]
