"""Products beside the collectives that layers wait for: the same step bit for bit, no more memory, and less time waited.

python -m tests.spmd.test_beside --model llama --mesh dp=2,tp=2 --layout fsdp+tp
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from autopar.cost import Cost
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.passes.beside import beside
from autopar.passes.manager import overlap
from autopar.passes.overlap import inputs_of, marked, overlapped
from autopar.passes.partition import Parts
from autopar.simulate.simulator import price_ops, records
from autopar.timeline.replay import COMPUTE, replay
from tests.spmd import simulate
from tests.spmd.simulate import fake_world
from tests.spmd.test_models import prepared
from tests.spmd.test_price import mesh_of
from tests.wide import cases

SEED = (7, 1)
# (model, mesh, layout) -> of backward's collectives of activations, how many have products beside them at least. What is left of llama's: the sum of the loss's
# gradient, which all products follow from, and the last of the step, which none are left for.
CASES = {
    ("toy", "dp=2,tp=2", "fsdp+tp"): (6, 10),
    ("llama", "dp=2,tp=2", "fsdp+tp"): (6, 8),
    ("gpt2", "dp=2,tp=2", "fsdp+tp"): (7, 10),
    ("mixtral", "dp=2,tp=2", "fsdp+tp"): (10, 25),
    ("llama", "tp=4", "tp"): (15, 27),
    ("t5", "tp=2", "tp"): (14, 20),
}


def moved(name: str, axes: str, layout: str) -> tuple[simulate.Simulated, Parts, Cost, Any]:
    p, _ = prepared(name, 4, 8, 3)
    mesh = Mesh.of(mesh_of(axes))
    cost = Cost(Cluster.of(f"cpu:1x{mesh.size}"), mesh)
    sim = simulate.simulated(p, mesh_of(axes), layout)
    halves = {
        half: beside(getattr(sim.parts, half), inputs_of(sim.parts, half == "backward"), "sim", cost) for half in ("forward", "backward")
    }
    return sim, replace(sim.parts, **halves), cost, p


def peak(parts: Parts) -> int:
    table, start = records(parts, lambda n: (COMPUTE, 1.0))
    return replay(table, start).peak_bytes


def hidden(gm: fx.GraphModule) -> tuple[int, int]:
    """(collectives of activations with something beside them, all of those)."""
    windows = [w for n, w in overlapped(gm) if not marked(n)]
    return sum(w > 0 for w in windows), len(windows)


@pytest.mark.parametrize(("name", "axes", "layout"), cases(list(CASES), list(CASES)[:2]))
def test_a_step_stays_what_it_is(name: str, axes: str, layout: str) -> None:
    """On simulated ranks, by itself and with all that overlaps; no call is added, and the most memory at a time is no more."""
    with fake_world(Mesh.of(mesh_of(axes)).size):
        sim, parts, cost, p = moved(name, axes, layout)

        def run(of: Parts) -> list[torch.Tensor]:
            outputs, grads, _ = replace(sim, parts=of).run(dict(p.model.named_parameters()), dict(p.model.named_buffers()), p.tensors, SEED)
            return [outputs[0], *(grads[n] for n in sorted(grads))]

        want = run(sim.parts)
        for other in (parts, overlap(sim.parts, "sim", cost, joins=False)):
            assert all(torch.equal(a, b) for a, b in zip(run(other), want, strict=True))
    assert peak(parts) <= peak(sim.parts)
    some, every = CASES[name, axes, layout]
    found = hidden(parts.backward)
    assert found[0] >= some and found[1] == every, found
    assert _exposed(overlap(sim.parts, "sim", cost, joins=False), axes) < _exposed(overlap(sim.parts, "sim"), axes)


def _exposed(parts: Parts, axes: str) -> float:
    """Seconds that compute waits, where an operator takes 10 us and a collective 20."""
    width = Mesh.of(mesh_of(axes)).sizes_product
    price = price_ops(parts, "sim", width, lambda op: 1e-5, lambda kind, over, wire: ("intra", 2e-5))
    return replay(*records(parts, price)).exposed_s


# ---- of graphs by hand -------------------------------------------------------------------------------------------

c10d = torch.ops._c10d_functional


def _moved(f: Any, *shapes: tuple[int, ...]) -> list[str]:
    """Names of the calls of `f` on two ranks, in the order they are moved to; all it takes are saved values."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with fake_world(2):
        gm = make_fx(f, tracing_mode="fake")(*(torch.empty(s) for s in shapes))
        cost = Cost(Cluster.of("cpu:1x2"), Mesh.of({"tp": 2}))
        out = beside(gm, [None] * len(shapes), "sim", cost)
    return [n.name for n in out.graph.nodes if n.op == "call_function"]


def _sum(x: torch.Tensor) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", "sim.tp"))


def test_a_product_that_is_not_needed_goes_beside() -> None:
    """The gradient of a weight before the collective, and what follows from it; a product that the collective needs stays, whatever is made of it later."""

    def backward(x: torch.Tensor, d: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = torch.exp(x.expand(100, 64, 64)).sum()  # when most memory is alive
        grad = torch.mm(x, d) * 2.0
        summed = _sum(torch.mm(d, w))
        return grad, torch.relu(summed), before

    got = _moved(backward, (64, 64), (64, 64), (64, 64))
    assert [n for n in got if n not in ("expand", "exp", "sum_1")] == ["mm_1", "all_reduce", "mm", "mul", "wait_tensor", "relu"]


def test_a_later_product_is_called_up() -> None:
    """With what leads to it, but not one that reads the sum."""

    def backward(x: torch.Tensor, d: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = torch.exp(x.expand(100, 64, 64)).sum()
        summed = _sum(d)
        used = torch.mm(summed, w)
        return used, torch.mm(torch.neg(x), w), before

    got = _moved(backward, (64, 64), (64, 64), (64, 64))
    assert [n for n in got if n not in ("expand", "exp", "sum_1")] == ["all_reduce", "neg", "mm_1", "wait_tensor", "mm"]


def test_nothing_moves_that_would_take_more_memory() -> None:
    """`big` is read by the product alone, and two like it are alive before the collective: with it, there would be three."""

    def backward(seed: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, ...]:
        big = seed.expand(64, 4096) * 1.0
        small = torch.mm(big, big.t())
        return small, _sum((torch.exp(d.expand(64, 4096)) * 2.0).sum())

    names = _moved(backward, (1, 1), (1, 1))
    assert names.index("mm") < names.index("exp") < names.index("all_reduce")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama")
    parser.add_argument("--mesh", default="dp=2,tp=2")
    parser.add_argument("--layout", default="fsdp+tp")
    a = parser.parse_args()
    with fake_world(Mesh.of(mesh_of(a.mesh)).size):
        sim, parts, cost, _ = moved(a.model, a.mesh, a.layout)
    for half in ("forward", "backward"):
        some, every = hidden(getattr(parts, half))
        print(f"{half}: {some} of {every} collectives of activations have products beside them")
    print(f"most memory {peak(sim.parts):,} bytes, {peak(parts):,} with them")
    before, after = (_exposed(overlap(sim.parts, "sim", of, joins=False), a.mesh) for of in (None, cost))
    print(f"waited, at 10 us an operator and 20 a collective: {before * 1e6:.0f} us, {after * 1e6:.0f} with them")


if __name__ == "__main__":
    main()
