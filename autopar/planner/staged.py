"""What a plan of one stage's mesh says as that of a pipeline.

It was made as if the mesh ran all layers of a micro-batch. Of p ranks with d micro-batches in flight on the one that holds most, in stages of which the model has n,

    memory    state / p + (d / n) activations      where the program's row is      state' + activations'

so it is made with k = n / d of the memory, and k / p of the bytes that parameters' state and gradients that wait take: what its row then says, by d / n, is the rank's memory. Times are replayed: each stage takes its share
of forward and backward, and hops what they are said to. What is done once for all micro-batches (gradients reduced behind the last one, parameters gathered for the first) is none of that work: it
adds what does not fit beside what a rank does before and after (`autopar.pipeline.once`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.pipeline import Lists, Times, replay, waits_s
from autopar.pipeline.named import NAMES
from autopar.plan.decisions import BUCKETED, PipelineChoice
from autopar.plan.plan import Plan
from autopar.planner.formulation.training import TrainingConfig

# Figures of a step that one mesh runs alone.
_ONCE = ("gathered_once_s", "reduced_once_s", "contended_once_s", "forward_alone_s", "backward_alone_s")
_ALONE = (*_ONCE, "forward_s", "backward_s", "exposed_s", "blocking_collectives", *BUCKETED)


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


def part_of_state(lists: Lists) -> float:
    """Of the state of all layers, what a plan that is made for `lists` counts."""
    return lists.stages / lists.most_in_flight / len(lists.ranks)


def held_share(lists: Lists) -> float:
    """Of the activations of all layers, of a micro-batch, what the rank that holds most has of them at once."""
    return lists.most_in_flight / lists.stages


def of_the_pipeline(
    plan: Plan,
    lists: Lists,
    layers: tuple[tuple[str, ...], ...],
    work: tuple[Sequence[float], Sequence[float]],
    sent_bytes: Sequence[float],
    hop_s: tuple[float, ...] = (),
    weight: Sequence[float] = (),
    planned: Lists | None = None,
) -> Plan:
    """`plan`, whose figures are of the mesh alone, with those of the pipeline. layers: of each stage; work: of each in forward and in backward, in any unit that is the same for both; sent_bytes:
    of each, to the next; hop_s: what that takes, by rank; default nothing; weight: of each stage's backward, the share that makes gradients of parameters alone; default half. planned: the schedule
    that `plan` was made for, default `lists`; where it holds more activations than these lists do, its memory is said. Where the plan has no times, the bubble is that of the work."""
    ranks, m = len(lists.ranks), lists.micro_batches
    hop_s = hop_s or (0.0,) * ranks
    total = sum(map(sum, work)) or 1.0
    forward, backward = (tuple(x / total for x in half) for half in work)
    p = dict(plan.predicted)
    call_s = [p.get(f"{half}_alone_s", p.get(f"{half}_s", 0.0)) / m for half in ("forward", "backward")]
    seconds = [tuple(x / (sum(half) or 1.0) * t for x in half) for half, t in zip((forward, backward), call_s, strict=True)]
    weight_s = tuple(x * s for x, s in zip(weight, seconds[1], strict=True)) if weight else ()
    ran = replay(lists, Times(seconds[0], seconds[1], hop_s, weight_s=weight_s))
    pipeline_s, held = ran.total_s, max(map(held_share, (lists, planned or lists)))
    bubble = ran.bubble_rate if any(call_s) else replay(lists, Times(forward, backward, (0.0,) * ranks)).bubble_rate
    shares = tuple(f + b for f, b in zip(forward, backward, strict=True))
    times = (seconds[0], seconds[1], hop_s, weight_s) if any(call_s) else ((), (), (), ())
    written = tuple(lists.text().splitlines()) if lists.name not in NAMES else ()
    choice = PipelineChoice(lists.name, ranks, lists.where, layers, shares, tuple(map(float, sent_bytes)), bubble, *times, written)
    if "step_time_s" in p and pipeline_s:
        was = p["step_time_s"]
        p["optimizer_s"] = p.get("optimizer_s", 0.0) / choice.ranks
        mine = [[s for s, at in enumerate(lists.where) if at == r] for r in range(ranks)]
        once = [[sum(shares[s] for s in some) * p.get(key, 0.0) for some in mine] for key in _ONCE[:3]]
        p["once_s"] = waits_s(ran, [[seconds[1][s] for s in some] for some in mine], *once)
        p["step_time_s"] = pipeline_s + p["once_s"] + p["optimizer_s"]
        faster = was / p["step_time_s"]
        p |= {k: v * faster for k, v in p.items() if k.endswith("_per_s")}
        if "mfu" in p:
            p["mfu"] *= faster / choice.ranks
        p["pipeline_s"] = pipeline_s
        for key in _ALONE:
            p.pop(key, None)
        for key, share in (("peak_memory_bytes", held), ("budget_bytes", held_share(planned or lists))):
            if key in p:
                p[key] *= share
    return replace(plan, pipeline=choice, predicted=p, profile=None).answering_as(plan)
