"""The memory that a plan predicts against what lives while its graphs run, call by call: storages, on one rank and on simulated ones.

    python -m tests.spmd.test_memory --model bert --mesh dp=2,tp=2 --layers 3 --batch 32 --seq 64 --shares 1.0,0.8,0.6

The optimizer's state is counted, not made: what it holds is a matter of bytes a parameter. The step of the optimizer itself is not run.
"""

from __future__ import annotations

import argparse
import functools
import math
import tempfile
from dataclasses import dataclass

import pytest
import torch
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

from autopar.offload import OffloadSettings, close_store, open_store
from autopar.passes.manager import overlap
from autopar.plan.plan import Plan
from autopar.planner.formulation.training import TrainingConfig
from autopar.planner.infeasible import InfeasibleError
from autopar.planner.planning import plan_graph
from autopar.runtime.lower import lower
from autopar.solver.solve import Limits
from tests.live import LiveBytes
from tests.models import ZOO
from tests.spmd.simulate import STORE, Prepared, fake_world, prepare, simulated
from tests.spmd.test_offload import fast
from tests.spmd.test_planned import SEED
from tests.spmd.test_price import mesh_of
from tests.wide import cases

TOLERANCE = 0.03
LIMITS = Limits(gap=0.05, seconds=240)  # what is asked is what a plan's memory is, not how good the plan
SHARES = (1.0, 0.85, 0.7, 0.6, 0.5)  # of the memory that saving everything takes
MODELS = ("llama", "gpt2", "bert", "qwen3")


@dataclass(frozen=True)
class Memory:
    """Bytes of one device; policies: how many activations are saved, made again, kept away."""

    predicted: float
    measured: float
    budget: float
    at: str
    policies: tuple[int, int, int]

    @property
    def error(self) -> float:
        return self.measured / self.predicted - 1

    def __str__(self) -> str:
        mb = f"predicted {self.predicted / 1e6:.3f} MB, measured {self.measured / 1e6:.3f} MB ({self.error:+.2%}), budget {self.budget / 1e6:.3f} MB"
        return f"{mb}; saved, recomputed, away: {self.policies}; peak at {self.at}"


@functools.cache
def program(name: str, layers: int, batch: int, seq: int) -> Prepared:
    torch.manual_seed(0)
    zoo = ZOO[name]
    return prepare(zoo.build(layers).train(), zoo.inputs(batch, seq), zoo.compile.get("loss_fn"))


@functools.cache
def free(name: str, axes: str, layers: int, batch: int, seq: int) -> Memory:
    """Everything saved."""
    return memory(name, axes, math.inf, layers, batch, seq)


@functools.cache
def memory(name: str, axes: str, budget_bytes: float, layers: int = 3, batch: int = 32, seq: int = 64, micro_batches: int = 1) -> Memory:
    """Of one micro-batch: of several, the largest of the first, one in the middle and the last."""
    p, mesh = program(name, layers, batch, seq), mesh_of(axes)
    devices = math.prod(mesh.values())
    params = dict(p.model.named_parameters(remove_duplicate=False))
    trainable = frozenset(n for n, q in params.items() if q.requires_grad)
    training = TrainingConfig(
        trainable, budget_bytes=budget_bytes, media=("host",), least_bytes=1e4, fuses=False, micro_batches=micro_batches
    )
    found = plan_graph(p.graph, mesh, fast(devices), training, LIMITS)
    calls = [(True, False)] if micro_batches == 1 else [(False, False), (False, True), (True, True)]
    measured = {accumulates: live(p, mesh, found.plan, accumulates) for accumulates in calls}
    at, peak = max(measured.values(), key=lambda m: m[1])
    state = sum(math.prod(c.storage.local_shape(found.plan.mesh)) * training.state_bytes for c in found.plan.params.values() if c.trainable)
    rows = zip((row.name for row in found.found.problem.rows), found.solution.price.row_bytes, strict=True)
    predicted = max(b for name_, b in rows if name_ != "optimizer step")
    again = sum(policy == "recompute" for policy in found.plan.activations.values())
    offloaded = len(found.plan.offload)
    policies = (len(found.plan.activations) - again - offloaded, again, offloaded)
    return Memory(predicted, peak + state, budget_bytes, at, policies)


def live(p: Prepared, mesh: dict[str, int], plan: Plan, accumulates: tuple[bool, bool]) -> tuple[str, float]:
    """Where most lives of a call that runs, and how many bytes on each device."""
    devices, params = math.prod(mesh.values()), dict(p.model.named_parameters(remove_duplicate=False))
    with tempfile.TemporaryDirectory() as folder, fake_world(devices):
        open_store(STORE, OffloadSettings(10**9, folder, 10**9))
        try:
            step = simulated(p, mesh, plan, fuses=False, accumulates=accumulates)
            parts = overlap(step.parts, "sim")
            assert parts.backward is not None
            forward, backward = (lower(gm, backend="aot_eager", fake_mode=None).fn for gm in (parts.forward, parts.backward))
            values = step.values(params, dict(p.model.named_buffers()), p.tensors, SEED)
            local = [t for v in values.values() for t in (v._local_tensors.values() if isinstance(v, LocalTensor) else (v,))]
            with torch.no_grad(), LiveBytes(local) as found, LocalTensorMode(devices):
                del local
                out = forward([values[r] for r in parts.forward_inputs])
                saved = out[len(parts.forward_outputs) :]
                del out
                flat = [*saved, *(values.pop(r) if r.kind == "accumulated" else values[r] for r in parts.backward_inputs)]
                saved.clear()
                grads = backward(flat)
                del grads
        finally:
            close_store(STORE)
    return found.at, found.peak / devices


def budgets(name: str, axes: str, everything: Memory, size: tuple[int, int, int]) -> list[float]:
    """Four, from little more than the least there is, or half of what saving everything takes, up to it."""
    low = 0.5 * everything.predicted
    try:
        memory(name, axes, low, *size)
    except InfeasibleError as e:
        # The least that is found depends on the time there is for it: never more than what saving everything takes.
        low = min(1.01 * (low + e.shortfall_bytes), 0.9 * everything.predicted)
    return [low + share * (everything.predicted - low) for share in (0.0, 0.3, 0.6, 0.9)]


@pytest.mark.parametrize("name", cases(MODELS, ["llama"]))
def test_one_device(name: str) -> None:
    """At five budgets: within 3%, never above the budget; less memory is had by other policies."""
    size = 2, 16, 32
    everything = free(name, "dp=1", *size)
    assert abs(everything.error) <= TOLERANCE, everything
    for budget in budgets(name, "dp=1", everything, size):
        found = memory(name, "dp=1", budget, *size)
        assert abs(found.error) <= TOLERANCE, found
        assert found.measured <= found.budget, found
        assert found.policies[1:] != everything.policies[1:], found


@pytest.mark.parametrize("name", cases(["toy-dropout", "llama", "bert"], ["toy-dropout"]))
def test_four_devices(name: str) -> None:
    """Here the passes cut the stretches that parameters are gathered for by what they find in the graph, a little otherwise than the plan."""
    size = 2, 128, 32
    everything = free(name, "dp=4", *size)
    for found in (everything, *(memory(name, "dp=4", share * everything.predicted, *size) for share in (0.85, 0.75))):
        assert abs(found.error) <= TOLERANCE, found


@pytest.mark.parametrize(("name", "share"), cases([("llama", 1.0), ("llama", 0.6), ("bert", 0.7)], [("llama", 0.6)]))
def test_micro_batches(name: str, share: float) -> None:
    """Sums of gradients are held from call to call: unreduced, or, where memory is short, reduced."""
    size = 2, 128, 32
    everything = memory(name, "dp=4", math.inf, *size, micro_batches=3)
    found = memory(name, "dp=4", share * everything.predicted, *size, micro_batches=3) if share < 1 else everything
    assert abs(found.error) <= TOLERANCE, found


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted and measured peak of live storages, call by call")
    parser.add_argument("--model", default="llama", choices=sorted(ZOO))
    parser.add_argument("--mesh", default="dp=1")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--shares", default=",".join(map(str, SHARES)))
    args = parser.parse_args()
    everything = free(args.model, args.mesh, args.layers, args.batch, args.seq)
    for share in map(float, args.shares.split(",")):
        try:
            found = (
                everything if share >= 1 else memory(args.model, args.mesh, share * everything.predicted, args.layers, args.batch, args.seq)
            )
            print(f"{share:.0%}: {found}", flush=True)
        except InfeasibleError as e:
            print(f"{share:.0%}: {e.what}", flush=True)


if __name__ == "__main__":
    main()
