"""Plans of the integer program, rewritten: what a walk over the graphs says they cost, and what the simulator says, against what was predicted.

    python -m tests.spmd.test_price --model llama --mesh dp=2,tp=2 --budget 2e5

The price is the program's own definition of a step's time, so it is the same number. The simulator knows what the program does not: nothing hides
the first layer's gathers of a half, nor the last layers' reductions, and a collective hides only behind what runs between its issue and its wait.
In these models of two layers the ends are most of that; see `ends`.
"""

from __future__ import annotations

import argparse
import functools
import math
from typing import Any

import pytest

from autopar.cost import Cost
from autopar.graph.calls import is_wait
from autopar.graph.mesh import Mesh
from autopar.passes.manager import overlap
from autopar.passes.overlap import computes
from autopar.passes.partition import Parts
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.planning import Planned
from autopar.rules import lookup
from autopar.rules.strategy import placements
from autopar.simulate.price import Price, price
from autopar.simulate.simulator import records
from autopar.simulate.written_bytes import stored, with_saved
from autopar.timeline.replay import COMPUTE, Replay, replay
from tests.models import ZOO
from tests.spmd.simulate import fake_world, simulated
from tests.spmd.test_planned import LINKS, NAMES, captured, planned
from tests.wide import cases, wide

EXACT = 1e-6
STATE_BYTES = TrainingConfig(frozenset()).state_bytes
AXES = {1: "dp=4", 2: "dp=2,tp=2", 3: "a=2,b=2,c=2"}
# Any plan will do on two axes and three: the test is of the price, and the solver would take minutes for the best of some.
SECONDS = {1: 300.0, 2: 60.0, 3: 30.0}
FEWER_SECONDS = {("t5", 2): 5.0, ("t5", 3): 5.0}  # whose whole program has no answer in a minute either: axes are merged
CASES = [
    *((n, 1, "even") for n in NAMES),
    *((n, 2, "even") for n in NAMES),
    *((n, 2, "latencies") for n in ("qwen3", "gemma3", "vit", "mixtral")),
    ("gpt2", 2, "contended"),
    *((n, 2, "nodes") for n in ("llama", "gpt2", "mixtral", "convnet")),
    *((n, 3, "nodes") for n in ("llama", "gpt2", "t5", "mixtral", "convnet")),
    ("convnet", 3, "even"),
]
QUICK = [
    ("llama", 1, "even"),
    ("mixtral", 2, "latencies"),
    ("convnet", 3, "even"),
    ("convnet", 3, "nodes"),
]
LITTLE = ["llama", "convnet"]


def mesh_of(text: str) -> dict[str, int]:
    return {k: int(v) for k, v in (x.split("=") for x in text.split(","))}


@functools.cache
def priced(
    name: str, axes: str, budget_bytes: float = math.inf, links: str = "even", micro_batches: int = 1
) -> tuple[Planned, Price, Parts]:
    mesh, (p, _) = mesh_of(axes), captured(name)
    seconds = FEWER_SECONDS.get((name, len(mesh)), SECONDS[len(mesh)])
    found = planned(name, mesh, budget_bytes, links=links, seconds=seconds, micro_batches=micro_batches)
    devices = math.prod(mesh.values())
    with fake_world(devices):
        parts = overlap(simulated(p, mesh, found.plan).parts, "sim")
    trainable = frozenset(n for n, q in p.model.named_parameters() if q.requires_grad)
    training = TrainingConfig(trainable, micro_batches=micro_batches, in_a_row=micro_batches)
    return found, price(parts, found.plan, p.graph, cost_of(name, axes, links), training, "sim"), parts


def cost_of(name: str, axes: str, links: str = "even") -> Cost:
    mesh, graph = mesh_of(axes), captured(name)[0].graph
    return Cost.compiled(LINKS[links](math.prod(mesh.values())), Mesh.of(mesh), graph, {op.name: lookup(op) for op in graph.ops})


@functools.cache
def least(name: str, axes: str, micro_batches: int = 1) -> float:
    with pytest.raises(InfeasibleError) as error:
        planned(name, mesh_of(axes), 1000.0, micro_batches=micro_batches)
    return 1000.0 + error.value.shortfall_bytes


def simulate(name: str, axes: str, found: Planned, got: Price, parts: Parts) -> Replay:
    """The step without the optimizer; memory with its state."""
    seconds: dict[Any, tuple[str, float]] = {}
    for c in got.charges:  # what an operator exchanges inside is a part of it, unless it runs beside
        if c.serves == "attention":
            continue
        resource, before = seconds.get(c.node, (c.resource, 0.0))
        seconds[c.node] = resource, before + c.seconds
    p, _ = captured(name)
    table, start = records(
        parts, lambda n: seconds.get(n, (COMPUTE, 0.0)), with_saved(parts, stored(p.graph, cost_of(name, axes), parts.backward))
    )
    places = (n for n in parts.forward.graph.nodes if n.op == "placeholder")
    params = found.plan.params
    trained = sum(
        n.meta["val"].numel() for n, r in zip(places, parts.forward_inputs, strict=True) if r.kind == "param" and params[r.name].trainable
    )
    return replay(table, start + int(STATE_BYTES * trained))


def ends(got: Price, parts: Parts) -> float:
    """Seconds of the collectives with nothing to hide behind: parameters gathered before a half's first call that computes, gradients reduced
    behind the last."""
    seconds = {c.node: c.seconds for c in got.charges if c.serves in ("parameter", "gradient")}
    out = 0.0
    for gm in (parts.forward, parts.backward):
        nodes = list(gm.graph.nodes) if gm is not None else []
        work = [i for i, n in enumerate(nodes) if computes(n)]
        for i, n in enumerate(nodes):
            if n in seconds and (i < work[0] or any(is_wait(u) and nodes.index(u) > work[-1] for u in n.users)):
                out += seconds[n]
    return out


def undrawn_s(name: str, axes: str, links: str, found: Planned, got: Price) -> float:
    """Seconds of what the plan makes again for a dropout that runs again: backward draws its mask alone, of a counter, and the graph has no need of the operand."""
    cost, plan, graph, out = cost_of(name, axes, links), found.plan, captured(name)[0].graph, 0.0
    ran = {c.op for c in got.charges if c.stage == "backward" and not c.kind}
    for op in graph.ops:
        made = {t.name for t in op.outputs if t is not None}
        readers = [r for r in graph.ops if r.direction == "forward" and any(t.name in made for t in r.inputs)]
        if op.name in plan.recompute - ran and readers and all(lookup(r).kind == "random" and r.name in plan.recompute for r in readers):
            choice, shapes = plan.ops[op.name], tuple(None if t is None else t.shape for t in op.outputs)
            want, at = placements(lookup(op), choice.strategy, tuple(t.shape for t in op.inputs), shapes, choice.partial)
            out += cost.op(op, lookup(op), choice.strategy, want, at, recompute=True).seconds
    return out


@pytest.mark.parametrize(("name", "axes", "links"), cases(CASES, QUICK))
def test_price(name: str, axes: int, links: str) -> None:
    found, got, _ = priced(name, AXES[axes], links=links)
    undrawn = undrawn_s(name, AXES[axes], links, found, got)
    assert undrawn <= 2e-5 * got.step_time_s
    compute_s = got.accounts_s["backward", COMPUTE]
    drawn_s = max(compute_s + undrawn, got.stage_s["backward"]) - got.stage_s["backward"]  # nothing, where backward waits for links
    want = found.plan.predicted["step_time_s"] - drawn_s
    assert abs(got.step_time_s - want) <= EXACT * want, f"{got}\npredicted {found.plan.predicted}"


@wide
def test_price_of_one_of_four_micro_batches() -> None:
    found, got, _ = priced("gpt2", "dp=2,tp=2", micro_batches=4)
    want = found.plan.predicted["step_time_s"]
    assert abs(got.step_time_s - want) <= EXACT * want, f"{got}\npredicted {found.plan.predicted}"
    assert any(c.once_a_call for c in found.plan.params.values())
    assert want < priced("gpt2", "dp=2,tp=2")[0].plan.predicted["step_time_s"]


@pytest.mark.parametrize(("name", "axes"), cases([("llama", "dp=4"), ("qwen3", "dp=2,tp=2"), ("llama", "dp=2,tp=2")], [("llama", "dp=4")]))
def test_price_where_every_micro_batch_reduces_gradients(name: str, axes: str) -> None:
    """Where memory is short, for want of which sums of unreduced gradients have no room."""
    found, got, _ = priced(name, axes, 1.02 * least(name, axes, 4), micro_batches=4)
    early = [c for c in found.plan.params.values() if c.accumulated is not None]
    assert early
    want = found.plan.predicted["step_time_s"]
    assert abs(got.step_time_s - want) <= EXACT * want, f"{got}\npredicted {found.plan.predicted}"


@pytest.mark.parametrize("name", cases(LITTLE, ["convnet"]))
def test_price_with_little_memory(name: str) -> None:
    found, got, _ = priced(name, AXES[1], 1.01 * least(name, AXES[1]))
    want = found.plan.predicted["step_time_s"]
    assert found.plan.recompute
    assert abs(got.step_time_s - want) <= EXACT * want, f"{got}\npredicted {found.plan.predicted}"


@pytest.mark.parametrize(
    ("name", "little"),
    cases([*((n, False) for n in NAMES), *((n, True) for n in LITTLE)], [("gpt2", False), ("convnet", True)]),
)
def test_simulated_time(name: str, little: bool) -> None:
    """Never less than the price, whose stages overlap perfectly; at most the ends of the halves more, and 1% for waits between them."""
    found, got, parts = priced(name, AXES[1], 1.01 * least(name, AXES[1]) if little else math.inf)
    seconds = simulate(name, AXES[1], found, got, parts).seconds + got.stage_s["optimizer"]
    assert got.step_time_s * (1 - EXACT) <= seconds <= got.step_time_s * 1.01 + ends(got, parts)


@pytest.mark.parametrize("name", cases(["llama", "qwen3"], []))
def test_simulated_memory_keeps_the_budget(name: str) -> None:
    """With parameters gathered ahead and gradients reduced behind. Not where batch norm or dropout is lowered: what that makes on the way is more (the
    convolutional net +22%, BERT +26%), and a compiled kernel holds little of it."""
    budget = 1.01 * least(name, AXES[1])
    found, got, parts = priced(name, AXES[1], budget)
    assert simulate(name, AXES[1], found, got, parts).peak_bytes <= 1.05 * budget


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama", choices=sorted(ZOO))
    parser.add_argument("--mesh", default="dp=4")
    parser.add_argument("--budget", type=float, default=math.inf, help="bytes a device")
    parser.add_argument("--links", default="even", choices=LINKS)
    a = parser.parse_args()
    found, got, parts = priced(a.model, a.mesh, a.budget, a.links)
    print(found.plan)
    print(got)
    want, peak = found.plan.predicted["step_time_s"], found.plan.predicted["peak_memory_bytes"]
    replayed = simulate(a.model, a.mesh, found, got, parts)
    seconds = replayed.seconds + got.stage_s["optimizer"]
    print(f"priced {got.step_time_s * 1e6:.6f} us, predicted {want * 1e6:.6f} us: {got.step_time_s / want - 1:+.2e}")
    print(
        f"simulated {seconds * 1e6:.6f} us ({seconds / want - 1:+.1%}), of which without overlap at the ends {ends(got, parts) * 1e6:.6f} us"
    )
    print(
        f"simulated peak {replayed.peak_bytes:,} bytes at {replayed.peak_at}, predicted {peak:,.0f}: {replayed.peak_bytes / peak - 1:+.1%}"
    )
    if abs(got.step_time_s - want) > EXACT * want:
        raise SystemExit("the price is not what was predicted")


if __name__ == "__main__":
    main()
