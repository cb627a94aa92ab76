"""Plans of the integer program, executed on simulated ranks, equal one device.

    python -m tests.spmd.test_planned --model llama --mesh dp=2,tp=2 --budget 0.8

Times are those of an H100 without latencies ("even"): these models are tiny, and with them the best plan would be to split nothing.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
import torch

from autopar.hardware.cluster import Cluster
from autopar.plan.decisions import CollectiveUse
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.planning import Planned, plan_graph
from autopar.solver.solve import Limits
from tests.models import ZOO
from tests.spmd.simulate import Prepared, fake_world, one_device, prepare, simulated
from tests.wide import cases

SEED = (3, 0)
LIMITS = Limits(gap=0.01, seconds=300)


def cluster(devices: int) -> Cluster:
    c = Cluster.of(f"h100:{max(8, devices)}")
    now = {"latency_s": 0.0}
    device = c.device.model_copy(update={"launch_s": 0.0})
    return c.model_copy(update={"device": device, "intra": c.intra.model_copy(update=now), "inter": c.inter.model_copy(update=now)})


LINKS: dict[str, Callable[[int], Cluster]] = {
    "even": cluster,
    "latencies": lambda devices: Cluster.of(f"h100:{max(8, devices)}"),
    "nodes": lambda devices: Cluster.of(f"h100:{devices // 2}x2").model_copy(update={"device": cluster(8).device}),  # two devices a node
    "contended": lambda devices: cluster(devices).model_copy(update={"contention": 0.4}),
}


@functools.cache
def captured(name: str, layers: int = 2) -> tuple[Prepared, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    zoo = ZOO[name]
    model = zoo.build(layers).train()
    inputs = zoo.inputs(8, 32)
    return prepare(model, inputs, zoo.compile.get("loss_fn")), inputs


@functools.cache
def _planned(
    name: str, mesh: tuple[tuple[str, int], ...], budget_bytes: float, layers: int, links: str, limits: Limits, micro_batches: int
) -> Planned:
    p, _ = captured(name, layers)
    trainable = frozenset(n for n, q in p.model.named_parameters() if q.requires_grad)
    training = TrainingConfig(trainable, budget_bytes=budget_bytes, micro_batches=micro_batches, in_a_row=micro_batches)
    return plan_graph(p.graph, dict(mesh), LINKS[links](math.prod(n for _, n in mesh)), training, limits)


def planned(
    name: str,
    mesh: dict[str, int],
    budget_bytes: float = float("inf"),
    layers: int = 2,
    links: str = "even",
    seconds: float = LIMITS.seconds,
    micro_batches: int = 1,
    gap: float = LIMITS.gap,
) -> Planned:
    return _planned(name, tuple(mesh.items()), budget_bytes, layers, links, Limits(gap, seconds), micro_batches)


def check(name: str, mesh: dict[str, int], found: Planned, layers: int = 2) -> None:
    """Loss and every gradient of the executed plan, by the bound of the float32 matrix."""
    p, inputs = captured(name, layers)
    model = p.model
    params = dict(model.named_parameters(remove_duplicate=False))
    with fake_world(math.prod(mesh.values())):
        outputs, grads, _ = simulated(p, mesh, found.plan).run(params, dict(model.named_buffers()), p.tensors, SEED)
    model.zero_grad()
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    loss = one_device(model, inputs, SEED, ZOO[name].compile.get("loss_fn"))
    loss.backward()
    for n, b in model.named_buffers():
        b.copy_(buffers[n])
    whole = math.sqrt(sum(float(q.grad.double().norm()) ** 2 for q in model.parameters() if q.grad is not None))
    assert {n for n, g in grads.items() if g is not None} == {n for n in grads if params[n].grad is not None}
    assert abs(float(outputs[0]) - float(loss.detach())) <= 1e-5 * abs(float(loss.detach()))
    for n, g in grads.items():
        want = params[n].grad
        assert want is not None
        assert float((g - want).double().norm()) <= 1e-5 * float(want.double().norm()) + 1e-7 * whole, n


NAMES = ["llama", "gpt2", "qwen3", "gemma3", "bert", "t5", "vit", "mixtral", "convnet", "lora"]


def counted(uses: tuple[CollectiveUse, ...], params: set[str]) -> Counter[tuple[str, str, float]]:
    """Kind, direction and bytes. The joint graph gathers a parameter once; that backward gathers it again is the partition's doing."""
    again = [u for u in uses if u.direction == "backward" and u.tensor.removeprefix("padded.") in params]
    found: Counter[tuple[str, str, float]] = Counter()
    for u in uses:
        if u.kind != "slice" and u not in again:
            found[u.direction, u.kind, round(u.wire_bytes)] += u.count
    return found


@pytest.mark.parametrize(
    ("name", "links"),
    cases(product(NAMES, ["even", "latencies"]), [("llama", "latencies"), ("gpt2", "even"), ("mixtral", "even"), ("convnet", "even")]),
)
def test_what_is_priced_is_inserted(name: str, links: str) -> None:
    mesh = {"dp": 4}
    p, _ = captured(name)
    plan = planned(name, mesh, links=links).plan
    with fake_world(4):
        inserted = simulated(p, mesh, plan).collectives
    params = {t.name for t in p.graph.params.values()}
    assert counted(plan.collectives, params) == counted(inserted, params)


@pytest.mark.parametrize("name", cases(NAMES, ["llama", "gpt2", "vit", "mixtral", "convnet"]))
def test_planned_equals_one_device(name: str) -> None:
    mesh = {"dp": 4}
    free = planned(name, mesh)
    assert free.solution.gap <= LIMITS.gap
    check(name, mesh, free)


@pytest.mark.parametrize(
    ("name", "mesh"), cases([("gpt2", {"dp": 4}), ("gpt2", {"a": 2, "b": 2}), ("bert", {"dp": 4})], [("gpt2", {"dp": 4})])
)
def test_every_rank_makes_learned_positions(name: str, mesh: dict[str, int]) -> None:
    """They are the same for every sample: no exchange for them, and their gradient stays Partial until it is reduced as all parameters' are."""
    found = planned(name, mesh)
    p, _ = captured(name)
    positions = next(t.name for n, t in p.graph.params.items() if "wpe" in n or "position" in n)
    (forward,) = [op for op in p.graph.ops if op.direction == "forward" and any(t.name == positions for t in op.inputs)]
    (backward,) = [
        op
        for op in p.graph.ops
        if op.target == "aten.embedding_dense_backward.default" and op.out.shape == p.graph.tensors[positions].shape
    ]
    assert not found.plan.ops[forward.name].strategy
    assert not found.plan.ops[backward.name].strategy and found.plan.ops[backward.name].partial
    check(name, mesh, found)


@pytest.mark.parametrize(
    "name", cases([n for n in NAMES if n not in ("t5", "lora")], ["llama"])
)  # whose least memory takes minutes to find
def test_little_memory(name: str) -> None:
    """At the least memory there is, where more must be made again: the budget is kept, and the numbers are the same."""
    mesh = {"dp": 4}
    free = planned(name, mesh)
    with pytest.raises(InfeasibleError) as error:
        planned(name, mesh, 1000.0)
    least = 1000.0 + error.value.shortfall_bytes
    tight = planned(name, mesh, least * 1.01, gap=0.1)  # how good it is, others ask
    assert max(tight.solution.price.row_bytes) <= least * 1.01
    assert max(free.solution.price.row_bytes) >= least
    check(name, mesh, tight)


@pytest.mark.parametrize(
    ("name", "shares"),
    cases(
        [("toy-dropout", (0.4, 0.7)), ("llama", (0.4, 0.7)), ("llama", (0.2, 0.6, 0.8)), ("gpt2", (0.2, 0.4, 0.6, 0.8))],
        [("toy-dropout", (0.4, 0.7))],
    ),
)
def test_layers_with_different_policies(name: str, shares: tuple[float, ...]) -> None:
    """Between plenty and the least memory: some layers keep what others make again, and the numbers are those of one device."""
    mesh, layers = {"dp": 4}, 8
    free = planned(name, mesh, layers=layers)
    most = max(free.solution.price.row_bytes)
    with pytest.raises(InfeasibleError) as error:
        planned(name, mesh, 1000.0, layers)
    least = 1000.0 + error.value.shortfall_bytes
    cut = []
    for share in shares:
        found = planned(name, mesh, least + share * (most - least), layers)
        assert max(found.solution.price.row_bytes) <= least + share * (most - least)
        assert found.solution.gap <= 0.03, "the bound does not know the memory inside of a layer's backward"
        cut += [found] if found.plan.segments else []
    assert cut, "no budget where layers differ"
    for found in cut[:2]:
        assert all(sum(n) == layers for n in found.plan.segments.values())
        check(name, mesh, found, layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama", choices=sorted(ZOO))
    parser.add_argument("--mesh", default="dp=4")
    parser.add_argument("--budget", type=float, default=math.inf, help="bytes a device")
    a = parser.parse_args()
    mesh = {k: int(v) for k, v in (x.split("=") for x in a.mesh.split(","))}
    found = planned(a.model, mesh, a.budget)
    print(found.plan)
    s = found.solution
    print(
        f"{s.objective_s * 1e6:.2f} us, gap {s.gap:.2%}, peak {max(s.price.row_bytes):,.0f} bytes, {len(found.plan.recompute)} ops run again"
    )
    check(a.model, mesh, found)
    print("equals one device")


if __name__ == "__main__":
    main()
