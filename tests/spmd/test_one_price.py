"""One price: of a hand layout, what the integer program minimizes, what a walk over the rewritten graphs adds up, what `predict` puts together from pieces, what `search` ranks by.

    python -m tests.spmd.test_one_price --model llama --layout "fsdp+tp"

The three look at different things: coefficients of a folded program, calls of the graphs that run, kernels of one replica's micro-batch with data parallelism around it. They share what a
kernel and a collective take. What differs by purpose is named where it is told: the few numbers that ranks exchange of a loss, in `exposed_s` of the plan, of which `predict` knows nothing.
Links have no latency here, so those are next to nothing.
"""

from __future__ import annotations

import argparse
import functools
import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

import autopar
from autopar.cost import Cost
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.passes.manager import overlap
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.layout import Layout
from autopar.planner.planning import plan_graph
from autopar.predict.runtime import RUNTIMES
from autopar.rules import lookup
from autopar.simulate.price import price
from autopar.solver.solve import Limits
from tests.models import ZOO
from tests.spmd.simulate import Prepared, fake_world, prepare, simulated
from tests.wide import cases

AGREE = 0.005
# Many samples: what operators do on learned positions, once for all of them, a plan also splits over data axes.
DEVICES, BATCH, TOKENS = 4, 64, 32
# The same layout as a constraint on the program of a mesh, and in sizes.
LAYOUTS = {
    "ddp": ({"dp": 4}, Layout(micro_batch=16)),
    "fsdp": ({"dp": 4}, Layout(zero=3, micro_batch=16)),
    "fsdp+tp": ({"dp": 2, "tp": 2}, Layout(zero=3, tp=2, micro_batch=32)),
}
# As the models are here, in single precision.
RUNTIME = replace(RUNTIMES["autopar"], param_bytes=4.0, reduce_bytes=4.0)


class Told(NamedTuple):
    """Seconds of a step."""

    program: float
    simulator: float
    predict: float
    search: float

    @property
    def apart(self) -> float:
        return max(self) / min(self) - 1


def cluster(link_faster: float = 1.0, latency_s: float = 0.0) -> Cluster:
    """No kernel has a latency, which models as small as these would be all of."""
    c = Cluster.of(f"h100:{DEVICES}")
    link = c.intra.model_copy(update={"latency_s": latency_s, "bandwidth_Bps": c.intra.bandwidth_Bps * link_faster})
    return c.model_copy(update={"device": c.device.model_copy(update={"launch_s": 0.0}), "intra": link})


@functools.cache
def captured(name: str) -> tuple[Prepared, dict[str, torch.Tensor]]:
    zoo = ZOO[name]
    inputs = zoo.inputs(BATCH, TOKENS)
    return prepare(zoo.build(2).train(), inputs, zoo.compile.get("loss_fn")), inputs


def told(name: str, layout: str, link_faster: float = 1.0, latency_s: float = 0.0) -> Told:
    (p, inputs), (mesh, sizes), where = captured(name), LAYOUTS[layout], cluster(link_faster, latency_s)
    training = TrainingConfig(frozenset(n for n, q in p.model.named_parameters() if q.requires_grad), joins=True)
    plan = plan_graph(p.graph, mesh, where, training, Limits(gap=1e-4, seconds=60), layout=layout).plan
    cost = Cost.compiled(where, Mesh.of(mesh), p.graph, {op.name: lookup(op) for op in p.graph.ops})
    with fake_world(DEVICES):
        parts = overlap(simulated(p, mesh, plan).parts, "sim", cost)
    walked = price(parts, plan, p.graph, cost, training, "sim").step_time_s
    model, loss_fn = ZOO[name].build(2).train(), ZOO[name].compile.get("loss_fn")
    said = autopar.predict(model, inputs, where, sizes, global_batch=BATCH, runtime=RUNTIME, loss_fn=loss_fn, precision=None).step_time_s
    only = {
        "tp": [sizes.tp],
        "cp": [1],
        "pp": [1],
        "micro_batch": [sizes.micro_batch],
        "zero": [sizes.zero],
        "recompute": ["none"],
        "offload": False,
    }
    (found,) = autopar.search(
        model, inputs, where, global_batch=BATCH, top_k=1, runtime=RUNTIME, memory=1e15, loss_fn=loss_fn, precision=None, options=only
    )
    return Told(plan.predicted["step_time_s"], walked, said, found.prediction.step_time_s)


# T5's bias of positions is one for all samples: replicas sum its gradient before they look it up, which `predict` does not know, and which is little only where links are fast.
GRID = [
    *((name, layout, faster) for name in ("llama", "gpt2", "bert", "qwen3", "gemma3") for layout in LAYOUTS for faster in (1.0, 100.0)),
    *(("t5", layout, 100.0) for layout in ("ddp", "fsdp")),
]
QUICK = [("gpt2", "ddp", 1.0), ("llama", "fsdp+tp", 100.0)]


@pytest.mark.parametrize(("name", "layout", "link_faster"), cases(GRID, QUICK))
def test_one_price(name: str, layout: str, link_faster: float) -> None:
    """Where compute hides all traffic, and where links are what steps wait for."""
    found = told(name, layout, link_faster)
    assert found.apart <= AGREE, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama", choices=sorted(ZOO))
    parser.add_argument("--layout", default="", choices=["", *LAYOUTS])
    parser.add_argument("--link-faster", type=float, default=0.0)
    a = parser.parse_args()
    for layout in [a.layout] if a.layout else LAYOUTS:
        for faster in [a.link_faster] if a.link_faster else (1.0, 100.0):
            found = told(a.model, layout, faster)
            assert all(math.isfinite(s) for s in found)
            print(
                f"{a.model} {layout:<8} links x {faster:g}: {', '.join(f'{k} {s * 1e6:.3f} us' for k, s in found._asdict().items())}; apart {found.apart:.3%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
