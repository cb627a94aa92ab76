"""How L equal layers are dealt to the p v stages of a pipeline, when what comes before the first and after the last layer weighs, too.

In steady state a pipeline is as slow as its slowest rank, so that is what is made small:

    minimise over n:  max over ranks of  x_r + n_r t        n_0 + ... + n_{p-1} = L,  n_r <= most_r

with x_0 and x_{p-1} the embedding's and the head's time, and at least one layer in every stage but the first and the last, which may hold nothing else
than these (as Llama 3's 405B does: 126 layers on 128 stages). Layers are alike, so it is exact to deal them one by one, each to the rank that it makes the
least slow: some rank had to take the layer that made the maximum, and each of the others would have been as slow with one more. A rank's layers are dealt to its chunks in the
same way, so that no chunk holds up the round. Where it is all the same, layers go to the middle of the model, then to its front: Megatron-LM refuses
layers that do not divide, and its users leave the ends, where embedding and head are, a layer short.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from autopar.errors import LayoutError


def deal(
    layers: int,
    ranks: int,
    chunks: int = 1,
    *,
    layer_s: float = 1.0,
    first_s: float = 0.0,
    last_s: float = 0.0,
    most: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Layers by stage (stage s is chunk s // ranks of rank s % ranks); none only in the first and last.

    layer_s, first_s, last_s: forward and backward of a layer, of what comes before the first one and after the last one, for one micro-batch. With
    the last two zero, layers are spread evenly. most: the layers that fit into each rank's memory.
    Raises LayoutError where there are too few layers for the stages, or where they do not fit.
    """
    where = f"{layers} layers on {ranks} ranks x {chunks} chunks"
    if ranks < 1 or chunks < 1:
        raise LayoutError(f"A pipeline of {ranks} ranks with {chunks} chunks each.", fix="Both start at 1.")
    if not layer_s > 0 or first_s < 0 or last_s < 0:
        raise LayoutError(
            f"Layers of {layer_s} s, ends of {first_s} s and {last_s} s.", where=where, fix="A layer takes time, the ends none or some."
        )
    stages = ranks * chunks
    least = [1] * stages
    least[0] = least[-1] = 0
    if layers < max(1, sum(least)):
        raise LayoutError(f"{layers} layers leave some of {stages} stages empty.", where=where, fix="Take fewer ranks or chunks.")
    caps = [layers] * ranks if most is None else list(most)
    if len(caps) != ranks:
        raise LayoutError(f"{len(caps)} limits for {ranks} ranks.", where=where, fix="Give `most` a number for every rank.")
    if any(sum(least[r::ranks]) > caps[r] for r in range(ranks)) or sum(caps) < layers:
        raise LayoutError(
            f"Ranks have memory for {sum(max(c, 0) for c in caps)} layers, the tightest for {min(caps)}.",
            where=where,
            fix="Every chunk needs room for a layer, and all together for all layers: take more ranks, recompute, or offload.",
        )
    x = [0.0] * stages
    x[0] += first_s
    x[-1] += last_s
    depth = [min(s, stages - 1 - s) for s in range(stages)]
    rank_depth = [min(r, ranks - 1 - r) for r in range(ranks)]
    by_rank = _fill(
        layers, [sum(x[r::ranks]) for r in range(ranks)], layer_s, [sum(least[r::ranks]) for r in range(ranks)], caps, rank_depth
    )
    out = [0] * stages
    for r, n in enumerate(by_rank):
        out[r::ranks] = _fill(n, x[r::ranks], layer_s, least[r::ranks], [n] * chunks, depth[r::ranks])
    return tuple(out)


def explicit(counts: Sequence[int], layers: int, ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """A dealing given by hand, by stage; a stage may have no layer (an embedding or a head by itself).

    Raises LayoutError unless there is one number, not negative, for every stage, and all layers are dealt.
    """
    if len(counts) != ranks * chunks or min(counts) < 0 or sum(counts) != layers:
        raise LayoutError(
            f"{list(counts)} does not deal {layers} layers to {ranks} ranks x {chunks} chunks.",
            fix=f"Give {ranks * chunks} numbers, not negative, that add up to {layers}: chunk 0 of every rank, then chunk 1 of every rank.",
        )
    return tuple(counts)


def stage_times(counts: Sequence[int], layer_s: float, first_s: float = 0.0, last_s: float = 0.0) -> tuple[float, ...]:
    """Seconds by stage, of one micro-batch, either forward or backward, from layers by stage."""
    out = [n * layer_s for n in counts]
    out[0] += first_s
    out[-1] += last_s
    return tuple(out)


def _fill(layers: int, x: Sequence[float], layer_s: float, least: Sequence[int], most: Sequence[int], depth: Sequence[int]) -> list[int]:
    """Layers by bin, `least` to `most`: the slowest bin, with x beside its layers, as fast as can be. Of equals, the deepest takes the layer."""
    n = list(least)
    bins = [(x[i] + (n[i] + 1) * layer_s, -depth[i], i) for i in range(len(x)) if n[i] < most[i]]
    heapq.heapify(bins)
    for _ in range(layers - sum(least)):
        _, middle, i = bins[0]
        n[i] += 1
        if n[i] < most[i]:
            heapq.heapreplace(bins, (x[i] + (n[i] + 1) * layer_s, middle, i))
        else:
            heapq.heappop(bins)
    return n
