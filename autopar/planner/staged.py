"""What a plan of one stage's mesh says as that of a pipeline.

It was made as if the mesh ran all layers of a micro-batch. Of p ranks with d micro-batches in flight on the one that holds most, in stages of which the model has n,

    memory    state / p + (d / n) activations      where the program's row is      state' + activations'

so it is made with k = n / d of the memory, and k / p of the bytes that parameters' state and gradients that wait take: what its row then says, by d / n, is the rank's memory. Times are replayed: each stage takes its share
of forward and backward, hops take nothing.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.plan.decisions import BUCKETED, PipelineChoice
from autopar.plan.plan import Plan
from autopar.planner.formulation.training import TrainingConfig

# Figures of a step that one mesh runs alone.
_ALONE = ("forward_s", "backward_s", "exposed_s", "blocking_collectives", *BUCKETED)


def of_a_stage(training: TrainingConfig, ranks: int, stages: int, in_flight: int) -> TrainingConfig:
    """What a stage's mesh is planned for."""
    k = stages / in_flight
    return replace(
        training,
        state_bytes=training.state_bytes * k / ranks,
        step_bytes=training.step_bytes * k / ranks,
        master_bytes=training.master_bytes * k / ranks,
        accumulated_share=k / ranks,
        budget_bytes=training.budget_bytes * k,
    )


def of_the_pipeline(plan: Plan, choice: PipelineChoice, pipeline_s: float, in_flight: int) -> Plan:
    """`plan`, whose figures are of the mesh alone, with those of the pipeline. pipeline_s: of all micro-batches, by the replay; 0 where the plan has no times."""
    p = dict(plan.predicted)
    if "step_time_s" in p and pipeline_s:
        was = p["step_time_s"]
        p["optimizer_s"] = p.get("optimizer_s", 0.0) / choice.ranks
        p["step_time_s"] = pipeline_s + p["optimizer_s"]
        faster = was / p["step_time_s"]
        p |= {k: v * faster for k, v in p.items() if k.endswith("_per_s")}
        if "mfu" in p:
            p["mfu"] *= faster / choice.ranks
        p["pipeline_s"] = pipeline_s
        for key in _ALONE:
            p.pop(key, None)
        for key in ("peak_memory_bytes", "budget_bytes"):
            if key in p:
                p[key] *= in_flight / len(choice.where)
    return replace(plan, pipeline=choice, predicted=p, profile=None).answering_as(plan)
