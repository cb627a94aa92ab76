"""Collectives of activations are repeated in backward on purpose, or not, as memory wants it.

A Llama whose residual stream is split along the sequence over two devices: every norm's result is gathered before the products that read it. Backward
reads it too, for the gradients of their weights. With plenty of memory the gathered version is kept. With little, what is kept is split, or made again from
what is split, and backward gathers it a second time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch
from torch import fx

from autopar.graph.calls import is_collective
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.planner.planning import plan_graph
from autopar.solver.solve import Limits
from benchmarks.baselines.program import Program, capture_program
from tests.wide import wide

TOKENS, WIDTH = 32768, 1024
LAYERS = 2
LIMITS = Limits(seconds=60)


@cache
def program() -> Program:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_hidden_layers=LAYERS,
        vocab_size=2048,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shapes = {"input_ids": (1, TOKENS), "labels": (1, TOKENS)}
    return capture_program(model, shapes, {"tp": 2}, Cluster.of("h100:1x2"), "fsdp+tp")


@cache
def planned(share: float = 1.0) -> Plan:
    """share: of the memory that the fastest plan takes."""
    p = program()
    budget = share * planned().predicted["peak_memory_bytes"] if share < 1 else math.inf
    training = replace(p.training, budget_bytes=budget)
    return plan_graph(p.graph, p.mesh_axes, p.cluster, training, LIMITS, layout="fsdp+tp").plan


def gathers(gm: fx.GraphModule) -> int:
    """Of whole activations as wide as the residual stream."""
    found = [n for n in gm.graph.nodes if is_collective(n) and "all_gather" in str(n.target)]
    return sum(n.meta["val"].numel() == TOKENS * WIDTH for n in found)


def kept_whole(plan: Plan) -> int:
    """Activations as wide as the residual stream of which every device keeps all."""
    shapes = {t: x.shape for t, x in program().graph.tensors.items()}
    return sum(p.is_replicate and math.prod(shapes[t]) == TOKENS * WIDTH for t, p in plan.kept.items())


@wide
def test_gathered_again_where_memory_is_short() -> None:
    plenty, short = planned(), planned(0.5)  # no plan takes less than 1.01 of 2.04 GB
    (whole, again) = (program().parts(plan) for plan in (plenty, short))
    assert whole.backward is not None and again.backward is not None
    once, twice = gathers(whole.backward), gathers(again.backward)
    print(f"gathered in forward {gathers(whole.forward)}; in backward {once} with plenty of memory, {twice} with little")
    print(
        f"kept whole {kept_whole(plenty)} and {kept_whole(short)}; step {plenty.predicted['step_time_s']:.4f} s and {short.predicted['step_time_s']:.4f} s"
    )
    assert kept_whole(plenty) >= 2 * LAYERS  # every norm's result
    assert kept_whole(short) < kept_whole(plenty)
    assert twice - once == kept_whole(plenty) - kept_whole(short)
    assert short.predicted["step_time_s"] > plenty.predicted["step_time_s"]
