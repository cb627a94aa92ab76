"""Who does what in which order: p ranks, m micro-batches, v chunks of the model on every rank.

The model is cut into S = p v stages, in the order of the data; stage s is chunk s // p of rank s % p. A micro-batch passes 2S rows:

    row s           the forward F of stage s
    row 2S - 1 - s  its backward B

so that every row but the first needs the row before it, of the same micro-batch, and nothing else. (The backward of a stage also needs what its
forward saved; that lies earlier on the same path.) A rank works off a fixed list, one work at a time:

    gpipe        all forwards, then all backwards.  Huang et al., "GPipe", 2019
    1f1b         p - 1 - rank forwards, then a forward and a backward in turn, then the backwards that are left.  Narayanan et al.,
                 "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush), 2021; Megatron-LM, forward_backward_pipelining_without_interleaving
    interleaved  the same in turns over chunks: N micro-batches through chunk 0, the same N through chunk 1, and so on, then the next N. Backward
                 takes the chunks from the last. First come 2 (p - 1 - rank) + (v - 1) N forwards.  Narayanan et al., "Efficient Large-Scale
                 Language Model Training on GPU Clusters Using Megatron-LM" (SC21), section 2.2; Megatron-LM, forward_backward_pipelining_with_interleaving

N, the `group`, is p in SC21, which therefore wants m to be a multiple of p. Newer Megatron-Core (`microbatch_group_size_per_vp_stage`) takes any N
from p to m; the last group holds what is left, which must be nothing or at least p: fewer cannot fill the ranks on their way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.errors import LayoutError
from autopar.pipeline.actions import Action, Lists

KINDS = ("gpipe", "1f1b", "interleaved")


class Work(NamedTuple):
    """phase: "F" or "B"; chunk: of this rank, from 0; micro_batch: from 0."""

    phase: str
    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """kind: see KINDS; ranks: p; micro_batches: m, of one step; chunks: v, of each rank; group: N of "interleaved", None means p.

    Raises LayoutError for what the schedule cannot be, with the nearest numbers that it can.
    """

    kind: str
    ranks: int
    micro_batches: int
    chunks: int = 1
    group: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise LayoutError(f"There is no pipeline schedule {self.kind!r}.", fix=f"Name one of {', '.join(KINDS)}.")
        for name in ("ranks", "micro_batches", "chunks"):
            if getattr(self, name) < 1:
                raise LayoutError(f"A pipeline of {getattr(self, name)} {name}.", where=f"schedule {self.kind}", fix=f"{name} starts at 1.")
        if self.kind != "interleaved":
            if self.chunks > 1 or self.group is not None:
                raise LayoutError(
                    f"{self.kind} has one chunk a rank and no groups.",
                    where=f"chunks={self.chunks}, group={self.group}",
                    fix="Use kind='interleaved'.",
                )
        elif self.chunks == 1:
            raise LayoutError("An interleaved pipeline needs two chunks a rank or more.", fix="Use kind='1f1b', or chunks=2.")
        else:
            self._check_group()

    def _check_group(self) -> None:
        p, m, n = self.ranks, self.micro_batches, self.size
        where = f"interleaved, ranks={p}, micro_batches={m}, group={n}"
        if m < p:
            raise LayoutError(
                f"{m} micro-batches cannot fill {p} ranks.",
                where=where,
                fix=f"Take at least {p} micro-batches (smaller ones), fewer ranks, or '1f1b'.",
            )
        if not p <= n <= m:
            raise LayoutError(f"A group of {n} micro-batches.", where=where, fix=f"Take a group from {p} (ranks) to {m} (micro-batches).")
        if 0 < m % n < p:
            fits = next(g for g in range(p, m + 1) if m % g == 0 or m % g >= p)  # m itself does
            near = sorted({max(p, m // p * p), m // p * p + p})
            raise LayoutError(
                f"Groups of {n} micro-batches leave {m % n} at the end, fewer than the {p} ranks.",
                where=where,
                fix=f"Take {' or '.join(map(str, near))} micro-batches (a multiple of ranks), or group={fits}, which keeps more of them in flight.",
            )

    @property
    def stages(self) -> int:
        """S = p v, of the whole model."""
        return self.ranks * self.chunks

    @property
    def size(self) -> int:
        """Micro-batches of a group: one chunk takes so many in a row."""
        if self.kind == "interleaved":
            return self.ranks if self.group is None else self.group
        return self.micro_batches

    def warmup(self, rank: int) -> int:
        """Forwards before the first pair of a forward and a backward."""
        behind = self.ranks - 1 - rank
        wanted = {"gpipe": self.micro_batches, "1f1b": behind, "interleaved": 2 * behind + (self.chunks - 1) * self.size}[self.kind]
        return min(wanted, self.micro_batches * self.chunks)

    @cached_property
    def _turns(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Chunk and micro-batch of every forward, in order; the same on all ranks. Backwards follow it with the chunks counted from the last."""
        m, v, n = self.micro_batches, self.chunks, self.size
        groups = [np.arange(first, min(first + n, m)) for first in range(0, m, n)]
        return np.concatenate([np.repeat(np.arange(v), len(g)) for g in groups]), np.concatenate([np.tile(g, v) for g in groups])

    def order(self, rank: int) -> NDArray[np.int64]:
        """The rank's works, each as row x m + micro-batch."""
        chunk, micro_batch = self._turns
        p, m, s = self.ranks, self.micro_batches, self.stages
        forward = (chunk * p + rank) * m + micro_batch
        backward = (2 * s - 1 - (self.chunks - 1 - chunk) * p - rank) * m + micro_batch
        w = self.warmup(rank)
        end = 2 * len(forward) - w  # of the pairs
        out = np.empty(2 * len(forward), np.int64)
        out[:w], out[w:end:2] = forward[:w], forward[w:]
        out[w + 1 : end : 2], out[end:] = backward[: len(forward) - w], backward[len(forward) - w :]
        return out

    def lists(self) -> Lists:
        """What every rank does, written out."""
        p = self.ranks
        ranks = tuple(tuple(Action(w.chunk * p + r, w.phase, w.micro_batch) for w in self.works(r)) for r in range(p))
        return Lists(ranks, self.kind)

    def works(self, rank: int) -> tuple[Work, ...]:
        """`order` in words."""
        out = []
        for work in self.order(rank).tolist():
            row, micro_batch = divmod(work, self.micro_batches)
            stage = min(row, 2 * self.stages - 1 - row)
            out.append(Work("F" if row < self.stages else "B", stage // self.ranks, micro_batch))
        return tuple(out)
