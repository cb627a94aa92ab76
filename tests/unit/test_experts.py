"""Plans an expert would make, each at three neighbouring sizes.

Prices are those of `autopar/hardware/clusters/h100.json`; no constant was chosen for a test. Deep models are folded from shallow captures on the meta device.

Where the batch cannot cover the mesh, the textbook answer is tensor parallelism inside a node. By these prices that holds while a device has
few tokens (256 of Llama-3-8B here): then moving them is cheaper than moving weights. With a thousand tokens a device it no longer is: products split the
sequence and gather weights, which hides, and only attention splits its heads (all-to-all). Both are asserted below.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
import transformers

from autopar.capture.capture import Call, capture
from autopar.capture.describe import describe
from autopar.capture.tile import tiled
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.plan.decisions import ParamChoice
from autopar.plan.plan import Plan
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.planning import plan_graph
from autopar.solver.fold import Folded, fold
from autopar.solver.solve import Limits
from tests.wide import cases

LLAMA_8B = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def captured(model: torch.nn.Module, batch: int, sequence: int) -> Graph:
    tokens = torch.empty(batch, sequence, dtype=torch.int64, device="meta")
    call = Call.of((), {"input_ids": tokens, "labels": tokens})
    return describe(capture(model.train(), call, tuple((tuple(t.shape), t.dtype) for t in call.tensors), cast=torch.bfloat16))


@cache
def llama(layers: int, batch: int, sequence: int, **sizes: int) -> Graph:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(num_hidden_layers=layers, use_cache=False, attn_implementation="sdpa", **(sizes or LLAMA_8B))
        )
    return captured(model, batch, sequence)


@cache
def gpt2(layers: int, batch: int) -> Graph:
    config = transformers.GPT2Config(n_layer=layers, use_cache=False, attn_implementation="sdpa", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    return captured(model, batch, 1024)


@cache
def llama_8b(batch: int, sequence: int, depth: int = 32) -> Folded:
    return tiled(lambda layers: llama(layers, batch, sequence), depth)


@cache
def gpt2_small(batch: int) -> Folded:
    return tiled(lambda layers: gpt2(layers, batch), 12)


def planned(program: Folded, cluster: str | Cluster, mesh: dict[str, int], layout: str | None = None) -> Plan:
    where = Cluster.of(cluster)
    training = TrainingConfig(frozenset(program.graph.params), "float32", budget_bytes=where.device.usable_bytes)
    plan = plan_graph(program, mesh, where, training, Limits(seconds=120), layout=layout).plan
    positions = {op.name for op in program.graph.ops if op.target == "aten.embedding.default" and op.inputs[1].shape[0] == 1}  # no batch
    assert plan.solver["stopped_by"] == "gap" and set(plan.repeated) <= positions and not plan.fallbacks
    return plan


def axes_of(plan: Plan, param: ParamChoice, dim: int | None = None) -> set[str]:
    """The user's axes that split `param` (along `dim`) where operators read it."""
    return {plan.mesh.axes[plan.mesh.names.index(s.axis)].parent for s in param.compute.splits if dim in (None, s.dim)}


def matrices(plan: Plan, *names: str) -> list[ParamChoice]:
    found = [p for n, p in plan.params.items() if len(p.shape) == 2 and any(f"{x}.weight" in n for x in names)]
    assert found
    return found


def is_stored_everywhere_once(plan: Plan, param: ParamChoice) -> bool:
    return math.prod(param.storage.local_shape(plan.mesh)) * plan.mesh.size == math.prod(param.padded)


def splits_batch_over(plan: Plan, axes: set[str]) -> bool:
    """Attention splits its batch over these axes, and the inputs come so."""
    chosen = [c.strategy for c in plan.ops.values() if c.kind == "attention"]
    mine = {a.name for a in plan.mesh.axes if a.parent in axes}
    return bool(chosen) and all({a for a, (x, _) in s.items() if x == "b"} == mine for s in chosen)


def is_fully_sharded_data_parallel(plan: Plan) -> bool:
    layers = matrices(plan, *COLUMNS, *ROWS)
    return (
        splits_batch_over(plan, set(plan.mesh_axes))
        and plan.data_size == plan.mesh.size
        and all(p.compute.is_replicate and is_stored_everywhere_once(plan, p) for p in layers)
    )


def is_megatron(plan: Plan, axis: str) -> bool:
    """Every layer: columns, heads, rows over `axis`; the batch over the others."""
    heads = {
        tuple(sorted({x for a, (x, _) in c.strategy.items() if a.split(".")[0] == axis}))
        for c in plan.ops.values()
        if c.kind == "attention"
    }
    return (
        heads == {("g",)}
        and splits_batch_over(plan, set(plan.mesh_axes) - {axis})
        and all(axes_of(plan, p, 0) == {axis} == axes_of(plan, p) for p in matrices(plan, *COLUMNS))
        and all(axes_of(plan, p, 1) == {axis} == axes_of(plan, p) for p in matrices(plan, *ROWS))
    )


# ---- the batch covers the mesh -----------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", cases([4, 8, 16], [8]))
def test_a_small_model_with_much_memory_is_data_parallel(devices: int) -> None:
    """GPT-2, 64 x 1024: every weight is read whole. Storage is sharded, since the gathers hide (ZeRO is free)."""
    plan = planned(gpt2_small(64), f"h100:{devices}", {"dp": devices})
    assert splits_batch_over(plan, {"dp"}) and plan.data_size == devices
    # The table of positions has no batch: a column of it on every device is fine.
    assert all(p.compute.is_replicate for n, p in plan.params.items() if "wpe" not in n)


@pytest.mark.parametrize("devices", cases([16, 32, 64], [32]))
def test_llama_8b_is_fully_sharded(devices: int) -> None:
    assert is_fully_sharded_data_parallel(planned(llama_8b(64, 8192), f"h100:{devices}", {"dp": devices}))


@pytest.mark.parametrize(("nodes", "depth"), cases([(16, 32), (32, 32), (32, 40)], ()))
def test_llama_8b_is_fully_sharded_over_two_axes(nodes: int, depth: int) -> None:
    """A global batch of 256 on up to 256 devices: FSDP over both axes, no tensor parallelism in layers."""
    assert is_fully_sharded_data_parallel(planned(llama_8b(256, 8192, depth), f"h100:{nodes}x8", {"dp": nodes, "tp": 8}))


# ---- the batch does not cover the mesh ---------------------------------------------------------------------------


@pytest.mark.parametrize("depth", cases([24, 32, 40], [24]))
def test_what_the_batch_cannot_split_is_split_inside_a_node(depth: int) -> None:
    """A global batch of 32 on 32 x 8, 8192 tokens each: inside a node attention splits heads, products the sequence (their weights' gathers hide) or their columns.

    Told to be fsdp+tp, the program finds Megatron's columns and rows with the stream split along the sequence; it is slower.
    """
    program = llama_8b(32, 8192, depth)
    free = planned(program, "h100:32x8", {"dp": 32, "tp": 8})
    assert splits_batch_over(free, {"dp"})
    assert all(axes_of(free, p) <= {"tp"} for p in matrices(free, *COLUMNS, *ROWS))
    assert is_sequence_parallel(free, program.graph)
    heads = {x for c in free.ops.values() if c.kind == "attention" for a, (x, _) in c.strategy.items() if a.startswith("tp")}
    assert heads == {"g"}
    told = planned(program, "h100:32x8", {"dp": 32, "tp": 8}, layout="fsdp+tp")
    assert told.layout == "fsdp+tp" and is_megatron(told, "tp")
    assert all(is_stored_everywhere_once(told, p) for p in matrices(told, *COLUMNS, *ROWS))
    assert is_sequence_parallel(told, program.graph)
    assert free.predicted["step_time_s"] < told.predicted["step_time_s"]


def is_sequence_parallel(plan: Plan, graph: Graph) -> bool:
    """Where residuals are added, the sequence is split over tp."""
    sums = [
        op
        for op in graph.ops
        if op.direction == "forward" and op.target == "aten.add.Tensor" and len(op.inputs) == 2 and len(op.out.shape) == 3
    ]
    assert sums
    return all({a for a, (x, _) in plan.ops[op.name].strategy.items() if x == "d1"} == set(plan.mesh.children("tp")) for op in sums)


@pytest.mark.parametrize("depth", cases([24, 32, 40], [24]))
def test_with_few_tokens_a_device_layers_are_tensor_parallel(depth: int) -> None:
    """32 sequences of 2048 on 32 x 8: 256 tokens a device, not enough to hide gathers of whole weights."""
    assert is_megatron(planned(llama_8b(32, 2048, depth), "h100:32x8", {"dp": 32, "tp": 8}), "tp")


@pytest.mark.parametrize("slower", cases([2, 4, 8], [4]))
def test_tensor_parallelism_stays_inside_a_node(slower: int) -> None:
    """Links between nodes of a half, a quarter, an eighth of the bandwidth."""
    c = Cluster.of("h100:32x8")
    slow = c.model_copy(update={"inter": c.inter.model_copy(update={"bandwidth_Bps": c.inter.bandwidth_Bps / slower})})
    plan = planned(llama_8b(32, 2048), slow, {"dp": 32, "tp": 8})
    assert splits_batch_over(plan, {"dp"})
    assert all(axes_of(plan, p) <= {"tp"} for p in matrices(plan, *COLUMNS, *ROWS))


@pytest.mark.parametrize("devices", cases([4, 8, 16], [4]))
def test_attention_is_never_repeated(devices: int) -> None:
    """GPT-2 with a batch of 4: 12 heads do not divide over 8 devices; its batch and heads together do."""
    plan = planned(gpt2_small(4), f"h100:{devices}", {"dp": devices})
    for c in plan.ops.values():
        if c.kind == "attention":
            assert set(c.strategy) == set(plan.mesh.names)


# ---- the head ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", cases([131_072, 262_144, 524_288], [131_072]))
def test_a_huge_vocabulary_is_split(vocabulary: int) -> None:
    """Two layers before a head that outweighs them: nothing hides its gather, so it and the loss are split over the vocabulary."""
    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 5504, "vocab_size": vocabulary}
    plan = planned(fold(llama(2, 8, 1024, **sizes)), "h100:8", {"dp": 8})
    assert axes_of(plan, plan.params["lm_head.weight"], 0) == {"dp"}
    losses = [c for c in plan.ops.values() if c.kind == "loss"]
    assert losses and all({x for x, _ in c.strategy.values()} == {"c"} and set(c.strategy) == set(plan.mesh.names) for c in losses[:1])
