"""The peak of a pipeline rank's memory.

    parameters and state    psi ( param + grad + (master + moments) / D )       ZeRO-1; -2 shards gradients too, -3 all of it. Of routed experts D is a 1 / ep of it
    activations             what each chunk holds of a micro-batch x micro-batches in flight, at the worst moment of the schedule
    made again              under recompute, what one layer makes again, beside what is kept
    turning                 gradients of the two largest activations; behind the layers what the loss needs of every logit, if that is more
    experts at work         rows of routed experts on the fullest rank, and what is made of them, while one layer's run (`autopar.cost.experts`)
    workspace               of libraries
    fragmented              what the allocator of a pipeline's rank loses, where the runtime says so

Offloaded activations leave a fraction alpha behind, of all but the chunks that are on their way (four: one computed, one leaving, one coming back and one
ready; Yuan et al., USENIX ATC '24):  A ( 4 + (N - 4) (1 - alpha) ).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from autopar.pipeline import Schedule, peak_held
from autopar.planner.layout import Layout
from autopar.predict.data import experts_over
from autopar.predict.held import Held
from autopar.predict.pieces import LAST, Piece
from autopar.predict.runtime import Runtime

GATHERED = 8.0  # of a logit: gathered, put together, its gradient taken apart and sent, two bytes each
MOVING = 4  # chunks whose activations are on the device while others are away


def kept_bytes(piece: Piece, layout: Layout, runtime: Runtime) -> float:
    """For backward, of one micro-batch."""
    more = piece.scores_bytes * SCORES_KEPT if runtime.unfused_passes and layout.recompute in ("none", "balanced") else 0.0
    more += piece.rows_bytes if runtime.keeps_rows else 0.0
    if not piece.layers or layout.recompute in ("none", "selective"):
        return piece.saved_bytes + more
    if layout.recompute == "full":
        return piece.input_bytes
    return piece.saved_bytes - piece.spared_bytes + more


SCORES_KEPT = 2.5  # of the matrix of scores: softmax's and dropout's results, and dropout's mask of a byte


def held_bytes(stage: Mapping[Piece, int], layout: Layout, runtime: Runtime) -> float:
    """What a stage keeps for backward, of one micro-batch."""
    return sum(n * kept_bytes(p, layout, runtime) for p, n in stage.items())


def recomputed_bytes(piece: Piece, layout: Layout, runtime: Runtime) -> float:
    scores = piece.scores_bytes * SCORES_KEPT if runtime.unfused_passes else 0.0
    rows = piece.rows_bytes if runtime.keeps_rows else 0.0
    if not piece.layers or layout.recompute == "none":
        return 0.0
    return {"selective": scores, "balanced": piece.spared_bytes, "full": piece.saved_bytes + scores + rows}[layout.recompute]


def state_bytes(params: Held, layout: Layout, runtime: Runtime, ways: int) -> float:
    """ways: ranks that shards lie on."""
    r = runtime
    whole = {
        0: r.param_bytes + r.grad_bytes + r.master_bytes + r.moment_bytes, 1: r.param_bytes + r.grad_bytes, 2: r.param_bytes, 3: 0.0,
    }[layout.zero]  # fmt: skip
    split = {
        0: 0.0,
        1: r.master_bytes + r.moment_bytes,
        2: r.grad_bytes + r.master_bytes + r.moment_bytes,
        3: r.grad_bytes + r.master_bytes + r.moment_bytes,
    }
    return params.dense * (whole + split[layout.zero] / ways) + params.experts * (whole + split[layout.zero] / experts_over(layout, ways))


def peak_bytes(
    rank: int, schedule: Schedule, stages: Sequence[Mapping[Piece, int]], layout: Layout, runtime: Runtime, ways: int
) -> dict[str, float]:
    """By part. stages: pieces of each stage, and how many."""
    mine = [stages[rank + c * schedule.ranks] for c in range(schedule.chunks)]
    params = params_of(mine)
    held = [held_bytes(stage, layout, runtime) for stage in mine]
    peak = peak_held(schedule, rank, held)
    if layout.offload_of(rank):
        chunks = peak_held(schedule, rank, [1.0] * schedule.chunks)
        on_the_way = min(MOVING, chunks) * peak / chunks
        peak = on_the_way + (peak - on_the_way) * (1 - layout.offload_of(rank))
    pieces = [p for stage in mine for p in stage]
    recompute = max((recomputed_bytes(p, layout, runtime) for p in pieces), default=0.0)
    turning = max((_turning_bytes(p, layout, runtime) for p in pieces), default=0.0)
    gathered = 0.0
    if layout.zero == 3:  # the parameters of the layer at work, and of the next
        gathered = 2 * runtime.param_bytes * max((p.params for p in pieces), default=0.0)
    found = {
        "parameters and optimizer": state_bytes(params, layout, runtime, ways) + gathered,
        "activations": peak,
        "made again": recompute,
        "turning": turning,
        "workspace": runtime.workspace_bytes,
    }
    if experts := max((p.experts_bytes for p in pieces), default=0.0):
        found["experts at work"] = experts
    if schedule.ranks > 1 and runtime.fragmented:
        found["fragmented"] = runtime.fragmented * (peak + recompute + turning)
    return found


def _turning_bytes(p: Piece, layout: Layout, runtime: Runtime) -> float:
    if p.layers or p.name != LAST:
        return 2 * p.largest_bytes
    # The largest result there is the logits in single precision.
    each = runtime.logits_bytes + (GATHERED if runtime.gathers_logits and layout.tp > 1 else 0.0)
    return max(2 * p.largest_bytes, p.largest_bytes / 4 * each - p.saved_bytes)


def params_of(stages: Sequence[Mapping[Piece, int]]) -> Held:
    """What a rank holds: tied ones once."""
    counted = sum(n * p.params for stage in stages for p, n in stage.items())
    names = {p.name for stage in stages for p in stage}
    twice = sum(p.shared for stage in stages for p in stage if p.shared and "before" in names and p.name != "before")
    experts = sum(n * p.routed for stage in stages for p, n in stage.items())
    tensors: dict[float, float] = defaultdict(float)
    for stage in stages:
        for p, n in stage.items():
            for elements, often in p.tensors:
                tensors[elements] += n * often
    return Held(counted - twice - experts, experts, tuple(sorted(tensors.items())))
