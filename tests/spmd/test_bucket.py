"""Buckets on simulated ranks: a step with its small collectives joined is one device's, bit for bit what it is with each by itself, and none is issued or awaited
elsewhere than its members were."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import fx

from autopar.cost import Cost
from autopar.cost.buckets import limit
from autopar.graph.calls import collective_of, is_collective, is_wait, nbytes
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.passes.bucket import MEMBERS, bucketed
from autopar.passes.manager import overlap
from autopar.passes.overlap import blocking_of, computes, is_ahead, is_behind, marked
from autopar.passes.partition import Parts
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.planning import plan_graph
from autopar.simulate.price import price
from autopar.simulate.simulator import records
from autopar.solver.solve import Limits
from autopar.timeline.replay import COMPUTE, replay
from tests.models import ZOO
from tests.spmd.simulate import Simulated, fake_world, one_device, simulated
from tests.spmd.test_models import assert_equal_gradients, prepared
from tests.spmd.test_planned import LINKS, captured, planned
from tests.wide import cases

SEED = (7, 1)
# The third dims of these models divide by no three: dp=3 pads.
CASES = [
    ("llama", {"dp": 4}, "fsdp", None),
    ("llama", {"dp": 4}, "ddp", None),
    ("llama", {"dp": 3}, "fsdp", None),
    ("llama", {"dp": 2, "tp": 2}, "fsdp+tp", None),
    ("llama", {"dp": 4}, "fsdp", torch.bfloat16),
    ("gpt2", {"dp": 2, "tp": 2}, "fsdp+tp", None),
    ("mixtral", {"dp": 4}, "fsdp", None),
    ("mixtral", {"dp": 2, "tp": 2}, "fsdp+tp", None),
    ("convnet", {"dp": 4}, "fsdp", None),
    ("convnet", {"dp": 4}, "ddp", torch.float64),
    ("t5", {"dp": 3}, "fsdp", None),
    ("lora", {"dp": 4}, "fsdp", None),
]
QUICK = [CASES[i] for i in (2, 3, 9)]
ORDERS = [("llama", {"dp": 4}, "fsdp"), ("gpt2", {"dp": 2, "tp": 2}, "fsdp+tp"), ("t5", {"dp": 4}, "fsdp")]


LAYERS = 3


def slow(axes: dict[str, int], name: str = "cpu") -> Cost:
    mesh = Mesh.of(axes)
    return Cost(Cluster.of(f"{name}:1x{mesh.size}"), mesh)


@dataclass
class Case:
    """A step, its halves with every collective by itself, and with buckets."""

    sim: Simulated
    single: Parts
    joined: Parts
    cost: Cost


@functools.cache
def small(name: str) -> Any:
    return prepared(name, 4, 8, 3)[0]


def case(p: Any, axes: dict[str, int], layout: Any, reduce: torch.dtype | None = None) -> Case:
    cost = slow(axes)
    sim = simulated(p, axes, layout, reduce=reduce)
    return Case(sim, overlap(sim.parts, "sim"), overlap(sim.parts, "sim", cost), cost)


@pytest.mark.parametrize(("name", "axes", "layout", "reduce"), cases(CASES, QUICK))
def test_equal(name: str, axes: dict[str, int], layout: str, reduce: torch.dtype | None) -> None:
    p, kwargs = prepared(name, 12, 8, 3)
    buffers = {n: b.clone() for n, b in p.model.named_buffers()}
    with fake_world(Mesh.of(axes).size):
        c = case(p, axes, layout, reduce)
        params = dict(p.model.named_parameters(remove_duplicate=False))
        (single, want, _), (loss, got, _) = (replace(c.sim, parts=x).run(params, buffers, p.tensors, SEED) for x in (c.single, c.joined))
    assert torch.equal(single[0], loss[0]) and want.keys() == got.keys()
    for n in want:
        assert torch.equal(want[n], got[n]), n
    found = bucketed(c.joined, "sim", c.cost)
    assert found.members > 4 and found.buckets < found.members
    assert blocking_of(c.single)[1] - blocking_of(c.joined)[1] == found.members - found.buckets
    if reduce is None or reduce.itemsize >= 4:
        model = copy.deepcopy(p.model)
        reference = one_device(model, kwargs, SEED, ZOO[name].compile.get("loss_fn"))
        reference.backward()
        torch.testing.assert_close(loss[0], reference.detach(), rtol=2e-6, atol=2e-6)
        assert_equal_gradients(model, got, False)


@pytest.mark.parametrize(
    ("name", "axes"),
    cases([("llama", {"dp": 2, "tp": 2}), ("mixtral", {"dp": 4}), ("convnet", {"dp": 4})], [("convnet", {"dp": 4})]),
)
def test_plans_are_equal(name: str, axes: dict[str, int]) -> None:
    """What the integer program chose, with what it makes again in backward."""
    found = planned(name, axes, links="latencies", gap=0.05)
    p, _ = captured(name)
    with fake_world(4):
        c = case(p, axes, found.plan)
        params, buffers = dict(p.model.named_parameters(remove_duplicate=False)), dict(p.model.named_buffers())
        (single, want, _), (loss, got, _) = (replace(c.sim, parts=x).run(params, buffers, p.tensors, SEED) for x in (c.single, c.joined))
    assert torch.equal(single[0], loss[0]) and all(torch.equal(want[n], got[n]) for n in want)


# ---- order -----------------------------------------------------------------------------------------------------------


def places(gm: fx.GraphModule) -> dict[str, tuple[int, int]]:
    """Calls that compute before the issue and before the wait of every collective of a parameter or gradient, by name; of a bucket its members' names."""
    out, done = {}, 0
    issued: dict[fx.Node, int] = {}
    for n in gm.graph.nodes:
        if is_collective(n) and marked(n):
            issued[n] = done
        elif is_wait(n) and n.args[0] in issued:
            for name in n.args[0].meta.get(MEMBERS, (n.args[0].name,)):
                out[name] = (issued[n.args[0]], done)
        done += computes(n)
    return out


@pytest.mark.parametrize(("name", "axes", "layout"), cases(ORDERS, ORDERS[:1]))
def test_issued_and_awaited_where_the_members_were(name: str, axes: dict[str, int], layout: str) -> None:
    p = small(name)
    with fake_world(4):
        c = case(p, axes, layout)
        alone = overlap(c.sim.parts, "sim", c.cost, joins=False)
    for single, joined in ((alone.forward, c.joined.forward), (alone.backward, c.joined.backward)):
        was, now = places(single), places(joined)
        assert was.keys() == now.keys()
        for n in joined.graph.nodes:
            members = n.meta.get(MEMBERS)
            if members is None:
                continue
            (at,) = {now[m] for m in members}
            issues, waits = zip(*(was[m] for m in members), strict=True)
            assert at[1] == min(waits)
            if is_ahead(n):
                assert at[0] == issues[0] and len(set(issues)) == 1, "gathers of two stretches"
            else:
                assert is_behind(n) and at[0] == max(issues) and len(set(waits)) == 1, "reductions of two stretches"
        for name_, at in now.items():  # what is in no bucket stands where it stood
            if not any(name_ in n.meta.get(MEMBERS, ()) for n in joined.graph.nodes):
                assert at == was[name_]
        # No bucket is filled further than it must be, but by a rest of less than half of one.
        for n in joined.graph.nodes:
            if MEMBERS in n.meta:
                within = limit(c.cost, *collective_of(n, "sim"))
                assert max(nbytes(n), nbytes(n.all_input_nodes[0])) < 1.5 * within.full_bytes + within.alone_bytes


def test_the_same_text_whatever_the_rank() -> None:
    p, axes = small("llama"), {"dp": 4}
    with fake_world(4):
        c = case(p, axes, "fsdp")
        again = overlap(c.sim.parts, "sim", c.cost)
    for a, b in ((c.joined.forward, again.forward), (c.joined.backward, again.backward)):
        text = [n.format_node() for n in a.graph.nodes]
        assert text == [n.format_node() for n in b.graph.nodes]
        assert not any("coordinate" in (n.format_node() or "") for n in a.graph.nodes if n.meta.get("op") == "bucket")


# ---- prices ----------------------------------------------------------------------------------------------------------


def test_price_and_simulator_see_what_is_saved() -> None:
    axes = {"dp": 4}
    p = small("llama")
    with fake_world(4):
        c = case(p, axes, "fsdp")
    training = TrainingConfig(frozenset(p.graph.params))
    single, joined = (price(x, c.sim.plan, p.graph, c.cost, training, "sim") for x in (c.single, c.joined))
    found = bucketed(c.joined, "sim", c.cost)
    links = [sum(t for (_, r), t in x.accounts_s.items() if r == "intra") for x in (single, joined)]
    assert links[0] - links[1] == pytest.approx(found.saved_s, rel=1e-6) and found.saved_s > 0
    computed = [sum(t for (_, r), t in x.accounts_s.items() if r == "compute") for x in (single, joined)]
    assert computed[0] - computed[1] == pytest.approx(c.cost.cluster.contention * found.saved_s, rel=1e-6)
    seconds = [{a.node: (a.resource, a.seconds) for a in x.charges} for x in (single, joined)]
    steps = []
    for parts, known in zip((c.single, c.joined), seconds, strict=True):
        table, start = records(parts, lambda n, known=known: known.get(n, (COMPUTE, 0.0)))
        steps.append(replay(table, start))
    assert steps[1].seconds < steps[0].seconds and steps[1].busy_s["intra"] == pytest.approx(links[1])
    # What lies side by side is counted: in a half, at most the buckets of the two stretches that are under way, once packed and once gathered.
    largest = max(
        nbytes(n) + nbytes(n.all_input_nodes[0])
        for gm in (c.joined.forward, c.joined.backward)
        for n in gm.graph.nodes
        if MEMBERS in n.meta
    )
    assert steps[0].peak_bytes < steps[1].peak_bytes <= steps[0].peak_bytes + 3 * largest


def _told(name: str, axes: dict[str, int], layout: str, joins: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of links, by half: of the integer program; by a walk over the graphs that run. On a cluster with latencies."""
    p, _ = captured(name, LAYERS)
    where = LINKS["latencies"](4)
    training = TrainingConfig(frozenset(p.graph.params), fuses=False, joins=joins)
    plan = plan_graph(p.graph, axes, where, training, Limits(0.05, 5), layout=layout).plan
    assert plan.profile is not None
    planned_s, walked_s = ({"forward": 0.0, "backward": 0.0} for _ in range(2))
    for call in plan.profile.calls:
        what = plan.profile.whats[call.what]
        if what.serves in ("parameter", "gradient"):
            planned_s[plan.profile.regions[call.at.region].stage] += call.seconds * call.times
    cost = Cost(where, Mesh.of(axes))
    with fake_world(4):
        parts = overlap(simulated(p, axes, plan).parts, "sim", cost if joins else None)
    for c in price(parts, plan, p.graph, cost, training, "sim").charges:
        if c.serves in ("parameter", "gradient"):
            walked_s[c.stage] += c.seconds
    return planned_s, walked_s


PRICED = [
    (name, axes, layout)
    for name in ("llama", "gpt2", "bert")
    for axes, layout in (({"dp": 4}, "fsdp"), ({"dp": 4}, "ddp"), ({"dp": 2, "tp": 2}, "fsdp+tp"))
]


@pytest.mark.parametrize(("name", "axes", "layout"), cases(PRICED, [PRICED[0]]))
def test_the_program_has_the_price_of_buckets(name: str, axes: dict[str, int], layout: str) -> None:
    """What it takes for collectives of parameters and gradients is what those of the graphs take that run; without buckets, several times as much. They differ by latencies: of
    a half, by two of what lies outside of layers, which is cut elsewhere. With two axes a layer has several buckets, by the axes that its parameters are split and summed over, of
    which the program counts one: it takes the less."""
    planned_s, walked_s = _told(name, axes, layout, True)
    alone_s, walked_alone_s = _told(name, axes, layout, False)
    few_s = 2.02 * LINKS["latencies"](4).intra.latency_s
    for half, seconds in walked_s.items():
        assert planned_s[half] <= seconds + few_s
        assert seconds < walked_alone_s[half] or walked_alone_s[half] == 0.0  # forward of DDP has none
        assert len(axes) > 1 or planned_s[half] >= seconds - few_s
        assert alone_s[half] == pytest.approx(walked_alone_s[half], rel=1e-3)
    assert sum(alone_s.values()) > 2 * sum(planned_s.values())


def test_nothing_is_joined_where_latency_is_nothing() -> None:
    p = small("llama")
    with fake_world(4):
        c = case(p, {"dp": 4}, "fsdp")
        fast = c.cost.cluster.model_copy(update={"intra": c.cost.cluster.intra.model_copy(update={"latency_s": 0.0, "step_s": 0.0})})
        parts = overlap(c.sim.parts, "sim", Cost(fast, c.cost.mesh))
    for a, b in ((parts.forward, c.single.forward), (parts.backward, c.single.backward)):
        assert [n.format_node() for n in a.graph.nodes] == [n.format_node() for n in b.graph.nodes]
