"""Hugging Face's gradient checkpointing on simulated ranks: the numbers of the model without, a plan's price that of what runs, and little that is saved."""

from __future__ import annotations

import functools

import pytest
import torch

from autopar.cost import Cost
from autopar.graph.mesh import Mesh
from autopar.passes.manager import overlap
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.planning import plan_graph
from autopar.rules import lookup
from autopar.simulate.price import price
from tests.models import ZOO
from tests.spmd.simulate import Prepared, Simulated, fake_world, prepare, simulated
from tests.spmd.test_planned import LIMITS, cluster

SEED = (3, 0)
AXES = {"dp": 2}


@functools.cache
def captured(name: str, checkpointed: bool, layers: int = 2) -> Prepared:
    torch.manual_seed(0)
    model = ZOO[name].build(layers).train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return prepare(model, ZOO[name].inputs(8, 32))


def run(p: Prepared, s: Simulated) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    outputs, grads, _ = s.run(dict(p.model.named_parameters()), dict(p.model.named_buffers()), p.tensors, SEED)
    return outputs[0], grads


def saved_activations(s: Simulated) -> list[torch.dtype]:
    """Of all that is saved and has as many elements as a rank's residual stream, or more."""
    values = {n.name: n.meta["val"] for n in s.parts.forward.graph.nodes if n.op != "output"}
    return [values[n].dtype for n in s.parts.saved if values[n].numel() >= 8 * 32 * 32 // 2]


@pytest.mark.parametrize(("name", "layout"), [("gpt2", "fsdp"), ("llama", "tp"), ("gpt2", "planned")])
def test_checkpointed_layers(name: str, layout: str) -> None:
    with fake_world(2):
        plain = captured(name, False)
        loss, grads = run(plain, without := simulated(plain, AXES, "fsdp" if layout == "planned" else layout))
        p = captured(name, True)
        assert [op.target for op in p.graph.ops] == [op.target for op in plain.graph.ops]
        training = TrainingConfig(frozenset(p.graph.params))
        plan = plan_graph(p.graph, AXES, cluster(2), training, LIMITS).plan if layout == "planned" else layout
        s = simulated(p, AXES, plan)
        other, theirs = run(p, s)
        assert torch.equal(loss, other)
        if layout != "planned":
            assert all(torch.equal(grads[n], theirs[n]) for n in grads)
        else:  # it may split otherwise than the layout
            assert all((grads[n] - theirs[n]).norm() <= 1e-5 * grads[n].norm() for n in grads)
            parts, rules = overlap(s.parts, "sim"), {op.name: lookup(op) for op in p.graph.ops}
            got = price(parts, s.plan, p.graph, Cost.compiled(cluster(2), Mesh.of(AXES), p.graph, rules), training, "sim")
            assert got.step_time_s == pytest.approx(s.plan.predicted["step_time_s"], rel=1e-6)
        assert 2 * len(saved_activations(s)) < len(saved_activations(without))
        assert torch.int64 not in saved_activations(s)  # what dropout's masks are drawn from
        layers = [op for op in p.graph.ops if op.direction == "forward" and op.binding]
        kept = {t.name for op in layers for i, t in enumerate(op.outputs) if t is not None and op.tag(i)} & s.plan.kept.keys()
        assert len(layers) > 20 and not kept and not s.plan.unmet
