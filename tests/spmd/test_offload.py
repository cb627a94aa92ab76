"""Activations kept away from the device, on simulated ranks: the same numbers, bit by bit; the transfers that were priced, and no others.

    python -m tests.spmd.test_offload --model llama --mesh dp=2,tp=2 --medium nvme

The links to host and disk are so fast here that these tiny models can use them.
"""

from __future__ import annotations

import argparse
import functools
import math
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.cost import Cost
from autopar.graph.calls import is_transfer, transferred
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.offload import OffloadSettings, close_store, find_store, open_store
from autopar.passes.manager import overlap
from autopar.passes.partition import Parts
from autopar.plan.plan import Plan
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.planning import Planned, plan_graph
from autopar.rules import lookup
from autopar.simulate.price import price
from autopar.solver.solve import Limits
from tests.models import ZOO
from tests.spmd.simulate import STORE, fake_world, simulated
from tests.spmd.test_planned import SEED, captured, check, cluster
from tests.spmd.test_price import mesh_of
from tests.wide import cases, wide

LIMITS = Limits(gap=0.01, seconds=60)


def fast(devices: int) -> Cluster:
    c = cluster(devices)
    link = c.host.model_copy(update={"bandwidth_Bps": 1e15, "latency_s": 0.0})
    disk = {"read": {"bandwidth_Bps": 1e15, "efficiency": 1.0, "latency_s": 0.0}}
    nvme = type(Cluster.of("cpu").nvme).model_validate({**disk, "write": disk["read"]})
    return c.model_copy(update={"host": link, "nvme": nvme})


def training_of(name: str, media: tuple[str, ...], budget_bytes: float) -> TrainingConfig:
    p, _ = captured(name, 4)
    trainable = frozenset(n for n, q in p.model.named_parameters() if q.requires_grad)
    return TrainingConfig(trainable, budget_bytes=budget_bytes, media=media, least_bytes=1.0)


@functools.cache
def planned(name: str, axes: str, media: tuple[str, ...], budget_bytes: float) -> Planned:
    mesh = mesh_of(axes)
    return plan_graph(captured(name, 4)[0].graph, mesh, fast(math.prod(mesh.values())), training_of(name, media, budget_bytes), LIMITS)


@functools.cache
def little(name: str, axes: str, medium: str) -> Planned:
    """A plan with less memory than one that saves everything would take; Mixtral with 0.8 and less shards its weights instead, and then has room for all."""
    share = 0.9 if name == "mixtral" else 0.7
    return planned(name, axes, (medium,), share * planned(name, axes, (), math.inf).plan.predicted["peak_memory_bytes"])


def rewritten(name: str, axes: str, plan: Plan) -> Parts:
    mesh = mesh_of(axes)
    with fake_world(math.prod(mesh.values())):
        return overlap(simulated(captured(name, 4)[0], mesh, plan).parts, "sim")


CASES = [
    ("llama", "dp=1", "host"),
    ("gpt2", "dp=1", "nvme"),
    ("bert", "dp=4", "host"),
    ("llama", "dp=2,tp=2", "nvme"),
    ("mixtral", "dp=4", "host"),
]


@pytest.mark.parametrize(("name", "axes", "medium"), cases(CASES, CASES[:2]))
def test_equals_one_device(name: str, axes: str, medium: str, tmp_path: Path) -> None:
    found = little(name, axes, medium)
    assert found.plan.offload and set(found.plan.offload.values()) == {medium}
    open_store(STORE, OffloadSettings(10**9, str(tmp_path), 10**9))
    try:
        check(name, mesh_of(axes), found, 4)
        moved = find_store(STORE).counters(medium)
        assert moved.sent_bytes > 0 and moved.in_use_bytes == 0, moved
    finally:
        close_store(STORE)


# Mixtral's routers copy what backward alone reads: where such an operator runs again its run in forward is gone, and priced all the same (0.03% of this step).
@pytest.mark.parametrize(("name", "axes", "medium"), cases(CASES[:-1], CASES[:1]))
def test_what_is_priced_is_moved(name: str, axes: str, medium: str) -> None:
    """The time to 1e-6; every tensor that is kept away leaves once and comes back once."""
    found = little(name, axes, medium)
    parts = rewritten(name, axes, found.plan)
    p, _ = captured(name, 4)
    mesh = mesh_of(axes)
    cost = Cost.compiled(fast(math.prod(mesh.values())), Mesh.of(mesh), p.graph, {op.name: lookup(op) for op in p.graph.ops})
    got = price(parts, found.plan, p.graph, cost, training_of(name, (medium,), math.inf), "sim")
    want = found.plan.predicted["step_time_s"]
    assert abs(got.step_time_s - want) <= 1e-6 * want, f"{got}\npredicted {found.plan.predicted}"
    for gm in (parts.forward, parts.backward):
        assert gm is not None
        issues = [n for n in gm.graph.nodes if is_transfer(n)]
        assert Counter(transferred(n)[0] for n in issues) == Counter(found.plan.offload.values())


@wide
def test_only_what_links_carry_beside_compute() -> None:
    """With plenty of memory nothing leaves; with little, what would be made again leaves instead; over a slow link nothing can."""
    p, everything = captured("llama", 4)[0], planned("llama", "dp=1", (), math.inf).plan
    assert not planned("llama", "dp=1", ("host",), math.inf).plan.offload
    budget = 0.7 * everything.predicted["peak_memory_bytes"]
    quick = planned("llama", "dp=1", ("host",), budget).plan
    training = training_of("llama", ("host",), budget)
    crawling = fast(1).model_copy(update={"host": fast(1).host.model_copy(update={"bandwidth_Bps": 1.0})})
    slow = plan_graph(p.graph, {"dp": 1}, crawling, training, LIMITS).plan
    alone = planned("llama", "dp=1", (), budget).plan
    assert quick.offload and not slow.offload
    assert len(quick.recompute) < len(slow.recompute)
    assert quick.predicted["step_time_s"] < slow.predicted["step_time_s"] == pytest.approx(alone.predicted["step_time_s"], rel=0.01)
    full = plan_graph(p.graph, {"dp": 1}, fast(1), replace(training, host_bytes=1.0), LIMITS).plan
    assert not full.offload


def test_one_layer_later_and_one_layer_earlier() -> None:
    """Between the issue of a transfer and its end there is a layer's work."""
    from autopar.passes.overlap import overlapped

    parts = rewritten("llama", "dp=1", little("llama", "dp=1", "host").plan)
    for gm in (parts.forward, parts.backward):
        windows = [window for n, window in overlapped(gm) if is_transfer(n)]
        assert windows and min(windows) > 5, windows


def check_bits(name: str, plans: tuple[Plan, ...], folder: Path) -> None:
    """One device, dropout as in training: every plan's gradients are those of the first."""
    p, _ = captured(name, 4)
    params, buffers = dict(p.model.named_parameters(remove_duplicate=False)), dict(p.model.named_buffers())
    results = []
    for plan in plans:
        open_store(STORE, OffloadSettings(10**9, str(folder), 10**9))
        try:
            with fake_world(1):
                results.append(simulated(p, {"dp": 1}, plan).run(params, buffers, p.tensors, SEED)[1])
        finally:
            close_store(STORE)
    for other in results[1:]:
        for n, g in results[0].items():
            assert (g is None and other[n] is None) or torch.equal(g, other[n]), n


@pytest.mark.parametrize("name", cases(["llama", "gpt2", "bert"], ["gpt2"]))
def test_the_same_bits(name: str, tmp_path: Path) -> None:
    """Gradients of saving everything, and of keeping it away."""
    plan = little(name, "dp=1", "host").plan
    in_files = replace(plan, activations={t: "offload:nvme" for t in plan.offload})
    check_bits(name, (planned(name, "dp=1", (), math.inf).plan, plan, in_files), tmp_path)


@pytest.mark.parametrize("name", cases(["toy-dropout", "gpt2"], ["toy-dropout"]))
def test_all_policies_at_once_are_the_same_bits(name: str, tmp_path: Path) -> None:
    """Little room anywhere: saved, kept in host memory, kept in files and made again in chains, in one plan."""
    p, _ = captured(name, 4)
    everything = planned(name, "dp=1", (), math.inf).plan
    offloaded_bytes = sum(p.graph.tensors[t].nbytes for t in little(name, "dp=1", "host").plan.offload)
    training = training_of(name, ("host", "nvme"), 0.5 * everything.predicted["peak_memory_bytes"])
    training = replace(training, host_bytes=0.1 * offloaded_bytes, nvme_bytes=0.1 * offloaded_bytes)
    plan = plan_graph(p.graph, {"dp": 1}, fast(1), training, LIMITS).plan
    again = {op.name: op for op in p.graph.ops if op.name in plan.recompute and lookup(op).kind != "view"}
    views = {op.out.name: op.inputs[0].name for op in p.graph.ops if lookup(op).kind == "view"}

    def viewed(name: str) -> str:
        return viewed(views[name]) if name in views else name

    read_by_recompute = {viewed(t.name) for op in again.values() for t in op.inputs}
    assert set(plan.offload.values()) == {"host", "nvme"} and "save" in plan.activations.values()
    assert any(t is not None and t.name in read_by_recompute for op in again.values() for t in op.outputs), "no chain"
    check_bits(name, (everything, plan), tmp_path)


def main() -> None:
    parser = argparse.ArgumentParser(description="A plan that keeps activations away, run on simulated ranks")
    parser.add_argument("--model", default="llama", choices=sorted(ZOO))
    parser.add_argument("--mesh", default="dp=4")
    parser.add_argument("--medium", default="host", choices=("host", "nvme"))
    args = parser.parse_args()
    found = little(args.model, args.mesh, args.medium)
    with tempfile.TemporaryDirectory() as folder:
        open_store(STORE, OffloadSettings(10**9, folder, 10**9))
        check(args.model, mesh_of(args.mesh), found, 4)
        print(f"equals one device; {len(found.plan.offload)} tensors kept away; {find_store(STORE).counters(args.medium)}")
        close_store(STORE)


if __name__ == "__main__":
    main()
