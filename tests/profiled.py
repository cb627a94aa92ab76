"""Plans with profiles for tests of what is made of them: a Llama of six layers on eight H100s, captured once, each variant planned once."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import transformers

from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.planner.offload import Offload
from autopar.planner.planning import Planned, plan_graph
from autopar.planner.task import Task, of_the_whole, task
from autopar.solver.fold import Folded
from autopar.solver.solve import Limits

LAYERS, BATCH, SEQUENCE = 6, 16, 256
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024}


@dataclass(frozen=True)
class Variant:
    """budget_bytes: None is what the device has; contention: what compute loses beside a collective; offload: whether activations may go to the host."""

    mesh: tuple[tuple[str, int], ...] = (("dp", 8),)
    budget_bytes: float | None = None
    contention: float = 0.0
    offload: bool = False
    micro_batches: int = 1


VARIANTS = {
    "plain": Variant(),
    "little memory": Variant(budget_bytes=19e6),
    "contended, two micro-batches": Variant(contention=0.4, micro_batches=2),
    "offload": Variant(budget_bytes=19e6, offload=True),
}


@functools.cache
def _task() -> Task:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=LAYERS, **SIZES))
    shapes = {"input_ids": (BATCH, SEQUENCE), "labels": (BATCH, SEQUENCE)}
    return task(model, shapes, "h100:8", "8", None, "bf16", "adamw", 1, None, None, lambda stage, seconds: None)


@functools.cache
def planned(name: str = "plain") -> tuple[Planned, Plan]:
    """The answer, and the plan of the whole model."""
    v, t = VARIANTS[name], _task()
    # Without latencies: next to them, work of this size is nothing.
    link = t.cluster.intra.model_copy(update={"latency_s": 1e-7})
    device = t.cluster.device.model_copy(update={"launch_s": 1e-8})
    host = t.cluster.host.model_copy(
        update={"latency_s": 1e-8, "bandwidth_Bps": 1e13}
    )  # beside so little compute, no other would carry anything
    cluster: Cluster = t.cluster.model_copy(update={"contention": v.contention, "intra": link, "device": device, "host": host})
    training = replace(t.training, micro_batches=v.micro_batches, budget_bytes=v.budget_bytes or t.training.budget_bytes)
    if v.offload:
        training = replace(Offload.of("host", cluster).within(training, cluster), least_bytes=1.0)
    done = plan_graph(t.folded, dict(v.mesh), cluster, training, Limits(gap=0.03))
    return done, of_the_whole(done.plan, t.folded, t.model)


def folded() -> Folded:
    return _task().folded


def plan(name: str = "plain") -> Plan:
    return planned(name)[1]
