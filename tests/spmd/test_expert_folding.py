"""Experts arranged otherwise than all else (MoE parallel folding, arXiv 2504.14960, section 3.2) on simulated ranks: loss and every gradient are one device's.

python -m tests.spmd.test_expert_folding --case "dp x tp" --model gpt_oss
"""

from __future__ import annotations

import argparse
import copy
import math
from itertools import product
from typing import Any

import pytest

from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.layout import Layout
from autopar.planner.planning import plan_graph
from autopar.rules import lookup
from autopar.rules.experts import BACKWARD, FORWARD
from autopar.solver.fold import fold
from autopar.solver.solve import Limits
from tests.experts import FAMILIES, build, inputs
from tests.spmd.simulate import Prepared, fake_world, one_device, prepare, simulated
from tests.wide import cases

TWO, THREE = {"dp": 2, "tp": 2}, {"dp": 2, "cp": 2, "tp": 2}
_DENSE: dict[str, Any] = {"data": ("dp",), "shard": ("dp",), "tensor": ("tp",)}
_MORE: dict[str, Any] = {"data": ("dp", "cp"), "shard": ("dp", "cp"), "tensor": ("tp",)}
# name -> mesh, layout, what each axis splits of experts: experts (p), features (f) or tokens (t).
FOLDED: dict[str, tuple[dict[str, int], Layout, dict[str, str]]] = {
    "dp x tp": (TWO, Layout(**_DENSE, experts=("dp", "tp"), expert_features=()), {"dp": "p", "tp": "p"}),
    "tp alone": (TWO, Layout(**_DENSE, experts=("tp",), expert_features=()), {"dp": "t", "tp": "p"}),
    "features over tp": (TWO, Layout(**_DENSE, experts=("dp",), expert_features=("tp",)), {"dp": "p", "tp": "f"}),
    "features over data": (TWO, Layout(**_DENSE, experts=("tp",), expert_features=("dp",)), {"dp": "f", "tp": "p"}),
    "features over both": (TWO, Layout(**_DENSE, expert_features=("dp", "tp")), {"dp": "f", "tp": "f"}),
    "all of three": (THREE, Layout(**_MORE, experts=("dp", "cp", "tp"), expert_features=()), {"dp": "p", "cp": "p", "tp": "p"}),
    "features over tp of three": (THREE, Layout(**_MORE, experts=("dp", "cp"), expert_features=("tp",)), {"dp": "p", "cp": "p", "tp": "f"}),
}  # fmt: skip


def planned(p: Prepared, axes: dict[str, int], layout: Layout) -> Plan:
    trainable = frozenset(n for n, q in p.model.named_parameters() if q.requires_grad)
    cluster = Cluster.of(f"h100:1x{math.prod(axes.values())}")
    return plan_graph(
        fold(p.graph), axes, cluster, TrainingConfig(trainable, "float32", budget_bytes=7e10), Limits(0.5, seconds=1800), layout=layout
    ).plan


def split(p: Prepared, plan: Plan) -> list[dict[str, str]]:
    """Of each operator of experts, forward and backward: what the user's axes split."""
    found = []
    for op in p.graph.ops:
        if op.target in (FORWARD, BACKWARD):
            pairs = lookup(op).pairs
            parents = {a.name: a.parent for a in plan.mesh.axes}
            found.append({parents[a]: "p" if x in pairs else x for a, (x, _) in plan.ops[op.name].strategy.items()})
    return found


def check(which: str, name: str = "mixtral", **sizes: Any) -> None:
    axes, layout, wanted = FOLDED[which]
    model = build(name, "eager", num_hidden_layers=1 if name != "deepseek_v3" else 2, **sizes).double()
    given = inputs(8, 16)
    p = prepare(copy.deepcopy(model), given)
    plan = planned(p, axes, layout)
    assert split(p, plan) == [wanted, wanted], plan.text()
    with fake_world(math.prod(axes.values())):
        outputs, grads, _ = simulated(p, axes, plan).run(dict(p.model.named_parameters()), dict(p.model.named_buffers()), p.tensors, (3, 0))
    loss = one_device(model, given, (3, 0))
    loss.backward()  # type: ignore[no-untyped-call]
    assert math.isclose(float(outputs[0]), float(loss.detach()), rel_tol=2e-6)
    whole = math.sqrt(sum(float(q.grad.norm()) ** 2 for q in model.parameters() if q.grad is not None))
    for n, q in model.named_parameters():
        if q.grad is not None:
            assert float((grads[n] - q.grad).norm()) <= 1e-5 * float(q.grad.norm()) + 1e-7 * whole, n


EVERY = [("mixtral", which) for which in FOLDED] + list(product([n for n in FAMILIES if n != "mixtral"], ["dp x tp", "features over data"]))


@pytest.mark.parametrize(("name", "which"), cases(EVERY, [("mixtral", "dp x tp"), ("mixtral", "all of three")]), ids=str)
def test_equals_one_device(name: str, which: str) -> None:
    experts = {"num_local_experts": 8} if name in ("mixtral", "gpt_oss") else {}
    check(which, name, **experts)


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--case", choices=list(FOLDED), default="")
    a.add_argument("--model", choices=list(FAMILIES), default="mixtral")
    o = a.parse_args()
    for which in [o.case] if o.case else FOLDED:
        test_equals_one_device(o.model, which)
        print(f"{o.model}, {which}: equal", flush=True)


if __name__ == "__main__":
    main()
