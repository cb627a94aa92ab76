"""Ordinary modules, written by hand: the plan of the integer program, executed on simulated ranks, equals eager PyTorch on one device.

python -m tests.spmd.test_ordinary --module lstm --mesh 2x2
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

from autopar.graph.mesh import Mesh
from autopar.graph.placement import Placement
from autopar.kernels.random import EagerRandom
from autopar.plan.decisions import OpChoice
from autopar.plan.plan import Plan
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.layout import Layout
from autopar.planner.planning import Planned, plan_graph
from autopar.planner.propagate import propagate
from autopar.rules import lookup
from autopar.solver.solve import Limits
from tests.ordinary import ORDINARY
from tests.spmd.simulate import Prepared, fake_world, prepare, simulated
from tests.spmd.test_planned import cluster
from tests.wide import wide

SEED = (3, 0)
LIMITS = Limits(gap=0.05, seconds=20)
MESHES = {"2": {"a": 2}, "2x2": {"a": 2, "b": 2}}


@functools.cache
def captured(name: str) -> tuple[Prepared, dict[str, Any]]:
    torch.manual_seed(0)
    zoo = ORDINARY[name]
    model, inputs = zoo.build().double().train(), zoo.inputs()
    inputs = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    return prepare(model, inputs), inputs


def planned(p: Prepared, mesh: dict[str, int]) -> Planned:
    trainable = frozenset(n for n, q in p.model.named_parameters() if q.requires_grad)
    return plan_graph(p.graph, mesh, cluster(math.prod(mesh.values())), TrainingConfig(trainable), LIMITS)


def eager(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """Loss, and gradients in the parameters; buffers stay."""
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    model.zero_grad()
    with EagerRandom(*SEED):
        loss = model(**inputs)
    loss.backward()
    with torch.no_grad():
        for n, b in model.named_buffers():
            b.copy_(buffers[n])
    return loss.detach()


def check(name: str, mesh: dict[str, int]) -> Planned:
    found = planned(captured(name)[0], mesh)
    compare(name, mesh, found.plan)
    return found


def compare(name: str, mesh: dict[str, int], plan: Plan) -> None:
    """Loss and gradients of the executed plan are those of one device."""
    p, inputs = captured(name)
    params = dict(p.model.named_parameters(remove_duplicate=False))
    with fake_world(math.prod(mesh.values())):
        outputs, grads, _ = simulated(p, mesh, plan).run(params, dict(p.model.named_buffers()), p.tensors, SEED)
    loss = eager(p.model, inputs)
    torch.testing.assert_close(outputs[0], loss, rtol=1e-10, atol=1e-10)
    want = {n: q.grad for n, q in p.model.named_parameters()}
    assert {n for n, g in want.items() if g is None} == {n for n in want if grads.get(n) is None}
    largest = max(float(g.abs().max()) for g in want.values() if g is not None)
    assert largest > 0
    for n, g in want.items():
        if g is not None:
            assert float((grads[n] - g).abs().max()) <= 1e-10 * largest, n


QUICK = (
    "ctc", "ctc-tensors", "ctc-flat", "bags", "ensemble", "siamese", "graph", "vae", "fourier", "wavenet", "unet", "physics", "experts",
)  # fmt: skip
# On two axes where that is planned in seconds; all on one axis by `-m wide`. The others on two axes: by name, as above.
CASES = [
    pytest.param(name, mesh, marks=() if mesh == "2x2" else wide, id=f"{name}-{mesh}")
    for name in ORDINARY
    for mesh in MESHES
    if name in QUICK or mesh != "2x2"
]


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_planned_equals_one_device(name: str, mesh: str) -> None:
    found = check(name, MESHES[mesh])
    assert not found.plan.fallbacks, f"ops without a rule: {found.plan.fallbacks}"


def test_backward_may_read_what_forward_gives_as_it_is_given() -> None:
    """Running statistics are made by parts of the channels and given whole; where backward reads them whole, that is what is kept."""
    p, _ = captured("resnet")
    axes = {"a": 2}
    plan = propagate(p.graph, Layout.of("ddp", Mesh.of(axes)), axes, frozenset(n for n, _ in p.model.named_parameters()))
    norm = next(op for op in p.graph.ops if "batch_norm" in op.target)
    mean = norm.outputs[3]
    assert mean is not None and mean.name in p.graph.buffer_updates.values()
    readers = [op for op in p.graph.ops if mean in op.inputs]
    assert [op.direction for op in readers] == ["backward"]
    rule = lookup(norm)
    (channels,) = rule.outputs[3][0]  # type: ignore[index]
    (axis,) = plan.mesh.names
    split = OpChoice({axis: (channels, rule.factors[channels].size // 2)}, {}, rule.kind)
    ops = {**plan.ops, norm.name: split, readers[0].name: OpChoice({}, {}, rule.kind)}
    plan = dataclasses.replace(plan, ops=ops, kept={**plan.kept, mean.name: Placement.of(mean.shape)})
    compare("resnet", axes, plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", default="nanogpt", choices=sorted(ORDINARY))
    parser.add_argument("--mesh", default="2x2", help="sizes of the axes")
    a = parser.parse_args()
    found = check(a.module, {f"axis{i}": int(n) for i, n in enumerate(a.mesh.split("x"))})
    print(found.plan)
    print("equals one device")


if __name__ == "__main__":
    main()
