"""A found plan -> its profile."""

from __future__ import annotations

from dataclasses import replace

from autopar.planner.formulation.formulated import Formulated
from autopar.planner.formulation.lifetimes import Lifetimes
from autopar.planner.profiling.calls import Calls
from autopar.planner.profiling.memory import Memory
from autopar.planner.profiling.places import Places
from autopar.solver.problem import Decision, Problem
from autopar.timeline.profile import Profile


def profile(f: Formulated, problem: Problem, decision: Decision) -> Profile:
    """Of `decision` about `problem`, which is what `f` was formulated to."""
    q, graph = f.program.q, f.program.graph
    # Only where something runs again is it asked when.
    life = Lifetimes(replace(f, is_decided=f.is_decided and bool(decision.rerun)), problem)
    places = Places(graph, q.stacks, {**q.times, **q.tensor_times})
    memory = Memory(life)
    samples, growths = memory.find(decision, places) if f.training.counts else ([], [])
    calls = Calls(f, problem, decision, life, memory.chains, places)
    device = f.cost.cluster.device
    dtype = max(calls.by_flops, key=calls.by_flops.__getitem__, default="float32")
    batch = next((t for t in graph.inputs if t.shape), None)
    counted = batch is not None and batch.dtype.startswith("int") and len(batch.shape) > 1
    return Profile(
        tuple(places.regions), tuple(calls.whats), tuple(calls.found), tuple(samples), tuple(growths), places.copies,
        calls.model_flops, device.peak(dtype), batch.shape[0] if batch is not None else 0, batch.numel if batch is not None and counted else 0,
        f.training.micro_batches, f.cost.cluster.contention, f.training.master_bytes,
    )  # fmt: skip
