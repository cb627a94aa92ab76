"""Ways to save memory that plans are compared with (`benchmarks/baselines`): each computes the same gradients to the bit, and saves what torch saves."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from autopar.capture.capture import Role
from autopar.capture.describe import tensor_name
from autopar.graph.calls import nbytes, shares_storage
from autopar.hardware.cluster import Cluster
from autopar.passes.offload import offload
from autopar.passes.partition import Parts, partition
from autopar.planner.layout import Layout
from autopar.planner.propagate import propagate
from benchmarks.baselines import Baseline, baselines
from benchmarks.baselines.balanced import by_density
from benchmarks.baselines.checkpoints import HEAVY, all_but_every, eager, handed_on, regions, save_list, tagged
from benchmarks.baselines.measure import live_bytes, lowered, median, tensors, within
from benchmarks.baselines.ours import CLOSE, Ours, verdict
from benchmarks.baselines.program import PREFIX, Program, capture_program
from benchmarks.baselines.torch_partitioner import copied, min_cut
from tests.models import ZOO

BUDGETS, SOLVERS = (0.3, 0.7), ("dp",)


def model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return ZOO[name].build(2).train()


@functools.cache
def captured(name: str = "llama") -> Program:
    return capture_program(model(name), ZOO[name].inputs(4, 16), {"dp": 1}, Cluster.of("h100:1"), "ddp", "float32")


@functools.cache
def settings(name: str = "llama") -> dict[str, Baseline]:
    return {f"{b.family} {b.setting}": b for b in baselines(captured(name), budgets=BUDGETS, solvers=SOLVERS)}


def saved_nodes(parts: Parts) -> list[Any]:
    """What forward hands to backward besides its own inputs."""
    results = parts.forward.graph.output_node().args[0]
    return [n for n in results[len(results) - len(parts.saved) :] if n.op == "call_function"]


def storages(nodes: list[Any]) -> Counter[tuple[str, int]]:
    """Kinds of the memory behind nodes, each memory once: the operator that makes it and its bytes."""
    found = {}
    for n in nodes:
        while (base := shares_storage(n)) is not None and not (isinstance(base.meta["val"], tuple) and shares_storage(base) is None):
            n = base
        found[n] = (str((shares_storage(n) or n).target), nbytes(n))
    return Counter(x for n, x in found.items() if n.op == "call_function")


# ---- the same numbers --------------------------------------------------------------------------------------------


def gradients(saved: frozenset[str]) -> dict[Role, torch.Tensor]:
    p, m = captured(), model("llama")
    known = {**dict(m.named_parameters(remove_duplicate=False)), **dict(m.named_buffers())}
    inputs = list(ZOO["llama"].inputs(4, 16).values())
    values = {r: inputs[r.index] if r.kind == "input" else known[r.name] if r.name else torch.ones(()) for r in p.captured.inputs}
    return lowered(p, p.keeping(saved), values, "aot_eager")()


@functools.cache
def whole() -> dict[Role, torch.Tensor]:
    return gradients(settings()["none "].saved)


def test_saving_everything_gives_the_models_gradients() -> None:
    m = model("llama")
    m(**ZOO["llama"].inputs(4, 16)).loss.backward()
    want = {Role("grad", n): q.grad for n, q in m.named_parameters()}
    got = {r: g for r, g in whole().items() if r.kind == "grad"}
    assert got.keys() == want.keys()
    for role, g in got.items():
        torch.testing.assert_close(g, want[role], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("setting", [
    "min-cut decomposed", "min-cut as captured", "memory budget 0.3 dp", "memory budget 0.7 dp", "op list heavy, eager", "op list heavy, compiled",
    "op list all but every 2nd product, eager", "op list attention, compiled", "by layer every layer, eager", "by layer every layer, compiled",
    "by layer 2 layers a region, eager", "by layer one layer of 2, eager", "balanced no product twice", "balanced density, 0.3 of the bytes",
])  # fmt: skip
def test_gradients_are_those_of_saving_everything(setting: str) -> None:
    p, saved = captured(), settings()[setting].saved
    assert p.parts(p.keeping(saved)).saved != p.parts(p.base).saved, "a baseline that does nothing"
    grads = gradients(saved)
    assert grads.keys() == whole().keys()
    assert all((g is None) == (whole()[r] is None) and (g is None or torch.equal(g, whole()[r])) for r, g in grads.items())


# ---- what torch saves --------------------------------------------------------------------------------------------


def torch_saves(p: Program, budget: float) -> set[str]:
    """Of the forward graph that torch's partitioner makes, the results that are for backward, without parameters and what follows from them alone."""
    from torch._functorch import config, partitioners

    known = partitioners.get_default_op_list()
    known.compute_intensive_ops.add(torch.ops.autopar.attention_v2)
    gm, roles = copied(p.captured.gm), p.captured.outputs
    count = next(i for i, r in enumerate(roles) if r.kind == "grad")
    with config.patch({"activation_memory_budget": budget}), mock.patch.object(partitioners, "get_default_op_list", lambda: known):
        forward, _ = partitioners.min_cut_rematerialization_partition(gm, None, num_fwd_outputs=count)
    names = {n.name for n in forward.graph.output_node().args[0][count:]}
    activations = set[Any]()
    for n, role in zip(p.captured.gm.graph.find_nodes(op="placeholder"), p.captured.inputs, strict=True):
        if role.kind in ("input", "buffer"):
            activations.add(n)
    for n in p.captured.gm.graph.nodes:
        if n.op == "call_function" and (not n.all_input_nodes or any(a in activations for a in n.all_input_nodes)):
            activations.add(n)
    return {tensor_name(n) for n in activations if n.name in names and n.op == "call_function"}


@pytest.mark.parametrize(("name", "budget"), [("llama", 1.0), ("llama", 0.5), ("bert-attention", 0.5)])
def test_min_cut_saves_what_torchs_partition_saves(name: str, budget: float) -> None:
    p = captured(name)
    nodes = saved_nodes(p.parts(p.keeping(min_cut(p, budget, decomposed=False))))
    mine = {n.meta["label"]: nbytes(n) for n in nodes}
    theirs = {t: p.graph.tensors[t].nbytes for t in p.of_forward(torch_saves(p, budget))}
    assert mine == theirs and len(mine) > 5


POLICIES = {"": None, "heavy": lambda: save_list(HEAVY), "every 2nd": lambda: all_but_every(2)}


@pytest.mark.parametrize(("name", "policy"), [("llama", ""), ("llama", "every 2nd"), ("bert-attention", "heavy")])
def test_checkpoints_save_what_torchs_checkpoint_saves(name: str, policy: str) -> None:
    """transformers' own gradient checkpointing, which is torch's around every layer, captured as such: the tags of its regions and policies are kept to."""
    p, made = captured(name), POLICIES[policy]
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if made is not None:
        kwargs["context_fn"] = lambda: create_selective_checkpoint_contexts(made())
    m = model(name)
    m.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    theirs = capture_program(m, ZOO[name].inputs(4, 16), {"dp": 1}, Cluster.of("h100:1"), "ddp", "float32")
    plan = propagate(theirs.graph, Layout.of("ddp", theirs.mesh), theirs.mesh_axes, theirs.training.trainable)
    assert plan.recompute
    sharded = theirs.sharded(plan)
    want = partition(sharded, recompute=plan.recompute)
    got = p.parts(p.keeping(eager(p, tagged(p, regions(p), made))))
    assert storages(saved_nodes(got)) == storages(saved_nodes(want))


def test_regions() -> None:
    p = captured()
    numbers = {k: set(regions(p, *k).values()) for k in ((1, 1), (2, 1), (1, 2))}
    assert numbers == {(1, 1): {0, 1}, (2, 1): {0}, (1, 2): {0}}
    by_layer, one = regions(p), regions(p, 1, 2)
    assert {p.layers[op] for op in one} == {("model.layers", 0)} and one.keys() < by_layer.keys()
    # Of the first layer, its result and the mask that all layers share; nothing of the last but its result.
    assert [p.graph.tensors[t].shape for t in sorted(handed_on(p, by_layer))].count((4, 16, 32)) == 2


def test_density_keeps_more_of_what_costs_more() -> None:
    p = captured()
    less, more = (by_density(p, share) for share in (0.2, 0.6))
    kinds = [Counter(p.rules[t.split(".")[0]].kind for t in kept if t.split(".")[0] in p.layers) for kept in (less, more)]
    points = [p.point(p.keeping(kept)) for kept in (less, more)]
    assert points[0].saved_bytes < points[1].saved_bytes and points[0].step_s > points[1].step_s
    assert kinds[0]["matmul"] + kinds[0]["attention"] <= kinds[1]["matmul"] + kinds[1]["attention"]


# ---- prices ------------------------------------------------------------------------------------------------------


def test_marks_are_those_of_the_shard_pass() -> None:
    """One local graph serves all plans of a device; each could have been sharded by itself."""
    p = captured()
    for saved in (settings()["min-cut decomposed"].saved, settings()["balanced no product twice"].saved):
        plan = p.keeping(saved)
        fast = p.parts(plan)
        sharded = p.sharded(plan)
        slow = offload(partition(sharded, recompute=plan.recompute), PREFIX, p.window_of, sharded.fake_mode)
        assert fast.saved == slow.saved
        for a, b in ((fast.forward, slow.forward), (fast.backward, slow.backward)):
            assert sorted(n.format_node() or "" for n in a.graph.nodes) == sorted(n.format_node() or "" for n in b.graph.nodes)


@pytest.mark.parametrize("fusion", ["planned", "compiled"])
def test_less_memory_costs_time(fusion: str) -> None:
    p, s = captured(), settings()
    everything, layers = (p.point(p.keeping(s[k].saved), fusion) for k in ("none ", "by layer every layer, eager"))
    assert layers.saved_bytes < everything.saved_bytes and layers.step_s > everything.step_s
    assert layers.peak_bytes <= everything.peak_bytes


def test_saving_everything_is_dominated() -> None:
    """Our plan within its peak takes no longer."""
    p = captured()
    theirs = p.point(p.keeping(settings()["none "].saved))
    plan, said = Ours(p, "planned", (), 10.0, 0.001).within(1.05 * theirs.peak_bytes)
    assert plan is not None and said["peak_bytes"] <= 1.06 * theirs.peak_bytes
    assert verdict(theirs.step_s, said)["dominated"]
    assert not verdict(said["step_s"] / 1.01, said)["dominated"] and verdict(1.0, None) == {"ratio": None, "dominated": False}


def test_within_measured_memory() -> None:
    """Our plan for what a baseline is measured to take takes no more, and much less than saving everything."""
    p = capture_program(model("llama"), ZOO["llama"].inputs(4, 16), {"dp": 1}, Cluster.of("cpu:1"), "ddp", "float32", fuses=False)
    values = tensors(p)
    values |= {r: torch.randint(0, 64, t.shape) for r, t in values.items() if r.kind == "input"}
    everything, theirs = (lowered(p, p.keeping(settings()[k].saved), values) for k in ("none ", "balanced no product twice"))
    most = live_bytes(theirs, values)
    assert most < live_bytes(everything, values)
    _, step, measured, _ = within(p, Ours(p, "planned", (), 10.0, 0.001), values, most)
    assert measured == live_bytes(step, values) <= most * (1 + CLOSE)
    want = everything()
    assert all(g is None or torch.equal(g, want[r]) for r, g in step().items())


def test_interval_of_a_median() -> None:
    """Of 10 values from the second to the ninth: outside of it is the median with 2 * 11 / 1024."""
    found = median([float(x) for x in range(10)])
    assert (found["median"], found["low"], found["high"]) == (4.5, 1.0, 8.0)
    assert (median([1.0, 2.0, 3.0])["low"], median([1.0, 2.0, 3.0])["high"]) == (1.0, 3.0)
