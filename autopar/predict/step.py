"""The time of a step of a whole layout, from the pieces of a micro-batch.

    step = pipeline of m micro-batches + data-parallel traffic that is waited for + optimizer

A stage's forward and backward are sums over its pieces; the schedule is replayed (`autopar.pipeline`), so uneven stages, bubbles and hops are what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.model import Cost
from autopar.cost.optimizers import kind_of
from autopar.errors import LayoutError
from autopar.graph.mesh import Mesh
from autopar.hardware.cluster import Cluster
from autopar.pipeline import Schedule, Times, deal, replay
from autopar.planner.expert_folding import TENSOR, named
from autopar.planner.layout import Layout
from autopar.predict import memory
from autopar.predict.data import Windows, experts_over, loss_s, sharded_over, traffic
from autopar.predict.held import Held
from autopar.predict.offload import check_host_memory, moved_s
from autopar.predict.pieces import Piece
from autopar.predict.runtime import Runtime
from autopar.predict.seconds import NOTHING, Seconds, seconds
from autopar.predict.work import MEMORY, Transfer, Workload

Stage = Mapping[Piece, int]


@dataclass(frozen=True)
class Step:
    """step_time_s: the sum of `parts_s`. peak_bytes: of every pipeline rank, by part. model_flops: of products and attention of all devices, without
    what is made again; square_flops: with what causality hides of attention."""

    step_time_s: float
    parts_s: Mapping[str, float]
    peak_bytes: tuple[Mapping[str, float], ...]
    model_flops: float
    square_flops: float
    layers: tuple[int, ...]
    micro_batches: int

    @property
    def fullest_bytes(self) -> float:
        """Of the rank that needs the most."""
        return max(sum(r.values()) for r in self.peak_bytes)


def step(
    pieces: Sequence[Piece], layout: Layout, runtime: Runtime, cluster: Cluster, global_batch: int, optimizer: str | type = "adamw"
) -> Step:
    """pieces: of a micro-batch of `layout.micro_batch` sequences a replica, split over tp and cp. Raises LayoutError where sizes do not divide."""
    if runtime.gathers_logits and layout.tp > 1:
        pieces = [*pieces[:-1], gathered(pieces[-1], layout)]
    dp = layout.replicas(cluster.size)
    micro_batches, rest = divmod(global_batch, dp * layout.micro_batch)
    if rest or not micro_batches:
        raise LayoutError(
            f"a global batch of {global_batch} is not a number of micro-batches of {layout.micro_batch} on {dp} replicas",
            where=f"Layout, micro_batch={layout.micro_batch}",
            fix=f"use a multiple of {dp * layout.micro_batch}",
        )
    cost, schedule = cost_of(layout, dp, runtime, cluster), schedule_of(layout, micro_batches)
    layers, stages = stages_of(pieces, schedule, runtime.balanced)
    halves = {p: halves_of(p, layout, runtime, cost) for p in pieces}
    forward = [_total(stage, {p: f for p, (f, _) in halves.items()}) for stage in stages]
    backward = [_total(stage, {p: b for p, (_, b) in halves.items()}) for stage in stages]
    check_host_memory(stages, schedule, layout, runtime, cluster, sharded_over(layout, dp))
    offloaded = moved_s(stages, layout, runtime, cost)
    stalls = [max(0.0, a - f.total_s) + max(0.0, a - b.total_s) for a, f, b in zip(offloaded, forward, backward, strict=True)]
    hop = _hop_s(pieces, layout, cost)
    beside = runtime.hops == "always" or (runtime.hops == "interleaved" and layout.virtual > 1)
    ahead, back = (tuple(max(t.total_s, a) for t, a in zip(half, offloaded, strict=True)) for half in (forward, backward))
    times = Times(ahead, back, (hop,) * layout.pp, exposed=not beside)
    run = replay(schedule, times)
    ranks = [[stages[r + c * layout.pp] for c in range(layout.virtual)] for r in range(layout.pp)]
    waits = [
        traffic(
            memory.params_of(mine), layout, runtime, cost, dp, micro_batches,
            Windows(
                run.first_forward_s[r],
                tuple(run.total_s - end + times.backward_s[r + c * layout.pp] for c, end in enumerate(run.last_backward_s[r])),
                run.busy_s[r],
                (micro_batches * sum(times.forward_s[r :: layout.pp]), micro_batches * sum(times.backward_s[r :: layout.pp])),
            ),
            max(1, sum(n for stage in mine for p, n in stage.items() if p.params)),
        ).exposed_s
        for r, mine in enumerate(ranks)
    ]  # fmt: skip
    ways = sharded_over(layout, dp)
    updates = [update_s(memory.params_of(mine), layout, runtime, cost, ways, optimizer) for mine in ranks]
    last = max(range(layout.pp), key=lambda r: waits[r] + updates[r])
    slowest = max(range(layout.pp), key=lambda r: run.busy_s[r])
    work = sum((s for c in range(layout.virtual) for s in (forward[slowest + c * layout.pp], backward[slowest + c * layout.pp])), NOTHING)
    stalled = micro_batches * sum(stalls[slowest :: layout.pp])
    parts = {
        "compute": micro_batches * work.compute_s,
        ("tensor, context and expert parallel" if layout.ep > 1 else "tensor and context parallel"): micro_batches * work.exposed_s,
        "pipeline bubble and hops": run.total_s - run.busy_s[slowest],
        "data parallel": waits[last] + micro_batches * loss_s(layout, runtime, cost, dp),
        "optimizer": updates[last],
        **({"offload": stalled} if stalled else {}),
    }
    peaks = tuple(memory.peak_bytes(r, schedule, stages, layout, runtime, ways) for r in range(layout.pp))
    often = dp * micro_batches * layout.tp * layout.cp
    return Step(
        sum(parts.values()), parts, peaks, often * model_flops(pieces, False), often * model_flops(pieces, True), layers, micro_batches
    )


def cost_of(layout: Layout, dp: int, runtime: Runtime, cluster: Cluster) -> Cost:
    """Prices of a layout's devices."""
    mesh = Mesh.of({"pp": layout.pp, **{p.name: p.size for p in layout.parts(dp)}})
    inter = cluster.inter.model_copy(update={"efficiency": cluster.inter.efficiency * runtime.network_share})
    return Cost(cluster.model_copy(update={"inter": inter}), mesh)


def schedule_of(layout: Layout, micro_batches: int) -> Schedule:
    kind = "interleaved" if layout.virtual > 1 else layout.schedule
    return Schedule(kind, layout.pp, micro_batches, layout.virtual)


def stages_of(pieces: Sequence[Piece], schedule: Schedule, balanced: bool = False) -> tuple[tuple[int, ...], list[dict[Piece, int]]]:
    """Layers by stage, and all pieces by stage. What is no layer goes with the layer behind it, the last of it with the last layer.

    balanced: ranks shall have as many FLOPs of products, not as many layers (those of unlike layers are their mean)."""
    order = [p for p in pieces for _ in range(p.layers)]
    if not order:
        if schedule.stages > 1:
            raise LayoutError(
                "the model has no repeated layers to make a pipeline of", where=f"Layout, pp={schedule.ranks}", fix="use pp=1"
            )
        return (0,), [dict.fromkeys(pieces, 1)]
    first = last = 0.0
    if balanced:
        layer = sum(map(_product_flops, order)) / len(order)
        repeated = [i for i, p in enumerate(pieces) if p.layers]
        first, last = (sum(map(_product_flops, of)) / layer for of in (pieces[: repeated[0]], pieces[repeated[-1] + 1 :]))
    counts = deal(len(order), schedule.ranks, schedule.chunks, first_s=first, last_s=last)
    stages: list[dict[Piece, int]] = [{} for _ in counts]
    at = 0
    for stage, n in zip(stages, counts, strict=True):
        for p in order[at : at + n]:
            stage[p] = stage.get(p, 0) + 1
        at += n
    for i, p in enumerate(pieces):
        if not p.layers:
            after = next((q for q in pieces[i:] if q.layers), None)
            where = next(k for k, s in enumerate(stages) if after in s) if after is not None and i else (0 if not i else len(stages) - 1)
            stages[where][p] = 1
    return counts, stages


def _product_flops(p: Piece) -> float:
    return sum(n * t.flops for s in (p.forward, p.backward) for t, n in s.tasks.items() if not t.square_flops)


def gathered(last: Piece, layout: Layout) -> Piece:
    """What comes after the layers, where the loss is not split along the vocabulary: each rank has all of the logits, and does all of it that is bound by memory.

    The largest result there is the logits in single precision, of which half as many bytes are gathered.
    """

    tp = layout.tp

    def whole(s: Workload, more: dict[Transfer, float]) -> Workload:
        tasks = {replace(t, moved_bytes=t.moved_bytes * tp) if t.kind == MEMORY else t: n for t, n in s.tasks.items()}
        return Workload(tasks, {**s.transfers, **more})

    sent = Transfer("all_gather", named(layout.together, dense=TENSOR), last.largest_bytes / 2 * (tp - 1))
    return replace(
        last, forward=whole(last.forward, {sent: 1.0}), backward=whole(last.backward, {}), saved_bytes=last.saved_bytes * tp, largest_bytes=last.largest_bytes * tp
    )  # fmt: skip


def halves_of(p: Piece, layout: Layout, runtime: Runtime, cost: Cost) -> tuple[Seconds, Seconds]:
    """Forward and backward of a piece, with what is made again."""
    forward = seconds(p.forward, cost, runtime, False, p.scores_bytes)
    backward = seconds(p.backward, cost, runtime, True, p.scores_bytes)
    if p.layers and layout.recompute == "full":
        backward += forward
    elif p.layers and layout.recompute == "balanced":
        backward += seconds(p.recompute, cost, runtime, False)
    elif p.layers and layout.recompute == "selective" and runtime.unfused_passes:
        core = Workload({t: n for t, n in p.forward.tasks.items() if t.is_core})
        backward += seconds(core, cost, runtime, False, p.scores_bytes)
    return forward, backward


def _total(stage: Stage, of: Mapping[Piece, Seconds]) -> Seconds:
    return sum((of[p].times(n) for p, n in stage.items()), NOTHING)


def _hop_s(pieces: Sequence[Piece], layout: Layout, cost: Cost) -> float:
    """What one stage hands to the next, forwards; the same comes back.

    What tensor-parallel ranks hold alike, each sends a part of, and the receivers gather it (Narayanan et al., SC21, section 4.1)."""
    if layout.pp == 1:
        return 0.0
    nbytes = max((p.input_bytes for p in pieces if p.layers), default=0.0)
    alike = 1 if layout.sequence_parallel else layout.tp
    sent_s = cost.collective("send", cost.mesh.children("pp"), nbytes / alike).seconds
    if alike == 1:
        return sent_s
    tensor = tuple(c for a in named(layout.together, dense=TENSOR) for c in cost.mesh.children(a))
    return sent_s + cost.collective("all_gather", tensor, nbytes * (alike - 1) / alike).seconds


def update_s(params: Held, layout: Layout, runtime: Runtime, cost: Cost, ways: int, optimizer: str | type) -> float:
    mine = params.dense / ways + params.experts / experts_over(layout, ways)
    whole = mine if layout.zero == 3 else params.total
    return cost.optimizer_s(mine, kind_of(optimizer).traffic_bytes, whole if runtime.clears_gradients else 0.0)


def model_flops(pieces: Sequence[Piece], square: bool) -> float:
    """Of a micro-batch on one device: products forward and backward, attention three times its forward (what its backward makes again is not the model's)."""
    total = 0.0
    for p in pieces:
        for workload, times in ((p.forward, 3.0), (p.backward, 0.0)):
            for t, n in workload.tasks.items():
                if t.is_core:
                    total += max(1, p.layers) * times * n * (t.square_flops if square else t.even_flops)
        for workload in (p.forward, p.backward):
            total += max(1, p.layers) * sum(
                n * (t.flops - t.remade_flops) for t, n in workload.tasks.items() if not t.square_flops and not t.again
            )
    return total
