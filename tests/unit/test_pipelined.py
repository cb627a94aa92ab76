"""Plans of pipelines that are made without the cluster: cut as the captured whole is, replayed with hops, in memory; bad input by name."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.capture.belongs import belongs
from autopar.capture.capture import Call, capture, off_cache
from autopar.capture.describe import describe
from autopar.cost import Cost
from autopar.errors import AutoparError, LayoutError, MeshError
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.pipeline import Times, scheduled
from autopar.pipeline import replay as replayed
from autopar.plan import schema
from autopar.planner.cuts import cut_into, shares, stages_of
from autopar.planner.infeasible import InfeasibleError
from tests.models import ZOO

CLUSTER = "h100:2x2"


def planned(name: str = "llama", layers: int = 8, mesh: Any = None, **kwargs: Any) -> autopar.Plan:
    torch.manual_seed(0)
    model = ZOO[name].build(layers).train()
    how = {"cluster": CLUSTER, "mesh": {"pp": 2, "dp": 2} if mesh is None else mesh, "micro_batches": 4, "options": {"seconds": 30}}
    return autopar.plan(model, ZOO[name].inputs(16, 16), **{**how, **kwargs})


@pytest.mark.parametrize(("name", "layers", "stages"), [("llama", 8, 2), ("gpt2", 9, 3), ("t5", 6, 4), ("gemma3", 14, 2)])
def test_cut_as_the_whole_program_is(name: str, layers: int, stages: int) -> None:
    """Folded of few layers, a model is cut as its whole graph is: the same layers, work within two per cent of a stage's."""
    torch.manual_seed(0)
    model = ZOO[name].build(layers).train()
    call = Call.of((), off_cache(model, ZOO[name].inputs(4, 16)))
    found = capture(model, call, tuple((tuple(t.shape), t.dtype) for t in call.tensors))
    graph = describe(found)
    matches = belongs(found.gm, graph)
    cut = cut_into(graph, matches, stages)
    forward, backward = shares(graph, stages_of(graph, matches, cut), stages)
    plan = planned(name, layers, {"pp": stages, "dp": 1}, cluster=f"h100:1x{stages}", schedule="1f1b")
    assert plan.pipeline is not None
    whole = [layer for stage in cut.stages for layer in stage]
    assert [layer for stage in plan.pipeline.layers for layer in stage] == whole
    assert [len(stage) for stage in plan.pipeline.layers] == [len(stage) for stage in cut.stages]
    assert plan.pipeline.work == pytest.approx([f + b for f, b in zip(forward, backward, strict=True)], abs=0.02)


def test_times_are_the_replay_with_hops() -> None:
    alone = planned(mesh={"dp": 2}, cluster="h100:1x2")
    plan = planned(micro_batches=8, schedule="1f1b")
    assert plan.pipeline is not None and plan.mesh_axes == {"dp": 2} and plan.micro_batches == 8
    # A stage hands on one hidden state of its sample of a micro-batch of two, of 16 tokens.
    width = plan.params["model.norm.weight"].shape[0]
    assert plan.pipeline.sent_bytes == (16 * width * 4, 0)
    cluster = Cluster.of(CLUSTER)
    cost = Cost(cluster, Mesh.of({"pp": 2, "dp": 2}))
    hop = cost.collective("send", cost.mesh.children("pp"), plan.pipeline.sent_bytes[0]).seconds
    lists = scheduled("1f1b", 2, 8)
    fast = replayed(lists, Times((1e-9,) * 2, (1e-9,) * 2, (hop, 0.0))).total_s
    assert plan.predicted["pipeline_s"] > fast > 0
    assert plan.predicted["step_time_s"] == pytest.approx(plan.predicted["pipeline_s"] + plan.predicted["optimizer_s"])
    assert alone.pipeline is None


def test_a_schedule_with_less_bubble_takes_less() -> None:
    steps = {s: planned(schedule=s, micro_batches=4, cluster="h100:1x2", mesh={"pp": 2, "dp": 1}) for s in ("1f1b", "interleaved", "zbv")}
    bubbles = [p.pipeline.bubble for p in steps.values() if p.pipeline is not None]
    assert all(a > b for a, b in pairwise(bubbles)), bubbles
    assert all(p.predicted["peak_memory_bytes"] <= p.predicted["budget_bytes"] for p in steps.values())


def test_the_number_of_micro_batches_is_found() -> None:
    plan = planned(micro_batches="auto", mesh={"pp": 2, "dp": 2})
    tried = {int(x.split(":")[0]) for x in str(plan.solver["micro_batches"]).split("; ")}
    assert len(tried) > 1 and plan.micro_batches in tried and 16 % plan.micro_batches == 0
    for m in tried:
        assert planned(micro_batches=m).predicted["step_time_s"] >= plan.predicted["step_time_s"] * (1 - 1e-9)


def test_a_pipeline_takes_less_memory() -> None:
    """Of a model whose state is large beside its activations, half on each of two stages."""
    one = planned("gpt2", 48, {"dp": 1}, cluster="h100:1x1", micro_batches=16)
    two = planned("gpt2", 48, {"pp": 2, "dp": 1}, cluster="h100:1x2", micro_batches=16)
    assert two.predicted["peak_memory_bytes"] < 0.6 * one.predicted["peak_memory_bytes"]


def test_saved_and_read_again() -> None:
    plan = planned(schedule="interleaved")
    again = autopar.Plan.loads(schema.dumps(plan))
    with pytest.raises(AutoparError, match="a pipeline's plan has no timeline"):
        again.timeline()
    assert again.pipeline == plan.pipeline and "pipeline: interleaved, 4 stages on 2 ranks, 4 micro-batches" in again.text()


def test_a_trace_has_a_track_for_every_rank(tmp_path: Path) -> None:
    plan = planned(schedule="zbv", micro_batches=8)
    assert plan.pipeline is not None
    plan.to_perfetto(tmp_path / "trace.json")
    made = json.loads((tmp_path / "trace.json").read_text())
    events = [e for e in made["traceEvents"] if e["ph"] == "X"]
    assert {e["tid"] for e in events} == {1, 2} and len(events) == 4 * 8 * 3
    assert made["otherData"]["step_s"] == pytest.approx(plan.predicted["pipeline_s"], rel=1e-3)
    busy = sum(e["dur"] for e in events) / 1e6
    assert 1 - busy / (2 * made["otherData"]["step_s"]) == pytest.approx(plan.pipeline.bubble, abs=2e-3)
    with pytest.raises(AutoparError, match="does not say what its stages take"):
        replace(plan, pipeline=replace(plan.pipeline, forward_s=(), backward_s=(), hop_s=())).to_perfetto(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ({"mesh": {"dp": 2, "pp": 2}}, MeshError, "write it first"),
        ({"schedule": "interleaved", "virtual_stages": 8}, LayoutError, "needs as many layers"),
        ({"micro_batches": 5}, LayoutError, "do not make 5 micro-batches"),
        ({"schedule": "2f2b"}, LayoutError, "no pipeline schedule"),
        ({"mesh": {"dp": 4}, "schedule": "1f1b"}, MeshError, "has no axis 'pp'"),
        ({"mesh": {"pp": 2, "dp": 3}, "cluster": "h100:3x2"}, MeshError, "neither a part of a node"),
        ({"virtual_stages": 3}, LayoutError, "1f1b has 1 stage"),
        ({"memory": 2e5}, InfeasibleError, "bytes"),
    ],
)
def test_bad_input(how: dict[str, Any], error: type[AutoparError], said: str) -> None:
    with pytest.raises(error) as e:
        planned(**how)
    assert said in str(e.value) or error is InfeasibleError
